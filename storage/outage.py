"""The log of a database that cannot be used: one line when it begins, and one when it is over."""

import logging
import time

log = logging.getLogger(__name__)

QUIET_SECONDS = 2  # an outage is over after this time without an error


class Outage:
    """Between its two lines, errors are not logged: there may be one for each request."""

    def __init__(self) -> None:
        self._failed_at: float | None = None

    def note(self, error: BaseException) -> None:
        """Report that the database could not be used."""
        if self._failed_at is None:
            log.error("database unavailable: %s", one_line(error))
        self._failed_at = time.monotonic()

    def over(self) -> None:
        """Report that the database could be used."""
        if self._failed_at and time.monotonic() - self._failed_at > QUIET_SECONDS:
            log.warning("database available again")
            self._failed_at = None


def one_line(error: BaseException) -> str:
    """What went wrong, without the values that PostgreSQL quotes in further lines."""
    # SQLite ends a transaction by itself when the disk is full; peewee's rollback then fails, too.
    while error.__context__ and "no transaction is active" in str(error):
        error = error.__context__
    return str(error).partition("\n")[0]


outage = Outage()
