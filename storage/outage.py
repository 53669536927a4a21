"""A database that cannot be used: how long a request waits for it, and what is logged."""

import logging
import math
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


class OncePerMinute(logging.Filter):
    """Lets only lines with this beginning pass, and of these one a minute.

    An outage fails many requests, and all of them for the same reason.
    """

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning, self._next = beginning, -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        passes = record.msg.startswith(self._beginning) and now >= self._next
        if passes:
            self._next = now + QUIET_SECONDS
        return passes


log.addFilter(OncePerMinute("database unavailable"))


def report(error: BaseException) -> None:
    """Log why the database could not be used."""
    log.error("database unavailable: %s", one_line(error))


def one_line(error: BaseException) -> str:
    """What went wrong, without the values that PostgreSQL quotes in further lines."""
    # SQLite ends a transaction by itself when the disk is full; peewee's rollback then fails, too.
    while error.__context__ and "no transaction is active" in str(error):
        error = error.__context__
    return str(error).partition("\n")[0]
