"""What the background asks of SQLite, which makes a whole thread wait for locks and the disk."""

import fcntl
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from gevent.threadpool import ThreadPool
from peewee import PeeweeException, SqliteDatabase

import models
from models import CHART_HOURS, HOUR
from ratelimit import Usage

log = logging.getLogger(__name__)

# One statement for all keys, because for each the thread would have to wait for Python's lock.
SPENT = """(SELECT key, json_extract(value, '$[0]') AS total, json_extract(value, '$[1]') AS reset,
    json_extract(value, '$[2]') AS used FROM json_each(?))"""
SAVE_USAGE = f"""UPDATE api_key SET total = api_key.total + spent.total, reset = spent.reset,
    used = spent.used + CASE WHEN api_key.reset = spent.reset THEN api_key.used ELSE 0 END,
    last_used_at = ? FROM {SPENT} AS spent WHERE api_key.id = spent.key"""
SAVE_HOUR = f"""INSERT INTO hourly_usage (hour, key_id, requests)
    SELECT ?, key, total FROM {SPENT} WHERE true
    ON CONFLICT (hour, key_id) DO UPDATE SET requests = hourly_usage.requests + excluded.requests"""

# With so few keys to save, all is then written into the one file, so that another may be put in its
# place. With thousands that would double the work.
FEW = 100


class SqliteStore:
    """One connection in a thread of its own, which saves counts and notices changes."""

    def __init__(self, file: Path) -> None:
        options, uri = models.SQLITE_OPTIONS, models.database.database
        self._database = SqliteDatabase(uri, timeout=models.BUSY_SECONDS, **options)
        self._file, self._thread = file, ThreadPool(1)
        self._seen = (0, 0)  # the file's number and time
        self._version: int | None = None  # of the data, as this connection saw it

    def open(self) -> None:
        """Lock the file, and warn if another process has done so.

        Exclusive only for this test, then shared: else BSD and macOS would keep SQLite out.
        """
        self._locked = self._file.open("rb")
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            log.warning("another process serves %s, too; both may exceed the limits", self._file)
        fcntl.flock(self._locked, fcntl.LOCK_SH)

    def close(self) -> None:
        """Close the last connection: SQLite then writes everything into the one file."""
        self._thread.apply(self._close)
        self._locked.close()

    def exchange(self, spent: dict[str, Usage], keys: set[str]) -> tuple[set[str], bool]:
        """Save counts, all or none; raises RuntimeError, OSError, PeeweeException.

        Returns which of the keys have ended, and whether anybody else has written.
        """
        self._thread.size = 1  # raises RuntimeError if it cannot start, before anything is queued
        if self._seen != (stamp := self._stamp()):  # another file, or somebody wrote into it
            models.database.close_idle()
            self._thread.apply(self._close)
            self._seen = stamp
        outcome: Any = self._thread.apply(self._try_exchange, (spent, keys))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    def _try_exchange(self, spent: dict[str, Usage], keys: set[str]) -> object:
        """Returns an exception, because gevent prints what a thread raises."""
        try:
            changed = self._has_changed()
            ended = models.ended_keys(keys, self._database)
            if spent:
                self._save(spent, models.now())
            with suppress(PeeweeException, OSError):  # the counts are saved already
                if len(spent) < FEW:
                    self._database.execute_sql("PRAGMA wal_checkpoint(TRUNCATE)")
                # Only the time: the path may lead to another file by now.
                self._seen = self._seen[0], self._stamp()[1]
            return ended, changed
        except Exception as error:
            self._close()
            return error

    def _has_changed(self) -> bool:
        """Whether another connection has written, or this one is new and cannot know."""
        self._database.connect(reuse_if_open=True)
        before = self._version
        (self._version,) = self._database.execute_sql("PRAGMA data_version").fetchone()
        return self._version != before

    def _close(self) -> None:
        self._database.close()
        self._version = None

    def _stamp(self) -> tuple[int, int]:
        file = self._file.stat()
        return file.st_ino, file.st_mtime_ns

    def _save(self, spent: dict[str, Usage], now: int) -> None:
        """A request counts for the hour in which it is saved, up to half a second late."""
        hour = now - now % HOUR
        usage = json.dumps(spent, sort_keys=True)  # in the table's order: fewer pages are written
        with self._database.atomic():
            cursor = self._database.cursor()
            cursor.execute(SAVE_USAGE, (now, usage))
            cursor.execute(SAVE_HOUR, (hour, usage))
            cursor.execute("DELETE FROM hourly_usage WHERE hour < ?", (hour - CHART_HOURS * HOUR,))
