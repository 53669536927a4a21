"""How the API writes times; all are given in Unix seconds and written in UTC."""

from datetime import UTC, datetime
from functools import lru_cache


def utc(seconds: float) -> datetime:
    """The moment. A number that was edited by hand may be beyond the years 1970 to 9999."""
    return datetime.fromtimestamp(min(max(seconds, 0), 253_402_300_799), UTC)


def timestamp(seconds: float) -> str:
    """With milliseconds: `2026-11-20T23:52:07.042Z`."""
    whole, milliseconds = divmod(int(seconds * 1000), 1000)
    return f"{date_time(whole)[:-1]}.{milliseconds:03d}Z"


@lru_cache(maxsize=8)  # so that each second is formatted once
def date_time(seconds: float) -> str:
    """Without milliseconds: `2026-11-20T23:52:07Z`."""
    return utc(seconds).isoformat(timespec="seconds")[:-6] + "Z"


def display(seconds: float) -> str:
    """For people: `2026-11-20 23:52:07 UTC`."""
    return date_time(int(seconds)).replace("T", " ").replace("Z", " UTC")
