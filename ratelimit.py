"""Fixed-window rate limits, counted in memory; knows neither Flask nor a database.

limiter = Limiter()
limiter.hit("some key", Quota("free", limit=1000, seconds=3600)).remaining
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from threading import Lock
from typing import NamedTuple

UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
QUOTA = re.compile(r"([a-z][a-z0-9_-]{0,31})=([1-9][0-9]{0,11})/(second|minute|hour|day)")
DEFAULT_TIER = "free"
SWEEP_SIZE = 1000  # fewer counters than this are not worth a sweep


class Quota(NamedTuple):
    """What a tier allows: `limit` requests in each window of `seconds`."""

    tier: str
    limit: int
    seconds: int


class Allowance(NamedTuple):
    """The limiter's answer; headers, bodies and pages all render this one value."""

    quota: Quota
    accepted: bool
    remaining: int
    reset: int  # Unix seconds at which the window ends
    seconds_left: int  # until then, rounded up, so at least 1
    total: int  # everything ever counted for the key


class Usage(NamedTuple):
    """What a key has used: all in all, and in the window that ends at `reset`."""

    total: int = 0
    reset: int = 0
    used: int = 0


Spent = tuple[str, int, Usage]  # a key, its requests that are not yet saved, where they led


def parse_quotas(text: str) -> dict[str, Quota]:
    """Read `free=1000/hour,pro=10000/hour`; raises ValueError that says what is wrong."""
    quotas: dict[str, Quota] = {}
    for part in map(str.strip, text.split(",")):
        found = QUOTA.fullmatch(part)
        if not found:
            raise ValueError(f"{part!r} is not like free=1000/hour")
        tier, limit, unit = found.groups()
        if tier in quotas:
            raise ValueError(f"tier {tier!r} is given twice")
        quotas[tier] = Quota(tier, int(limit), UNITS[unit])
    if DEFAULT_TIER not in quotas:
        raise ValueError(f"tier {DEFAULT_TIER!r} is missing")
    return quotas


class Limiter:
    """Counts requests per key in windows on UTC boundaries; safe for threads and greenlets.

    `load` brings back what an earlier process counted for a key. With it, counts are `unsaved`
    until `saved` says otherwise; without it, they live and die with their window.
    """

    def __init__(
        self, load: Callable[[str], Usage] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._load, self._clock, self._lock = load, clock, Lock()
        self._usage: dict[str, Usage] = {}
        self._unsaved: Counter[str] = Counter()
        self._sweep_at = SWEEP_SIZE

    def hit(self, key: str, quota: Quota, cost: int = 1) -> Allowance:
        """Count a request, unless the allowance of the window is used up; a cost of 0 only asks."""
        # Outside the lock, because loading may wait for a database.
        known = self._usage.get(key) or (self._load(key) if self._load else Usage())
        now = self._clock()
        reset = (int(now) // quota.seconds + 1) * quota.seconds
        with self._lock:
            total, window, used = self._usage.get(key, known)
            used = used if window == reset else 0
            accepted = used < quota.limit
            if accepted and cost:
                total, used = total + cost, used + cost
                self._usage[key] = Usage(total, reset, used)
                if self._load:
                    self._unsaved[key] += cost
                if len(self._usage) >= self._sweep_at:
                    self._sweep(now)
        remaining = max(0, quota.limit - used)
        return Allowance(quota, accepted, remaining, reset, math.ceil(reset - now), total)

    def unsaved(self) -> list[Spent]:
        with self._lock:
            return [(key, requests, self._usage[key]) for key, requests in self._unsaved.items()]

    def saved(self, spent: Iterable[Spent]) -> None:
        """What `unsaved` told is safe now; what was counted since then is still to be saved."""
        with self._lock:
            self._unsaved -= Counter({key: requests for key, requests, _ in spent})

    def _sweep(self, now: float) -> None:
        """Drop ended windows, at doubling sizes: so the cost of a request stays constant."""
        self._usage = {
            key: usage
            for key, usage in self._usage.items()
            if key in self._unsaved or usage.reset > now
        }
        self._sweep_at = max(SWEEP_SIZE, 2 * len(self._usage))
