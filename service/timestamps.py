"""How times are written. All are given in Unix seconds and written in UTC, or in words."""

from datetime import UTC, datetime
from functools import lru_cache

from models import DAY, HOUR, now


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


def duration(seconds: int) -> str:
    """How long to wait: "45 s", "37 min", or "2 h 37 min"."""
    hours, minutes = divmod((seconds + 59) // 60, 60)
    words = f"{hours} h {minutes} min".removeprefix("0 h ").replace(" 0 min", "")
    return f"{seconds} s" if seconds < 120 else words


def relative_time(moment: float) -> str:
    """A moment as seen from now: "5 min ago", "in 3 h", or "in 30 days"."""
    left = moment - now()
    if abs(left) < 60:
        return "now" if left > 0 else "just now"
    small = (HOUR, "h") if abs(left) >= HOUR else (60, "min")
    size, unit = (DAY, "days") if abs(left) > 1.5 * DAY else small
    distance = f"{round(abs(left) / size)} {unit}"
    return f"in {distance}" if left > 0 else f"{distance} ago"
