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
UNIT_NAMES = {seconds: unit for unit, seconds in UNITS.items()}
QUOTA = re.compile(rf"([a-z][a-z0-9_-]{{0,31}})=([1-9][0-9]{{0,11}})/({'|'.join(UNITS)})")
DEFAULT_TIER = "free"
CLOCK_SKEW = 60  # seconds by which clocks may differ; see Quota.window_ends


class Quota(NamedTuple):
    """What a tier allows: `limit` requests in each window of `seconds`."""

    tier: str
    limit: int
    seconds: int

    def window_ends(self, now: float, waited: float) -> tuple[int, int]:
        """The first and the last `reset` that belong to the current window.

        The first is that of this clock. The last is what another process may have written: its
        clock may be CLOCK_SKEW ahead, and this request may have `waited` for so many seconds since
        `now`. Every `reset` in between belongs to the window, too. So no window begins a second
        time, as long as clocks differ, or are set back, by less than CLOCK_SKEW and less than a
        window.
        """
        return (
            window_end(now, self.seconds),
            window_end(now + min(CLOCK_SKEW, self.seconds) + waited, self.seconds),
        )


def window_end(now: float, seconds: int) -> int:
    """The end of the window of `seconds` in which this moment lies, in Unix seconds."""
    return (int(now) // seconds + 1) * seconds


class Allowance(NamedTuple):
    """What a request is told about its limit; headers, bodies and pages are made from this."""

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

    def in_current_window(self, quota: Quota, now: float, waited: float = 0) -> "Usage":
        """The usage in the current window: zero if `reset` belongs to another window."""
        end, latest = quota.window_ends(now, waited)
        return self if end <= self.reset <= latest else Usage(self.total, end)

    def allowance(self, quota: Quota, now: float, accepted: bool) -> Allowance:
        """What is left of the window that ends at `reset`."""
        return Allowance(
            quota,
            accepted,
            remaining=max(0, quota.limit - self.used),
            reset=self.reset,
            seconds_left=math.ceil(self.reset - now),
            total=self.total,
        )

    def followed_by(self, later: "Usage") -> "Usage":
        """This and later requests. If they are in a new window, `used` starts again."""
        return Usage(
            self.total + later.total,
            later.reset,
            later.used + (self.used if self.reset == later.reset else 0),
        )


NO_USAGE = Usage()


def parse_quotas(text: str) -> dict[str, Quota]:
    """Read `free=1000/hour,pro=10000/hour`; raises a ValueError that says what is wrong."""
    quotas: dict[str, Quota] = {}
    for part in map(str.strip, text.split(",")):
        found = QUOTA.fullmatch(part)
        if not found:
            raise ValueError(
                f"{part!r} is not like free=1000/hour (at least 1 per {' or '.join(UNITS)})"
            )
        tier, limit, unit = found.groups()
        if tier in quotas:
            raise ValueError(f"tier {tier!r} is given twice")
        quotas[tier] = Quota(tier, int(limit), UNITS[unit])
    if DEFAULT_TIER not in quotas:
        raise ValueError(f"tier {DEFAULT_TIER!r} is missing")
    return quotas


def tiers_for_users(quotas: dict[str, Quota]) -> dict[str, Quota]:
    """The tiers that users may choose for a key; DEFAULT_TIER is first.

    Neither their number of requests nor their average rate is higher than that of DEFAULT_TIER.
    """
    default = quotas[DEFAULT_TIER]
    return {DEFAULT_TIER: default} | {
        tier: quota
        for tier, quota in quotas.items()
        if quota.limit <= default.limit
        and quota.limit * default.seconds <= default.limit * quota.seconds
    }


class Limiter:
    """Counts requests per key in windows on UTC boundaries.

    `save` hands over what was counted; the next `hit` is then called with the new `stored` value.
    There is no lock, so use it from one thread only.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._counted: dict[str, Usage] = {}  # of each key, since it was saved
        self._clock = clock

    def hit(self, key: str, quota: Quota, stored: Usage = NO_USAGE) -> Allowance:
        """Count a request if the window's allowance is not used up."""
        now = self._clock()
        usage = self.usage(key, stored).in_current_window(quota, now)
        accepted = usage.used < quota.limit
        if accepted:
            request = Usage(1, usage.reset, 1)
            self._counted[key] = self._counted.get(key, NO_USAGE).followed_by(request)
            usage = usage.followed_by(request)
        return usage.allowance(quota, now, accepted)

    def save(self, store: Callable[[list[tuple[str, Usage]]], None]) -> bool:
        """Call `store` with what has been counted since the last save, sorted by key.

        If nothing has been, this returns False. What was counted is forgotten only if `store`
        returns. While it runs, nobody may call `hit`.
        """
        if self._counted:
            store(sorted(self._counted.items()))
            self._counted = {}
            return True
        return False

    def usage(self, key: str, stored: Usage) -> Usage:
        """What is stored, plus what has been counted."""
        return stored.followed_by(self._counted[key]) if key in self._counted else stored
