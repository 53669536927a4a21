"""The log of a database that cannot be used: when that begins, why, and when it is over."""

import logging
import math
import time

log = logging.getLogger(__name__)

QUIET_SECONDS = 2  # an outage is over after this time without an error
CAUSE_SECONDS = 60  # between two lines about the same outage


class Outage:
    """Logs the first error of an outage, another cause once a minute, and the end."""

    def __init__(self) -> None:
        self.failed_at: float | None = None  # by `monotonic`; None when there is no outage
        self._logged_at, self._cause = -math.inf, ""

    def note(self, error: BaseException) -> None:
        """Report that the database could not be used."""
        moment, cause = time.monotonic(), one_line(error)
        is_other = cause != self._cause and moment - self._logged_at > CAUSE_SECONDS
        if self.failed_at is None or is_other:
            log.error("database unavailable: %s", cause)
            self._logged_at, self._cause = moment, cause
        self.failed_at = moment

    def over(self) -> None:
        """Report that the database could be used."""
        if self.failed_at and time.monotonic() - self.failed_at > QUIET_SECONDS:
            log.warning("database available again")
            self.failed_at = None


def one_line(error: BaseException) -> str:
    """What went wrong, without the values that PostgreSQL quotes in further lines."""
    # SQLite ends a transaction by itself when the disk is full; peewee's rollback then fails, too.
    while error.__context__ and "no transaction is active" in str(error):
        error = error.__context__
    return str(error).partition("\n")[0]
