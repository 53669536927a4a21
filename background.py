"""What happens twice a second beside the requests: counts are saved, changed keys forgotten."""

import gevent
from flask import Flask
from gevent.event import Event
from peewee import SqliteDatabase

import models
from channel import REVOKED
from models import HOUR, HOURS
from ratelimit import Spent

SYNC_SECONDS = 0.5
LATELY_SECONDS = 60  # changes are looked for that much further back: clocks may differ

SAVE_USAGE = """UPDATE api_key SET total = total + ?, reset = ?, used = ?, last_used_at = ?
    WHERE id = ?"""
SAVE_HOUR = """INSERT INTO hourly_usage (hour, key_id, requests) VALUES (?, ?, ?)
    ON CONFLICT (hour, key_id) DO UPDATE SET requests = hourly_usage.requests + excluded.requests"""
DROP_HOURS = "DELETE FROM hourly_usage WHERE hour < ?"
CHANGED_KEYS = "SELECT id, revoked_at FROM api_key WHERE changed_at >= ?"


class Background:
    """Keeps memory and database in step, over a connection of its own."""

    def __init__(self, app: Flask) -> None:
        self._guard, self._crowd = app.extensions["guard"], app.extensions["crowd"]
        self._database = SqliteDatabase(models.database.database, **models.OPTIONS)
        self._seen_until = models.now()
        self.stopping = Event()

    def run(self) -> None:
        """Sync until `stopping`, and then once more, for good."""
        while not self.stopping.wait(SYNC_SECONDS):
            self.sync()
        while not self.sync():
            gevent.sleep(0.1)  # as long as the worker waits: a lock may be gone by then

    def sync(self) -> bool:
        """Save what was counted and learn what changed; False, and said once, if it failed."""
        spent = self._guard.limiter.unsaved()
        # In a real thread: whatever the database makes it wait for, no greenlet waits with it.
        changes, error = gevent.get_hub().threadpool.apply(self._exchange, (spent,))
        models.outage.note(error)
        if error:
            self._guard.known.clear()  # or a revoked key might go unnoticed
        else:
            self._guard.limiter.saved(spent)
        for key_id, revoked_at in changes:
            self._guard.known.pop(key_id, None)
            if revoked_at:
                self._crowd.end(REVOKED, key_id)
        return not error

    def _exchange(self, spent: list[Spent]) -> tuple[list[tuple[str, int]], Exception | None]:
        """Save counts, all or none; the answer is the id and revoked_at of each changed key."""
        now, changes = models.now(), []
        try:
            with self._database.connection_context():
                since = self._seen_until - LATELY_SECONDS
                changes = self._database.execute_sql(CHANGED_KEYS, (since,)).fetchall()
                self._save(spent, now)  # last: what is saved must not fail afterwards
            self._seen_until = now
        except Exception as error:  # returned, because gevent prints what a thread raises
            return changes, error
        return changes, None

    def _save(self, spent: list[Spent], now: int) -> None:
        """A request counts for the hour in which it is saved, half a second late."""
        hour = now - now % HOUR
        spent = sorted(spent)  # as the tables are: less of them to be read and written
        usage = [(requests, used.reset, used.used, now, key) for key, requests, used in spent]
        with self._database.atomic():
            cursor = self._database.cursor()
            cursor.executemany(SAVE_USAGE, usage)
            cursor.executemany(SAVE_HOUR, [(hour, key, requests) for key, requests, _ in spent])
            cursor.execute(DROP_HOURS, (hour - HOURS * HOUR,))
