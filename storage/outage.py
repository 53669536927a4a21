"""The log of a database that cannot be used."""

import logging
import math
import time

log = logging.getLogger(__name__)

QUIET_SECONDS = 60


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
