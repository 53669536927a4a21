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
QUOTA = re.compile(rf"([a-z][a-z0-9_-]{{0,31}})=([1-9][0-9]{{0,11}})/({'|'.join(UNITS)})")
DEFAULT_TIER = "free"
SWEEP_SIZE = 1000  # with fewer counters than this, no sweep is needed


class Quota(NamedTuple):
    """What a tier allows: `limit` requests in each window of `seconds`."""

    tier: str
    limit: int
    seconds: int


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


NOTHING = Usage()
Spent = tuple[str, int, Usage]  # a key, its requests that are not saved yet, its usage with them


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

    With `saves`, counts stay in memory until `saved` and then `forget` are called; the next `hit`
    starts from `stored`. Without it, a count is dropped some time after its window.
    """

    def __init__(self, saves: bool = False, clock: Callable[[], float] = time.time) -> None:
        self._saves, self._clock, self._lock = saves, clock, Lock()
        self._latest = 0.0
        self._usage: dict[str, Usage] = {}
        self._unsaved: Counter[str] = Counter()
        self._sweep_at = SWEEP_SIZE

    def hit(self, key: str, quota: Quota, stored: Usage = NOTHING, cost: int = 1) -> Allowance:
        """Count a request if the window's allowance is not used up; a cost of 0 only asks."""
        with self._lock:
            self._latest = max(self._latest, now := self._clock())  # a window never opens again
            reset = (int(self._latest) // quota.seconds + 1) * quota.seconds
            total, window, used = self._usage.get(key, stored)
            used = used if window == reset else 0
            accepted = used < quota.limit
            if accepted and cost:
                total, used = total + cost, used + cost
                self._usage[key] = Usage(total, reset, used)
                if self._saves:
                    self._unsaved[key] += cost
                elif len(self._usage) >= self._sweep_at:
                    self._sweep()
        left = max(0, quota.limit - used)
        return Allowance(quota, accepted, left, reset, math.ceil(reset - now), total)

    def unsaved(self) -> list[Spent]:
        """All counts that are to be saved."""
        with self._lock:
            return [(key, requests, self._usage[key]) for key, requests in self._unsaved.items()]

    def saved(self, spent: Iterable[Spent]) -> None:
        """Note that counts that were `unsaved` are stored now."""
        with self._lock:
            self._unsaved -= Counter({key: requests for key, requests, _ in spent})

    def forget(self) -> None:
        """Forget what is saved, so that what is stored counts."""
        with self._lock:
            self._usage = {key: self._usage[key] for key in self._unsaved}

    def _sweep(self) -> None:
        """Drop past windows; at doubling sizes, so that a request costs constant time."""
        self._usage = {key: use for key, use in self._usage.items() if use.reset > self._latest}
        self._sweep_at = max(SWEEP_SIZE, 2 * len(self._usage))
