"""How times are written. All are given in Unix seconds and written in UTC, or in words."""

import math
from datetime import UTC, datetime
from functools import lru_cache

from models import DAY, HOUR, now

# For each unit of a distance: up to how many seconds it is used, its own seconds, and its name.
SCALES = ((59, 1, "s"), (HOUR - 31, 60, "min"), (1.5 * DAY, HOUR, "h"), (math.inf, DAY, "days"))


def utc(seconds: float) -> datetime:
    """The moment; a number that was edited by hand, and is outside 1970 to 9999, is clamped."""
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


def relative_time(moment: float) -> str:
    """A moment as seen from now: "5 min ago", "in 37 s", or "in 30 days"."""
    left = moment - now()
    if -60 < left <= 0:
        return "just now"
    size, unit = next((size, unit) for most, size, unit in SCALES if abs(left) <= most)
    distance = f"{round(abs(left) / size)} {unit}"
    return f"in {distance}" if left > 0 else f"{distance} ago"
