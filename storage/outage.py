"""A database that cannot be used: what is an outage, and what is logged of it."""

import logging
import re
import time

from peewee import IntegrityError, PeeweeException

log = logging.getLogger(__name__)

QUIET_SECONDS = 60
NOT_OPENED = "connection not opened"  # peewee's InterfaceError for a query without a connection
# What SQLite says of a statement that is wrong. A table that is missing may come back.
MISTAKE = re.compile(
    f"{NOT_OPENED}|no such (column|function)|syntax error|incomplete input|ambiguous column|"
    "wrong number of arguments|unrecognized token"
)
# PostgreSQL's codes of class 42, for a wrong statement or a missing right, that are an outage: a
# missing table, a missing right.
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
    code = str(
        getattr(getattr(error, "orig", None), "sqlstate", "")
    )  # peewee keeps psycopg's error
    is_mistake = (code.startswith("42") and code not in OUTAGES) or MISTAKE.search(str(error))
    is_database = isinstance(error, PeeweeException) and not isinstance(error, IntegrityError)
    return is_database and not is_mistake


def log_outage(error: BaseException) -> None:
    """Log why the database could not be used."""
    log.error("database unavailable: %s", one_line(error))


def one_line(error: BaseException) -> str:
    """What went wrong, without the values that PostgreSQL quotes in further lines."""
    # SQLite ends a transaction by itself when the disk is full; peewee's rollback then fails, too.
    while error.__context__ and "no transaction is active" in str(error):
        error = error.__context__
    return str(error).partition("\n")[0]
