"""Fixed-window rate limits, counted in memory; independent of Flask and of any database.

limiter = Limiter()
limiter.hit("some key", Quota("free", limit=1000, seconds=3600)).remaining
"""

import math
import re
import time
from collections.abc import Callable
from typing import NamedTuple

UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
QUOTA = re.compile(rf"([a-z][a-z0-9_-]{{0,31}})=([1-9][0-9]{{0,11}})/({'|'.join(UNITS)})")
DEFAULT_TIER = "free"
SMALL_STEP = 60  # seconds: if the clock is set back by less, no past window is opened again


class Quota(NamedTuple):
    """What a tier allows: `limit` requests in each window of `seconds`."""

    tier: str
    limit: int
    seconds: int

    @property
    def unit(self) -> str:
        """The unit of time that is one window, such as "hour"."""
        return next(unit for unit, seconds in UNITS.items() if seconds == self.seconds)


class Allowance(NamedTuple):
    """The limiter's answer; headers, bodies and pages are all made from this one value."""

    quota: Quota
    accepted: bool
    remaining: int
    reset: int  # Unix seconds at which the window ends
    seconds_left: int  # until then, rounded up, so at least 1
    total: int  # all requests ever counted for the key


class Usage(NamedTuple):
    """What a key has used: in total, and in the window that ends at `reset`."""

    total: int = 0
    reset: int = 0
    used: int = 0

    def plus(self, later: "Usage") -> "Usage":
        """This and later requests, if any. If they are in a new window, `used` starts again."""
        if not later.total:  # its `reset` of 0 must not begin a new window
            return self
        used = self.used if self.reset == later.reset else 0
        return Usage(self.total + later.total, later.reset, used + later.used)


NOTHING = Usage()


def parse_quotas(text: str) -> dict[str, Quota]:
    """Read `free=1000/hour,pro=10000/hour`; raises a ValueError that says what is wrong."""
    quotas: dict[str, Quota] = {}
    for part in map(str.strip, text.split(",")):
        found = QUOTA.fullmatch(part)
        if not found:
            raise ValueError(f"{part!r} is not like free=1000/hour (units: {', '.join(UNITS)})")
        tier, limit, unit = found.groups()
        if tier in quotas:
            raise ValueError(f"tier {tier!r} is given twice")
        quotas[tier] = Quota(tier, int(limit), UNITS[unit])
    if DEFAULT_TIER not in quotas:
        raise ValueError(f"tier {DEFAULT_TIER!r} is missing")
    return quotas


class Limiter:
    """Counts requests per key in windows on UTC boundaries.

    `counted` holds the requests of each key. The caller adds them to what is stored, empties it,
    and passes the new `stored` value to the next `hit`. It has no lock, so use it from one thread
    only.

    If the clock is set back by SMALL_STEP or less, the latest time is used until the clock gets
    there again, so no window is opened twice. A larger step back is accepted immediately: the
    windows in between are opened again, and may admit their limit a second time.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.counted: dict[str, Usage] = {}
        self._clock, self._latest = clock, 0.0

    def hit(self, key: str, quota: Quota, stored: Usage = NOTHING, cost: int = 1) -> Allowance:
        """Count a request if the window's allowance is not used up; a cost of 0 counts nothing."""
        now = self._clock()
        reset = (self._window_time(now) // quota.seconds + 1) * quota.seconds
        counted = self.counted.get(key, NOTHING)
        usage = stored.plus(counted)
        used = usage.used if usage.reset == reset else 0
        accepted = used < quota.limit
        if accepted and cost:
            request = Usage(cost, reset, cost)
            self.counted[key] = counted.plus(request)
            usage = usage.plus(request)
            used = usage.used
        left = max(0, quota.limit - used)
        return Allowance(quota, accepted, left, reset, math.ceil(reset - now), usage.total)

    def _window_time(self, now: float) -> int:
        """The time that decides the window; after a small step back, the latest one."""
        if not 0 <= self._latest - now <= SMALL_STEP:
            self._latest = now
        return int(self._latest)
