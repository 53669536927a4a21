"""Keys and counts in PostgreSQL, exact over any number of processes.

A hit is one UPDATE of one row, so a key never waits for another. No request is admitted before it
is counted. Needs psycopg, which is optional.
"""

import time
from collections import Counter
from contextlib import suppress
from typing import Any

import gevent
from peewee import OperationalError

from models import HOUR, ApiKey, now
from ratelimit import Allowance, Quota, Usage
from storage import Store
from storage.batch import Batches
from storage.breaker import Breaker
from storage.connections import NODE_SECONDS, STORE_SECONDS, Pool

HITS, LOOK_UPS = 4, 3  # connections of each process for these; with those of pages, at most 10
# No count waits for the disk, and none for a locked row for more than 50 ms.
SESSION = "SET synchronous_commit = off; SET lock_timeout = '50ms'"
# The window of a row goes on if its end lies between %(end)s and %(latest)s: Quota.window_ends.
# If not all hits are granted, none is counted.
USED = "%(hits)s + CASE WHEN reset BETWEEN %(end)s AND %(latest)s THEN used ELSE 0 END"
HIT = f"""UPDATE api_key SET total = total + %(hits)s, used = {USED}, last_used_at = %(now)s,
    reset = CASE WHEN reset BETWEEN %(end)s AND %(latest)s THEN reset ELSE %(end)s END
    WHERE id = %(id)s AND {USED} <= %(limit)s RETURNING total, reset, used"""
USAGE = "SELECT total, reset, used FROM api_key WHERE id = %(id)s"
ADD_HOUR = """INSERT INTO hourly_usage (hour, key_id, requests)
    SELECT ?, * FROM unnest(?::text[], ?::bigint[])
    ON CONFLICT (hour, key_id) DO UPDATE SET requests = hourly_usage.requests + excluded.requests"""


class PostgresStore(Store):
    """A Store that any number of processes share."""

    lost = "the chart lacks the last %s"

    def __init__(self, url: str) -> None:
        super().__init__()
        # Two bulkheads: however many keys are looked up, hits have their connections.
        self._hits = Pool(url, HITS, STORE_SECONDS, SESSION)
        self._look_ups = Pool(url, LOOK_UPS, STORE_SECONDS, SESSION)
        self._find_breaker, self._count_breaker = Breaker(), Breaker()
        self._finding, self._counting = Batches(self._find), Batches(self._count)
        self._chart = Counter[str]()  # requests of each key that are not in hourly_usage yet

    def open(self) -> None:
        self._hits.fill()
        self._look_ups.fill()

    def _look_up(self, key_id: str) -> ApiKey | None:
        return self._finding.ask(key_id)

    def _find(self, key_id: str, items: list[None]) -> list[ApiKey | None]:
        with self._find_breaker.circuit(key_id):
            return [super()._look_up(key_id)] * len(items)

    def hit(self, key_id: str, quota: Quota) -> Allowance | None:
        return self._counting.ask(key_id, quota)

    def _count(self, key_id: str, quotas: list[Quota]) -> list[Allowance | None]:
        """The Allowance of each hit. A key has one quota; if its tier was just changed, the last
        one holds for all.
        """
        with self._count_breaker.circuit(key_id):
            return self._allowances(key_id, quotas[-1], len(quotas))

    def _allowances(self, key_id: str, quota: Quota, hits: int) -> list[Allowance | None]:
        """Count as many of the hits as the window has left; None if the key was deleted."""
        if granted := self._grant(key_id, quota, hits):
            return granted
        refusal = self._refusal(key_id, quota)
        left = min(hits, refusal.remaining) if refusal else 0
        if not left:
            return [refusal] * hits
        first = self._allowances(key_id, quota, left)
        return first + self._allowances(key_id, quota, hits - left)

    def _grant(self, key_id: str, quota: Quota, hits: int) -> list[Allowance | None]:
        """Count so many hits, all of them or none; their Allowances."""
        moment = time.time()
        end, latest = quota.window_ends(moment)
        values = {"id": key_id, "hits": hits, "end": end, "latest": latest}
        values |= {"now": int(moment), "limit": quota.limit}
        for total, reset, used in self._hits.run(HIT, values):
            self._chart[key_id] += hits
            usages = [Usage(total - n, reset, used - n) for n in reversed(range(hits))]
            return [usage.allowance(quota, moment, True) for usage in usages]
        return []

    def _refusal(self, key_id: str, quota: Quota) -> Allowance | None:
        """What is left of the window; None if the key was deleted."""
        moment = time.time()
        for row in self._hits.run(USAGE, {"id": key_id}):
            return Usage(*row).within(quota, moment).allowance(quota, moment, False)
        return None

    def ended(self, key_ids: set[str]) -> set[str]:
        try:
            return super().ended(key_ids)
        except OperationalError:  # of a Citus cluster, a node may be away
            asking = {key_id: gevent.spawn(self._has_ended, key_id) for key_id in key_ids}
            gevent.joinall(asking.values(), timeout=NODE_SECONDS)
            return {key_id for key_id, answer in asking.items() if answer.value}

    def _has_ended(self, key_id: str) -> bool:
        with suppress(OperationalError):
            key = self.find(key_id)
            return key is None or key.has_ended()
        return False

    def _ask(self, query: str, *values: object) -> list[Any]:
        return self._look_ups.run(query.replace("?", "%s"), values)

    def _unsaved(self) -> Counter[str]:
        return self._chart

    def _save(self) -> None:
        """A request counts for the hour in which it is saved."""
        chart, self._chart = self._chart, Counter()
        if not chart:
            return
        moment, ids = now(), sorted(chart)  # in one order in all processes, so without deadlock
        try:
            self._ask(ADD_HOUR, moment - moment % HOUR, ids, [chart[key_id] for key_id in ids])
        except BaseException:
            self._chart.update(chart)  # adds them
            raise

    def close(self) -> None:
        super().close()
        for pool in (self._hits, self._look_ups):
            pool.close(timeout=0)
