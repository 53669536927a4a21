"""A database that cannot be used: which errors are an outage, and how it is logged."""

import logging
import sqlite3
import time

from peewee import OperationalError

log = logging.getLogger(__name__)

# SQLite's errors in an outage. Any other error is a mistake in the statement.
SQLITE_OUTAGES = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOTADB,
}

_quiet_until: dict[str, float] = {}  # by the template of a line


def once_per_minute(record: logging.LogRecord) -> bool:
    """A filter that passes a message once a minute: one outage makes many requests fail."""
    now = time.monotonic()
    passes = now >= _quiet_until.get(record.msg, 0.0)
    if passes:
        _quiet_until[record.msg] = now + 60
    return passes


log.addFilter(once_per_minute)


def is_outage(error: Exception) -> bool:
    """Whether the database cannot be used; any other error is a mistake in the program.

    The code of the original error decides. An error without a code is an outage if there was no
    connection, or no answer in time.
    """
    original = getattr(error, "orig", None)  # of sqlite3 or psycopg, kept by peewee
    if isinstance(original, sqlite3.Error):
        # An error of Python's module, such as a wrong number of values, has no code.
        code = getattr(original, "sqlite_errorcode", sqlite3.SQLITE_MISUSE)
        return code & 0xFF in SQLITE_OUTAGES  # the rest of the number is a detail
    if state := getattr(original, "sqlstate", None):
        # Values that do not fit, broken constraints, and wrong statements are mistakes. But 42501
        # says that the rights of the role were changed.
        return state == "42501" or not state.startswith(("22", "23", "42"))
    return isinstance(error, OperationalError)


def log_outage(error: BaseException) -> None:
    """Log why the database could not be used."""
    log.error("database unavailable: %s", reason_of(error))


def reason_of(error: BaseException) -> str:
    """What went wrong, without the values that PostgreSQL quotes in further lines."""
    return str(error).partition("\n")[0]
