"""PostgreSQL in place of the SQLite file: the connections, and a limiter that counts in its rows.

Each process asks the database one question at a time, for all keys at once. The requests that
arrive meanwhile are asked about together in the next question. So the busier a process is, the
less a request costs, and no request is admitted before it is counted.
"""

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gevent
import peewee
from gevent.lock import Semaphore
from peewee import OperationalError
from playhouse.pool import MaxConnectionsExceeded, PooledPostgresqlDatabase

from ratelimit import NOTHING, Allowance, Limiter, Quota, Spent, Usage

CONNECTIONS = 4  # of a process, at most, and one more for counting
PATIENCE_SECONDS = 0.4  # for a connection, and again for an answer

COUNT = Path(__file__).with_name("count.sql").read_text()
# Hours that ended a day ago. All processes do this at once; each skips rows that another deletes.
DELETE_HOURS = """DELETE FROM hourly_usage WHERE (hour, key_id) IN (
    SELECT hour, key_id FROM hourly_usage WHERE hour < extract(epoch FROM now())::bigint - 90000
    LIMIT 5000 FOR UPDATE SKIP LOCKED)"""


class Postgres(PooledPostgresqlDatabase):
    """A pool of connections on which every wait is short; raises PeeweeException."""

    timeout = PATIENCE_SECONDS

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


class Question:
    """What is asked at once: how many hits of each key, and the answers."""

    def __init__(self) -> None:
        self._quotas: dict[str, Quota] = {}
        self._hits: Counter[str] = Counter()
        self._answers: dict[str, Any] = {}
        self._answered_at = 0.0
        self.done, self.error = False, ""

    def add(self, key: str, quota: Quota, cost: int) -> int:
        """Add a hit; returns how many of this key came before it."""
        before = self._hits[key]
        self._quotas[key] = quota
        self._hits[key] += cost
        return before

    def ask(self, database: Postgres) -> None:
        """Find the answers, or the error."""
        keys, hits = list(self._hits), list(self._hits.values())
        quotas = [self._quotas[key] for key in keys]
        columns = (keys, [q.seconds for q in quotas], [q.limit for q in quotas], hits)
        try:
            with database.connection_context():
                rows = database.execute_sql(COUNT, columns).fetchall()
            self._answers = {key: numbers for key, *numbers in rows}
        except peewee.PeeweeException as error:
            self.error = str(error)
        self._answered_at = time.monotonic()
        self.done = True

    def answer(self, key: str, before: int, cost: int) -> tuple[Allowance, float]:
        """What one hit was granted after those `before` it, and when its window ends (monotonic).

        Raises OperationalError.
        """
        if self.error:
            raise OperationalError(self.error)
        quota = self._quotas[key]
        # A deleted key has nothing left; within a second it is found to be a bad key.
        gone = (0, math.ceil(time.time()), quota.limit, 0, 1)
        total, reset, used, granted, left = self._answers.get(key, gone)
        counted = min(granted, before + cost)
        remaining = max(0, quota.limit - used - counted)
        accepted = before + cost <= granted if cost else remaining > 0
        allowance = Allowance(quota, accepted, remaining, reset, math.ceil(left), total + counted)
        return allowance, self._answered_at + left


class SharedLimiter(Limiter):
    """A Limiter whose counts are in PostgreSQL, exact over any number of processes."""

    def __init__(self, url: str) -> None:
        super().__init__()
        # A connection of its own: requests that hold all others may be waiting for a count.
        self.database = Postgres(url, connections=1)
        self._turn = Semaphore(1)
        self._next = Question()
        self._used_up: dict[str, tuple[Allowance, float]] = {}

    def hit(self, key: str, quota: Quota, stored: Usage = NOTHING, cost: int = 1) -> Allowance:
        """As Limiter.hit; raises OperationalError if the database does not answer."""
        if refused := self._known_used_up(key, quota):
            return refused
        question = self._next
        before = question.add(key, quota, cost)
        with self._turn:  # one question at a time; whoever comes first asks for all who wait
            if not question.done:
                self._ask(question)
        allowance, end = question.answer(key, before, cost)
        if not allowance.accepted:
            self._used_up[key] = allowance, end
        return allowance

    def unsaved(self) -> list[Spent]:
        """Nothing: each hit is saved before it is answered."""
        return []

    def saved(self, spent: object) -> None:
        """Twice a second: ask again for keys that are used up, as the rows may be changed."""
        self._used_up.clear()

    def _ask(self, question: Question) -> None:
        self._next = Question()
        question.ask(self.database)
        if question.error:  # fail those who have waited meanwhile, too, so that nobody waits twice
            self._next.error, self._next.done = question.error, True
            self._next = Question()

    def _known_used_up(self, key: str, quota: Quota) -> Allowance | None:
        """In a window nothing is given back, so a key that is used up is refused without asking."""
        if key not in self._used_up:
            return None
        allowance, end = self._used_up[key]
        left = math.ceil(end - time.monotonic())
        known = allowance.quota == quota and left > 0
        return allowance._replace(seconds_left=left) if known else None
