"""Keys and counts in SQLite: counts are kept in memory, and saved twice a second.

Everything runs in the main thread, and no other greenlet runs while SQLite works. So no connection
waits for a lock in SQLite: pages wait in their greenlet, and a save is tried again half a second
later. What pages and commands store waits for the disk, and counts don't.
"""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
from peewee import OperationalError, SqliteDatabase
from playhouse.pool import MaxConnectionsExceeded, PooledSqliteDatabase

from models import HOUR, ApiKey, now
from ratelimit import Allowance, Limiter, Quota
from storage import Store

SAVE = """UPDATE api_key SET total = total + ?,
    used = ? + CASE WHEN reset = ? THEN used ELSE 0 END, reset = ?, last_used_at = ?
    WHERE id = ?"""
SAVE_HOUR = """INSERT INTO hourly_usage (hour, key_id, requests) VALUES (?, ?, ?)
    ON CONFLICT (hour, key_id) DO UPDATE SET requests = requests + excluded.requests"""
PRAGMAS = {"journal_mode": "wal", "foreign_keys": 1}
DURABLE = {"synchronous": "full"}  # each commit waits for the disk
FAST = {"synchronous": "normal"}  # only a checkpoint does, which SQLite makes after some 4 MiB
BUSY = "database is locked", "Exceeded maximum connections."
CACHE_KIB = 32_000  # with a million keys, requests take 10 % less time


def uri(file: Path) -> str:
    """What opens a file, and never creates one.

    A new file in place of one that was moved away would take over its log (-wal), and be damaged.
    """
    return f"{file.as_uri()}?mode=rw"


class Sqlite(PooledSqliteDatabase):
    """Connections for pages and commands, on which a greenlet waits for a lock while others run.

    If SQLite itself waited, the whole process would.
    """

    def __init__(self, file: Path, patience: float) -> None:
        self._patience = patience
        # A transaction takes its lock at the start, so reading and then writing needs no retry.
        # A query without a connection_context is a mistake, so it fails.
        options = {"autoconnect": False, "lock_type": "IMMEDIATE", "pragmas": PRAGMAS | DURABLE}
        super().__init__(uri(file), uri=True, **options)
        self.timeout = 0  # SQLite's, for locks; as an option, it would be the pool's

    def connect(self, reuse_if_open: bool = False) -> bool:
        return bool(self._patiently(super().connect, reuse_if_open))

    def begin(self, lock_type: str | None = None) -> None:
        self._patiently(super().begin, lock_type)

    def execute_sql(self, sql: str, params: Any = None) -> Any:
        return self._patiently(super().execute_sql, sql, params)

    def _patiently(self, ask: Callable[..., Any], *args: object) -> Any:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return ask(*args)
            except (OperationalError, MaxConnectionsExceeded) as error:
                if str(error) not in BUSY:
                    raise
                if time.monotonic() > deadline:
                    raise OperationalError(str(error)) from None
            gevent.sleep(0.01)


class SqliteStore(Store):
    """A Store of one process. The usage of a key is its row, plus what the Limiter has counted."""

    lost = "the last %s could not be saved"

    def __init__(self, file: Path) -> None:
        super().__init__()
        pragmas = PRAGMAS | FAST | {"cache_size": -CACHE_KIB}
        options = {"uri": True, "timeout": 0, "thread_safe": False, "pragmas": pragmas}
        self._database = SqliteDatabase(uri(file), **options)
        self._limiter = Limiter()
        self._file = file

    def allowance(self, key: ApiKey, quota: Quota) -> Allowance:
        return self._limiter.hit(key.id, quota, key.usage, cost=0)

    def hit(self, key_id: str, quota: Quota) -> Allowance | None:
        key = self.find(key_id)
        return key and self._limiter.hit(key_id, quota, key.usage)

    def save(self) -> None:
        super().save()
        if not self._file.exists():  # the connections that are open still work
            raise OperationalError(f"{self._file} is gone; put it back before the service stops")

    def close(self) -> None:
        super().close()
        self._database.close()

    def _ask(self, query: str, *values: object) -> list[Any]:
        return list(self._database.execute_sql(query, values))

    def _unsaved(self) -> dict[str, int]:
        return {key_id: usage.total for key_id, usage in self._limiter.counted.items()}

    def _save(self) -> None:
        """A request counts for the hour in which it is saved."""
        if not self._limiter.counted:
            return
        moment, connection = now(), self._database.connection()
        counted = sorted(self._limiter.counted.items())  # in the table's order, so it writes less
        usage = [(u.total, u.used, u.reset, u.reset, moment, key) for key, u in counted]
        hours = [(moment - moment % HOUR, key, use.total) for key, use in counted]
        try:
            with connection:  # commits, or rolls back
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(SAVE, usage)  # which peewee does not have
                connection.executemany(SAVE_HOUR, hours)
        except sqlite3.Error as error:
            raise OperationalError(str(error)) from None
        self._limiter.counted = {}  # nothing was counted meanwhile, because no other greenlet ran
        self.forget()  # the rows lack what was saved
