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
from gevent.lock import Semaphore
from peewee import Database, OperationalError, PeeweeException
from playhouse.pool import MaxConnectionsExceeded, PooledPostgresqlDatabase

from ratelimit import NOTHING, Allowance, Quota, Spent, Usage

CONNECTIONS = 4  # of a process, at most
PATIENCE_SECONDS = 0.4  # for a connection, and again for an answer
MAX_USED_UP = 100_000  # keys that are remembered as used up

COUNT = Path(__file__).with_name("count.sql").read_text()


class Postgres(PooledPostgresqlDatabase):
    """A pool of connections on which every wait is short; raises OperationalError."""

    def __init__(self, url: str) -> None:
        options = {"autoconnect": False, "prefer_psycopg3": True, "connect_timeout": 2}
        super().__init__(url, max_connections=CONNECTIONS, stale_timeout=60, **options)

    def connect(self, reuse_if_open: bool = False) -> bool:
        with _patience():
            while True:
                try:
                    return bool(super().connect(reuse_if_open))
                except MaxConnectionsExceeded:  # the pool's own wait breaks when a Timeout ends it
                    gevent.sleep(0.01)

    def execute_sql(self, sql: str, params: Any = None) -> Any:
        with _patience():
            return super().execute_sql(sql, params)


def _patience() -> gevent.Timeout:
    message = f"no answer within {PATIENCE_SECONDS} s"
    return gevent.Timeout(PATIENCE_SECONDS, OperationalError(message))


class Question:
    """What is asked at once: how many hits of each key, and the answers."""

    def __init__(self) -> None:
        self.quotas: dict[str, Quota] = {}
        self.hits: Counter[str] = Counter()
        self._answers: dict[str, tuple[int, int, int, int, float]] = {}
        self.done, self.error = False, ""

    def add(self, key: str, quota: Quota, cost: int) -> int:
        """Add a hit; returns how many of this key came before it."""
        before = self.hits[key]
        self.quotas[key] = quota
        self.hits[key] += cost
        return before

    def ask(self, database: Database) -> None:
        """Find the answers, or the error."""
        keys = list(self.hits)
        quotas = [self.quotas[key] for key in keys]
        seconds, limits = [q.seconds for q in quotas], [q.limit for q in quotas]
        try:
            with database.connection_context():
                cursor = database.execute_sql(
                    COUNT, (keys, seconds, limits, list(self.hits.values()))
                )
                self._answers = {key: tuple(numbers) for key, *numbers in cursor.fetchall()}
        except PeeweeException as error:
            self.error = str(error)
        self.done = True

    def answer(self, key: str, before: int, cost: int) -> Allowance:
        """What one hit was granted, after those `before` it; raises OperationalError."""
        if self.error or key not in self._answers:
            raise OperationalError(self.error or "the key was deleted")
        total, reset, used, granted, now = self._answers[key]
        quota, counted = self.quotas[key], min(granted, before + cost)
        accepted = before + cost <= granted if cost else used < quota.limit
        remaining = max(0, quota.limit - used - counted)
        return Allowance(quota, accepted, remaining, reset, math.ceil(reset - now), total + counted)


class SharedLimiter:
    """A Limiter whose counts are in PostgreSQL, exact over any number of processes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._turn = Semaphore(1)
        self._next = Question()
        self._used_up: dict[str, Allowance] = {}

    def hit(self, key: str, quota: Quota, stored: Usage = NOTHING, cost: int = 1) -> Allowance:
        """As Limiter.hit; raises OperationalError if the database does not answer."""
        if known := self._known_used_up(key, quota):
            return known
        question = self._next
        before = question.add(key, quota, cost)
        with self._turn:  # one question at a time; whoever comes first asks for all who wait
            if not question.done:
                self._next = Question()
                question.ask(self._database)
                if question.error:  # fail those who have waited meanwhile, so nobody waits twice
                    self._next.error, self._next.done = question.error, True
                    self._next = Question()
        allowance = question.answer(key, before, cost)
        if not allowance.accepted:
            self._remember(key, allowance)
        return allowance

    def unsaved(self) -> list[Spent]:
        """Nothing: each hit is saved before it is answered."""
        return []

    def saved(self, spent: list[Spent]) -> None:
        """Nothing to do."""

    def _known_used_up(self, key: str, quota: Quota) -> Allowance | None:
        """In a window nothing is given back, so until its end the database need not be asked."""
        known = self._used_up.get(key)
        left = math.ceil(known.reset - time.time()) if known else 0
        return (
            known._replace(seconds_left=left)
            if known and known.quota == quota and left > 0
            else None
        )

    def _remember(self, key: str, allowance: Allowance) -> None:
        if len(self._used_up) >= MAX_USED_UP:
            self._used_up.clear()
        self._used_up[key] = allowance
