"""Fixed-window rate limits, counted in memory; knows neither Flask nor a database.

limiter = Limiter()
limiter.hit("some key", Quota("free", limit=1000, seconds=3600)).remaining
"""

import math
import re
import time
from collections.abc import Callable
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

    def plus(self, later: "Usage") -> "Usage":
        """With later requests, if there are any; their window may be a new one."""
        if not later.total:
            return self
        used = self.used if self.reset == later.reset else 0
        return Usage(self.total + later.total, later.reset, used + later.used)


NOTHING = Usage()


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

    With `saves`, requests are `unsaved` until `saved` is called, and remembered until `forget` is;
    the next `hit` then starts from what is `stored`. Without it, a count is dropped some time after
    its window.
    """

    def __init__(self, saves: bool = False, clock: Callable[[], float] = time.time) -> None:
        self._saves, self._clock, self._lock = saves, clock, Lock()
        self._latest = 0.0
        self._usage: dict[str, Usage] = {}
        self._unsaved: dict[str, Usage] = {}  # requests since the last call of `unsaved`
        self._saving: dict[str, Usage] = {}  # what it returned, until `saved` is called
        self._sweep_at = SWEEP_SIZE

    def hit(self, key: str, quota: Quota, stored: Usage = NOTHING, cost: int = 1) -> Allowance:
        """Count a request if the window's allowance is not used up; a cost of 0 only asks."""
        with self._lock:
            now = self._clock()
            self._latest = max(self._latest, now)  # a window never opens again
            reset = (int(self._latest) // quota.seconds + 1) * quota.seconds
            usage = self._usage.get(key) or self._with_unsaved(key, stored)
            used = usage.used if usage.reset == reset else 0
            accepted = used < quota.limit
            if accepted and cost:
                requests = Usage(cost, reset, cost)
                self._usage[key] = usage = usage.plus(requests)
                self._keep(key, requests)
                used = usage.used
        left = max(0, quota.limit - used)
        return Allowance(quota, accepted, left, reset, math.ceil(reset - now), usage.total)

    def unsaved(self) -> dict[str, Usage]:
        """The requests of each key that are to be saved, those of a save that failed, too."""
        with self._lock:
            for key, later in self._unsaved.items():
                self._saving[key] = self._saving.get(key, NOTHING).plus(later)
            self._unsaved = {}
            return self._saving

    def saved(self) -> None:
        """Note that what `unsaved` has returned is stored now."""
        self._saving = {}

    def forget(self) -> None:
        """Forget all but what is unsaved, so that what is stored counts.

        Keys that are being saved are kept: their rows may have the new counts already, or not.
        """
        with self._lock:
            self._usage = {key: self._usage[key] for key in self._saving if key in self._usage}

    def _with_unsaved(self, key: str, stored: Usage) -> Usage:
        for requests in (self._saving, self._unsaved):
            stored = stored.plus(requests.get(key, NOTHING))
        return stored

    def _keep(self, key: str, requests: Usage) -> None:
        if self._saves:
            self._unsaved[key] = self._unsaved.get(key, NOTHING).plus(requests)
        elif len(self._usage) >= self._sweep_at:
            # Past windows go; at doubling sizes, so that a request costs constant time.
            self._usage = {key: use for key, use in self._usage.items() if use.reset > self._latest}
            self._sweep_at = max(SWEEP_SIZE, 2 * len(self._usage))
