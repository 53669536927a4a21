"""The forms in which the API writes a moment; a moment is Unix seconds, and always UTC."""

from datetime import datetime, timezone


def utc(moment: float) -> datetime:
    return datetime.fromtimestamp(moment, timezone.utc)


def timestamp(moment: float) -> str:
    """SPEC part 2's `<timestamp>`: `2026-11-20T23:52:07.042Z`."""
    return utc(moment).isoformat(timespec="milliseconds")[:-6] + "Z"


def date_time(moment: float) -> str:
    """Without milliseconds: `2026-11-20T23:52:07Z`."""
    return utc(moment).isoformat(timespec="seconds")[:-6] + "Z"


def display(moment: float) -> str:
    """For people: `2026-11-20 23:52:07 UTC`."""
    return utc(moment).isoformat(sep=" ", timespec="seconds")[:-6] + " UTC"
