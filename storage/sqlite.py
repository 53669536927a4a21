"""Keys and counts in SQLite: counts are kept in memory, and saved twice a second.

No other greenlet runs while SQLite works, so its connections only wait for those of other
processes. Pages and commands wait until the disk has what they store; counts don't.
"""

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from peewee import OperationalError, PeeweeException, SqliteDatabase
from playhouse.pool import PooledSqliteDatabase

from models import HOUR, ApiKey, now
from ratelimit import Allowance, Limiter, Quota, Usage
from storage.key_store import KeyStore
from storage.outage import reason_of

log = logging.getLogger(__name__)

# `Usage.followed_by` in SQL. `Limiter.hit` keeps the row's `reset` as long as its window lasts. If
# both are equal, this adds; if not, a new window has begun, or the key has another tier.
SAVE = """UPDATE api_key SET total = total + ?,
    used = ? + CASE WHEN reset = ? THEN used ELSE 0 END, reset = ?, last_used_at = ?
    WHERE id = ?"""
SAVE_HOUR = """INSERT INTO hourly_usage (hour, key_id, requests) VALUES (?, ?, ?)
    ON CONFLICT (hour, key_id) DO UPDATE SET requests = requests + excluded.requests"""
BUSY_SECONDS = 0.05  # how long a request waits for the lock of another process
LAST_SECONDS = 1  # how long the last save waits for it
COMMAND_SECONDS = 10  # how long a command waits for it
PAUSES = 48 * [0.125]  # a start waits for 6 s: the previous service may still be stopping
PRAGMAS = {"journal_mode": "wal", "foreign_keys": 1}
# A transaction takes its lock at the start, so reading and then writing needs no retry. A query
# without a connection_context is a mistake, so it fails.
PAGE_OPTIONS = {
    "uri": True,
    "autoconnect": False,
    "lock_type": "IMMEDIATE",
    "pragmas": PRAGMAS | {"synchronous": "full"},  # each commit waits for the disk
}
# Only a checkpoint waits for the disk; SQLite makes one after some 4 MiB. With a million keys, a
# cache of 32 MB saves 10 % of a request.
COUNT_PRAGMAS = PRAGMAS | {"synchronous": "normal", "cache_size": -32_000}


def uri(file: Path) -> str:
    """A URI that opens the file, and never creates it.

    A new file would take over the log (-wal) of one that was moved away, and be damaged.
    """
    return f"{file.as_uri()}?mode=rw"


def check_file(file: Path) -> None:
    """Create the file if it is missing, for its owner only.

    Raises OSError if only its log (-wal) is there, because then the file was moved away. Raises it
    also if a permission is missing: SQLite would only say that it cannot open the file.
    """
    real = file.resolve()
    wal = Path(f"{real}-wal")
    if not file.exists():
        if wal.exists():
            raise OSError(
                f"the file is missing, but {wal.name} is there: put the file back, or delete "
                f"{wal.name} to start with an empty database"
            )
        file.touch(mode=0o600)
    for path in (real, real.parent):  # SQLite creates other files beside it
        if not os.access(path, os.R_OK | os.W_OK):
            raise OSError(
                f"no permission to read and write {path}; "
                "change its owner, or make its file system writable"
            )


def lock(file: Path) -> None:
    """Lock the file for this service; raises OSError if another one uses it.

    Two services would double all limits. The lock is on a file beside the database, because closing
    a second descriptor of the database would end SQLite's own locks. Worker processes inherit the
    descriptor, and the lock ends with the last of them.
    """
    descriptor = os.open(f"{file.resolve()}-lock", os.O_RDWR | os.O_CREAT, 0o600)
    for pause in PAUSES:
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(pause)
    raise OSError(
        "another service uses this file; stop it, or start this one with "
        "DATABASE_URL=sqlite:///other.db"
    )


class RollbackMixin:
    """Ignores a rollback that fails: when the disk is full, SQLite has rolled back by itself."""

    def rollback(self) -> None:
        with suppress(OperationalError):
            super().rollback()  # type: ignore[misc]


class PageDatabase(RollbackMixin, PooledSqliteDatabase):
    """The connections of pages."""

    def __init__(self, file: Path) -> None:
        super().__init__(uri(file), **PAGE_OPTIONS)
        self.timeout = BUSY_SECONDS  # SQLite's; the option of this name is the pool's


class CommandDatabase(RollbackMixin, SqliteDatabase):
    """The connection of a command."""

    def __init__(self, file: Path) -> None:
        super().__init__(uri(file), timeout=COMMAND_SECONDS, **PAGE_OPTIONS)


@contextmanager
def peewee_errors() -> Iterator[None]:
    """Raises OperationalError, as peewee does, instead of an error of SQLite."""
    try:
        yield
    except sqlite3.Error as error:
        raise OperationalError(error, str(error)) from None


class Store(KeyStore):
    """A KeyStore of one process. The usage of a key is its row, plus what the Limiter has counted.

    `hit` and `save` must never yield to another greenlet: each is one step for all the others. A
    fixture of the tests notices if one does.
    """

    def __init__(self, file: Path) -> None:
        self._database = SqliteDatabase(
            uri(file),
            uri=True,
            timeout=BUSY_SECONDS,
            thread_safe=False,  # all greenlets share the connection
            pragmas=COUNT_PRAGMAS,
        )
        self._limiter = Limiter()

    def hit(self, key_id: str, quota: Quota) -> Allowance | None:
        key = self.find(key_id)
        return key and self._limiter.hit(key_id, quota, key.usage)

    def usage_of(self, key: ApiKey) -> Usage:
        return self._limiter.usage(key.id, key.usage)

    def save(self) -> bool:
        return self._limiter.save(self._store)

    @peewee_errors()  # the commit at the end may raise one, too
    def _store(self, counted: list[tuple[str, Usage]]) -> None:
        """Add to the rows what was counted: in the order of the table, so SQLite writes less.

        A request counts for the hour in which it is saved.
        """
        moment = now()
        connection = self._database.connection()
        # In the order of the placeholders in SAVE and SAVE_HOUR.
        usage = [(use.total, use.used, use.reset, use.reset, moment, key) for key, use in counted]
        hours = [(moment - moment % HOUR, key, use.total) for key, use in counted]
        with connection:  # commits or rolls back at the end
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(SAVE, usage)  # peewee has no executemany
            connection.executemany(SAVE_HOUR, hours)
        self.clear_cache()  # the cached rows lack what was stored

    def save_and_close(self) -> None:
        with suppress(PeeweeException):  # all requests have ended, so a wait holds nobody up
            self._query(f"PRAGMA busy_timeout = {1000 * LAST_SECONDS}")
        super().save_and_close()
        try:
            # A checkpoint that waits for readers would make the stop too long.
            self._query(f"PRAGMA busy_timeout = {1000 * BUSY_SECONDS:.0f}")
            _, frames, copied = self._query("PRAGMA wal_checkpoint(TRUNCATE)")[0]
            hindrance = "" if frames == copied else "another program reads an older snapshot"
        except PeeweeException as error:
            hindrance = reason_of(error)
        if hindrance:
            log.warning("the file is complete only together with its -wal file: %s", hindrance)
        self._database.close()

    @peewee_errors()  # peewee converts errors of `execute`, but not of `fetchall`
    def _query(self, query: str, *values: object) -> list[Any]:
        return self._database.execute_sql(query, values).fetchall()
