"""A database that cannot be used: what is an outage, and what is logged of it."""

import logging
import re
import sqlite3
import time

from peewee import IntegrityError, PeeweeException

log = logging.getLogger(__name__)

QUIET_SECONDS = 60
NOT_OPENED = "connection not opened"  # peewee's InterfaceError for a query without a connection
# What SQLite says when it cannot do what it was asked; everything else that it refuses is wrong. A
# table that is missing may come back, and a full disk has ended the transaction.
SQLITE_OUTAGE = re.compile(
    "is locked|locking protocol|disk I/O error|disk is full|unable to open|readonly database|"
    "disk image is malformed|malformed database|is not a database|out of memory|no such table|"
    "no transaction is active"
)
# PostgreSQL's codes of class 42, wrong statements, that are an outage: a missing table or right.
OUTAGES = ("42P01", "42501")


_quiet_until: dict[str, float] = {}  # by the template of a line


def once_per_minute(record: logging.LogRecord) -> bool:
    """A filter for a logger: an outage fails many requests, and all of them for the same reason."""
    now = time.monotonic()
    passes = now >= _quiet_until.get(record.msg, 0.0)
    if passes:
        _quiet_until[record.msg] = now + QUIET_SECONDS
    return passes


log.addFilter(once_per_minute)


def is_outage(error: Exception) -> bool:
    """Whether the database cannot be used; or else the error is a mistake in the program."""
    original = getattr(error, "orig", None)  # of sqlite3 or psycopg, kept by peewee
    code = str(getattr(original, "sqlstate", ""))
    is_wrong = code[:2] in ("22", "42") and code not in OUTAGES  # 22: a value that does not fit
    if isinstance(original, sqlite3.Error):
        is_wrong = not SQLITE_OUTAGE.search(str(original))
    is_database = isinstance(error, PeeweeException) and not isinstance(error, IntegrityError)
    return is_database and not is_wrong and NOT_OPENED not in str(error)


def log_outage(error: BaseException) -> None:
    """Log why the database could not be used."""
    log.error("database unavailable: %s", one_line(error))


def one_line(error: BaseException) -> str:
    """What went wrong, without the values that PostgreSQL quotes in further lines."""
    # SQLite ends a transaction by itself when the disk is full; peewee's rollback then fails, too.
    while error.__context__ and "no transaction is active" in str(error):
        error = error.__context__
    return str(error).partition("\n")[0]
