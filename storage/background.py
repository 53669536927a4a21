"""Twice a second: saves counts, forgets keys, and closes the time sockets of ended keys."""

import fcntl
import logging
from pathlib import Path
from typing import IO, Any

import gevent
from flask import Flask
from gevent.event import Event
from gevent.threadpool import ThreadPool
from peewee import SqliteDatabase, chunked

import models
from models import HOUR, HOURS, ApiKey, User
from ratelimit import Spent
from storage.postgres import DELETE_HOURS, Postgres

log = logging.getLogger(__name__)

SYNC_SECONDS = 0.5
IDS_PER_QUERY = 1000

SAVE_USAGE = """UPDATE api_key SET total = total + ?, reset = ?, used = ?, last_used_at = ?
    WHERE id = ?"""
SAVE_HOUR = """INSERT INTO hourly_usage (hour, key_id, requests) VALUES (?, ?, ?)
    ON CONFLICT (hour, key_id) DO UPDATE SET requests = hourly_usage.requests + excluded.requests"""


class Background:
    """Keeps memory and database in step.

    SQLite makes its whole thread wait for locks and the disk, so it has its own thread here.
    """

    def __init__(self, app: Flask) -> None:
        self._guard, self._sockets = app.extensions["guard"], app.extensions["sockets"]
        self._database: Any
        self._thread = self._file = None
        config = app.extensions["settings"]
        if config.postgres:
            # A connection of its own: requests would wait while it connects to a frozen server.
            self._database = Postgres(config.postgres, connections=1)
        else:
            options = {"timeout": models.BUSY_SECONDS, **models.SQLITE_OPTIONS}
            self._database = SqliteDatabase(models.database.database, **options)
            self._thread, self._file = ThreadPool(1), config.sqlite
        self.stopping = Event()

    def run(self) -> None:
        """Sync until `stopping`, and then until everything is saved; then close the database."""
        locked = self._file and warn_if_shared(self._file)
        while not self.stopping.wait(SYNC_SECONDS):
            self.sync()
        while self._guard.limiter.unsaved() and not self.sync():
            gevent.sleep(0.1)
        # SQLite writes everything into the one file when its last connection is closed.
        models.database.close_all()
        if locked:
            locked.close()

    def sync(self) -> bool:
        """Save the counts and act on what the database says; False if that failed."""
        spent = self._guard.limiter.unsaved()
        try:
            ended, error = self._in_thread(spent, self._sockets.keys())
        except RuntimeError as failure:
            ended, error = set(), failure
        models.outage.note(error)
        if not error:
            # Together, so that no key is remembered with less usage than was just saved.
            self._guard.limiter.saved(spent)
            self._guard.forget()
        self._sockets.revoke(ended)
        return not error

    def _in_thread(self, *args: Any) -> tuple[set[str], Exception | None]:
        if self._thread is None:
            return self._exchange(*args)  # PostgreSQL makes only the one greenlet wait
        self._thread.size = 1  # raises RuntimeError if it cannot start, before anything is queued
        outcome: tuple[set[str], Exception | None] = self._thread.apply(self._exchange, args)
        return outcome

    def _exchange(self, spent: list[Spent], keys: set[str]) -> tuple[set[str], Exception | None]:
        """Save counts, all or none; returns those of the keys that have ended, and any error."""
        try:
            with self._database.connection_context():
                ended = keys - self._live(keys)
                if self._thread is None:
                    self._database.execute_sql(DELETE_HOURS)
                if spent:
                    self._save(spent, models.now())  # last: nothing may fail after it
            return ended, None
        except Exception as error:  # returned, because gevent prints what a thread raises
            return set(), error

    def _live(self, keys: set[str]) -> set[str]:
        live: set[str] = set()
        for ids in chunked(keys, IDS_PER_QUERY):
            query = ApiKey.select(ApiKey.id).join(User).where(ApiKey.id.in_(ids), ApiKey.live())
            live.update(key_id for (key_id,) in query.tuples().bind(self._database))
        return live

    def _save(self, spent: list[Spent], now: int) -> None:
        """A request counts for the hour in which it is saved, up to half a second late."""
        hour = now - now % HOUR
        spent = sorted(spent)  # in the order of the table, so that fewer pages are written
        usage = [(requests, used.reset, used.used, now, key) for key, requests, used in spent]
        with self._database.atomic():
            cursor = self._database.cursor()
            cursor.executemany(SAVE_USAGE, usage)
            cursor.executemany(SAVE_HOUR, [(hour, key, requests) for key, requests, _ in spent])
            cursor.execute("DELETE FROM hourly_usage WHERE hour < ?", (hour - HOURS * HOUR,))


def warn_if_shared(file: Path) -> IO[bytes]:
    """Lock the SQLite file, and warn if another process has done so.

    The lock that stays is a shared one. With any other, BSD and macOS would keep SQLite out.
    """
    locked = file.open("rb")
    try:
        fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        log.warning("another process serves %s, too; both may exceed the limits", file)
    fcntl.flock(locked, fcntl.LOCK_SH)
    return locked
