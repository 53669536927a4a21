"""How the API writes times; all are given in Unix seconds and written in UTC."""

from datetime import datetime, timezone


def utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def timestamp(seconds: float) -> str:
    """With milliseconds: `2026-11-20T23:52:07.042Z`."""
    return utc(seconds).isoformat(timespec="milliseconds")[:-6] + "Z"


def date_time(seconds: float) -> str:
    """Without milliseconds: `2026-11-20T23:52:07Z`."""
    return utc(seconds).isoformat(timespec="seconds")[:-6] + "Z"


def display(seconds: float) -> str:
    """For people: `2026-11-20 23:52:07 UTC`."""
    return utc(seconds).isoformat(sep=" ", timespec="seconds")[:-6] + " UTC"
