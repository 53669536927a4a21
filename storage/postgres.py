"""PostgreSQL in place of the SQLite file: the connections, and a limiter that counts in its rows.

Each process has one query under way at a time, for all keys at once. The requests that arrive
meanwhile make up the next query. So the busier a process is, the less a request costs, and no
request is admitted before it is counted.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gevent
import peewee
from gevent.event import AsyncResult
from peewee import OperationalError
from playhouse.pool import MaxConnectionsExceeded, PooledPostgresqlDatabase

from ratelimit import NOTHING, Allowance, Limiter, Quota, Usage

# Of a process for views. Three more find keys, count, and are for the background: nobody waits for
# a connection and then for an answer, too.
CONNECTIONS = 3
ANSWER_SECONDS = 0.6  # for a connection, and again for an answer; a busy machine needs 0.4

COUNT = Path(__file__).with_name("count.sql").read_text()
# Hours that ended a day ago. All processes do this at once; each skips rows that another deletes.
DELETE_HOURS = """DELETE FROM hourly_usage WHERE (hour, key_id) IN (
    SELECT hour, key_id FROM hourly_usage WHERE hour < extract(epoch FROM now())::bigint - 90000
    LIMIT 5000 FOR UPDATE SKIP LOCKED)"""


class Postgres(PooledPostgresqlDatabase):
    """A pool of connections on which every wait is short; raises PeeweeException."""

    timeout = ANSWER_SECONDS

    def __init__(self, url: str, connections: int = CONNECTIONS) -> None:
        if peewee.psycopg is None:  # psycopg2 would do for peewee, but it blocks all greenlets
            raise peewee.ImproperlyConfigured("run pip install 'psycopg[binary]' first")
        options = {"autoconnect": False, "prefer_psycopg3": True, "connect_timeout": 2}
        super().__init__(url, max_connections=connections, stale_timeout=60, **options)

    def connect(self, reuse_if_open: bool = False) -> bool:
        with self._patience():
            while True:
                try:
                    return bool(super().connect(reuse_if_open))
                except MaxConnectionsExceeded:  # the pool's own wait breaks when a Timeout ends it
                    gevent.sleep(0.01)

    def execute_sql(self, sql: str, params: Any = None) -> Any:
        with self._patience():
            return super().execute_sql(sql, params)

    def _patience(self) -> gevent.Timeout:
        return gevent.Timeout(self.timeout, OperationalError(f"no answer within {self.timeout} s"))

    def _is_closed(self, conn: Any) -> bool:
        """Whether the server has closed it. peewee would send a query each time to find out."""
        try:
            for _ in range(2):  # the first reads what the server said before it closed
                conn.pgconn.consume_input()
        except Exception:  # psycopg.Error; the driver may not be installed
            return True
        return bool(conn.closed)


class Batches:
    """Makes one query at a time, for many: the items that come meanwhile make up the next."""

    def __init__(self, ask: Callable[[list[Any]], list[Any]]) -> None:
        self._ask = ask
        self._waiting: list[tuple[Any, AsyncResult]] = []
        self._asking = False

    def __call__(self, item: Any) -> Any:
        """The answer for one item; raises PeeweeException."""
        answer = AsyncResult()
        self._waiting.append((item, answer))
        if not self._asking:
            self._asking = True
            gevent.spawn(self._ask_all)  # a request may be killed while others need its answer
        return answer.get()

    def _ask_all(self) -> None:
        while batch := self._waiting:
            self._waiting = []
            try:
                answers = self._ask([item for item, _ in batch])
                for (_, waiting), answer in zip(batch, answers, strict=True):
                    waiting.set(answer)
            except Exception as error:
                # Those who came meanwhile fail, too, so that nobody waits twice.
                for _, waiting in batch + self._waiting:
                    waiting.set_exception(error)
                self._waiting = []
        self._asking = False


class SharedLimiter(Limiter):
    """A Limiter whose counts are in PostgreSQL, exact over any number of processes."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._database = Postgres(url, connections=1)
        self._batches = Batches(self._count_batch)
        self._used_up: dict[str, tuple[Allowance, float]] = {}  # and the window's end, monotonic

    def hit(self, key: str, quota: Quota, stored: Usage = NOTHING, cost: int = 1) -> Allowance:
        """As Limiter.hit; raises OperationalError if the database does not answer."""
        if key in self._used_up:  # in a window nothing is given back, so nobody has to be asked
            refused, end = self._used_up[key]
            left = end - time.monotonic()
            if refused.quota == quota and left > 1:  # seconds_left was rounded up
                return refused._replace(seconds_left=math.ceil(left))
        allowance = cast(Allowance, self._batches((key, quota, cost)))
        if not allowance.accepted:
            self._used_up[key] = allowance, time.monotonic() + allowance.seconds_left
        return allowance

    def forget(self) -> None:
        """Ask again for keys that are used up, as the rows may be changed."""
        self._used_up.clear()

    def _count_batch(self, hits: list[tuple[str, Quota, int]]) -> list[Allowance]:
        """The allowance of each hit; raises PeeweeException."""
        asked: dict[str, dict[str, Any]] = {}
        for key, (_, limit, seconds), cost in hits:
            new = {"id": key, "seconds": seconds, "quota": limit, "hits": 0}
            asked.setdefault(key, new)["hits"] += cost
        with self._database.connection_context():
            rows = self._database.execute_sql(COUNT, [json.dumps(list(asked.values()))]).fetchall()
        counted = {row[0]: row for row in rows}
        before, allowances = Counter[str](), []
        for key, quota, cost in hits:
            allowances.append(_allowance(quota, counted.get(key), before[key], cost))
            before[key] += cost
        return allowances


def _allowance(quota: Quota, row: Any, before: int, cost: int) -> Allowance:
    """What one hit was granted, after those `before` it in the same batch.

    Without a row the key was deleted: nothing is left, and within a second it is a bad key.
    """
    if row is None:
        return Allowance(quota, False, 0, math.ceil(time.time()), 1, 0)
    _, total, reset, used, granted, left = row
    counted = min(granted, before + cost)
    remaining = max(0, quota.limit - used - counted)
    accepted = before + cost <= granted if cost else remaining > 0
    return Allowance(quota, accepted, remaining, reset, math.ceil(left), total + counted)
