"""A database that cannot be used: how long a request waits for it, and what is logged."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flask import has_request_context, request

log = logging.getLogger(__name__)

QUIET_SECONDS = 60
REQUEST_SECONDS = 1.8  # how long a request waits for PostgreSQL, however many statements it makes
WAITED = "demo.waited"  # the name in `environ` of the seconds that it has waited


@contextmanager
def waiting(most: float) -> Iterator[float]:
    """What waits inside gets so many seconds, but no more than are left to this request."""
    environ = request.environ if has_request_context() else {}
    waited, began = environ.get(WAITED, 0.0), time.monotonic()
    try:
        yield min(most, REQUEST_SECONDS - waited)
    finally:
        environ[WAITED] = waited + time.monotonic() - began


_quiet_until: dict[str, float] = {}  # by the template of a line


def once_per_minute(record: logging.LogRecord) -> bool:
    """A filter for a logger: an outage fails many requests, and all of them for the same reason."""
    now = time.monotonic()
    passes = now >= _quiet_until.get(record.msg, 0.0)
    if passes:
        _quiet_until[record.msg] = now + QUIET_SECONDS
    return passes


log.addFilter(once_per_minute)


def report(error: BaseException) -> None:
    """Log why the database could not be used."""
    log.error("database unavailable: %s", one_line(error))


def one_line(error: BaseException) -> str:
    """What went wrong, without the values that PostgreSQL quotes in further lines."""
    # SQLite ends a transaction by itself when the disk is full; peewee's rollback then fails, too.
    while error.__context__ and "no transaction is active" in str(error):
        error = error.__context__
    return str(error).partition("\n")[0]
