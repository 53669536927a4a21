"""What happens twice a second beside the requests: counts are saved, changed keys forgotten."""

import time

import gevent
from flask import Flask
from gevent.event import Event
from peewee import SqliteDatabase

from auth import guard
from channel import REVOKED
from models import OPTIONS, outage
from ratelimit import Spent
from sockets import crowd

SYNC_SECONDS = 0.5
HOUR = 3600
KEPT_HOURS = 24  # of hourly usage, for the chart
LATELY_SECONDS = 60  # changes are looked for that much further back: clocks may differ

SAVE_USAGE = """INSERT INTO key_usage (key_id, total, reset, used, last_used_at)
    VALUES (?, ?, ?, ?, ?) ON CONFLICT (key_id) DO UPDATE SET
    total = key_usage.total + excluded.total, reset = excluded.reset, used = excluded.used,
    last_used_at = excluded.last_used_at"""
SAVE_HOUR = """INSERT INTO hourly_usage (hour, key_id, requests) VALUES (?, ?, ?)
    ON CONFLICT (hour, key_id) DO UPDATE SET requests = hourly_usage.requests + excluded.requests"""
DROP_HOURS = "DELETE FROM hourly_usage WHERE hour < ?"
CHANGED_KEYS = "SELECT id, revoked_at FROM api_key WHERE changed_at >= ?"


class Background:
    """Keeps memory and database in step, over a connection of its own."""

    def __init__(self, app: Flask) -> None:
        self._guard, self._crowd = guard(app), crowd(app)
        self._database = SqliteDatabase(app.extensions["settings"].database, **OPTIONS)
        self._seen_until = int(time.time())
        self._stopping = Event()

    def run(self) -> None:
        """Sync until `stop`, and then once more."""
        while not self._stopping.wait(SYNC_SECONDS):
            self.sync()
        self.sync()

    def stop(self) -> None:
        self._stopping.set()

    def sync(self) -> None:
        """Learn what changed and save what was counted, or else keep it and say so once."""
        spent = self._guard.limiter.take_unsaved()
        # In a real thread: whatever the database makes it wait for, no greenlet waits with it.
        result = gevent.get_hub().threadpool.apply(self._exchange, (spent,))
        if isinstance(result, Exception):
            self._guard.limiter.put_back(spent)
            self._guard.forget()  # or a revoked key would go unnoticed
            outage.began(result)
            return
        outage.ended()
        for key_id, revoked_at in result:
            self._guard.forget(key_id)
            if revoked_at:
                self._crowd.end(key_id, REVOKED)

    def _exchange(self, spent: list[Spent]) -> list[tuple[str, int | None]] | Exception:
        """Save counts, all or none, and read changes: id and revoked_at of each key."""
        now = int(time.time())
        try:
            with self._database.connection_context():
                if spent:
                    self._save(spent, now)
                since = self._seen_until - LATELY_SECONDS
                changes = self._database.execute_sql(CHANGED_KEYS, (since,)).fetchall()
            self._seen_until = now
            return list(changes)
        except Exception as error:  # returned, because gevent prints what a thread raises
            return error

    def _save(self, spent: list[Spent], now: int) -> None:
        """A request counts for the hour in which it is saved, half a second late."""
        hour = now - now % HOUR
        usage = [(key, requests, used.reset, used.used, now) for key, requests, used in spent]
        with self._database.atomic():
            cursor = self._database.cursor()
            cursor.executemany(SAVE_USAGE, usage)
            cursor.executemany(SAVE_HOUR, [(hour, key, requests) for key, requests, _ in spent])
            cursor.execute(DROP_HOURS, (hour - KEPT_HOURS * HOUR,))
