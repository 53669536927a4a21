"""PostgreSQL in place of the SQLite file: the connections, and a limiter that counts in its rows.

Each process asks the database one question at a time, for all keys at once. The requests that
arrive meanwhile are asked about together in the next question. So the busier a process is, the
less a request costs, and no request is admitted before it is counted.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gevent
import peewee
from gevent.lock import Semaphore
from peewee import OperationalError
from playhouse.pool import MaxConnectionsExceeded, PooledPostgresqlDatabase

from ratelimit import NOTHING, Allowance, Limiter, Quota, Spent, Usage

CONNECTIONS = 4  # of a process for requests; one more counts, and one is for the background
PATIENCE_SECONDS = 0.6  # for a connection, and again for an answer; a busy machine needs 0.4

Hit = tuple[str, Quota, int]  # a key, its quota, the cost

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


class Together:
    """Asks one question at a time, for many: what comes meanwhile makes up the next question."""

    def __init__(self, ask: Callable[[list[Any]], list[Any]]) -> None:
        self._ask, self._turn, self._next = ask, Semaphore(1), Question()

    def __call__(self, item: Any) -> Any:
        """The answer for one item; raises OperationalError."""
        question = self._next
        question.items.append(item)
        place = len(question.items) - 1
        with self._turn:  # whoever comes first asks for all who wait
            if not question.done:
                self._find_answers(question)
        if question.error:
            raise OperationalError(question.error)
        return question.answers[place]

    def _find_answers(self, question: "Question") -> None:
        self._next = Question()
        try:
            question.answers = self._ask(question.items)
        except peewee.PeeweeException as error:
            # Those who have waited meanwhile fail, too, so that nobody waits twice.
            question.error = self._next.error = str(error) or type(error).__name__
            self._next.done = True
            self._next = Question()
        question.done = True


class Question:
    """What is asked at once, and the answers in the same order, or why there are none."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.answers: list[Any] = []
        self.error = ""
        self.done = False


class SharedLimiter(Limiter):
    """A Limiter whose counts are in PostgreSQL, exact over any number of processes."""

    def __init__(self, url: str) -> None:
        super().__init__()
        # A connection of its own: requests that hold all others may be waiting for a count.
        self._database = Postgres(url, connections=1)
        self._count_together = Together(self._ask)
        self._used_up: dict[str, tuple[Allowance, float]] = {}  # and the window's end, monotonic

    def hit(self, key: str, quota: Quota, stored: Usage = NOTHING, cost: int = 1) -> Allowance:
        """As Limiter.hit; raises OperationalError if the database does not answer."""
        if refused := self._known_used_up(key, quota):
            return refused
        allowance, left = self._count_together((key, quota, cost))
        if not allowance.accepted:
            self._used_up[key] = allowance, time.monotonic() + left
        return cast(Allowance, allowance)

    def unsaved(self) -> list[Spent]:
        """Nothing: each hit is saved before it is answered."""
        return []

    def saved(self, spent: object) -> None:
        """Twice a second: ask again for keys that are used up, as the rows may be changed."""
        self._used_up.clear()

    def _ask(self, hits: list[Hit]) -> list[tuple[Allowance, float]]:
        """Each hit's allowance and the seconds left; raises PeeweeException."""
        quotas = {key: quota for key, quota, _ in hits}
        costs = Counter[str]()
        for key, _, cost in hits:
            costs[key] += cost
        rows = ((key, quotas[key].seconds, quotas[key].limit, costs[key]) for key in costs)
        columns = list(map(list, zip(*rows, strict=True)))
        with self._database.connection_context():
            answers = self._database.execute_sql(COUNT, columns).fetchall()
        counted = {key: numbers for key, *numbers in answers}
        before, allowances = Counter[str](), []
        for key, _, cost in hits:
            allowances.append(_allowance(quotas[key], counted.get(key), before[key], cost))
            before[key] += cost
        return allowances

    def _known_used_up(self, key: str, quota: Quota) -> Allowance | None:
        """In a window nothing is given back, so a key that is used up is refused without asking."""
        if key not in self._used_up:
            return None
        allowance, end = self._used_up[key]
        left = math.ceil(end - time.monotonic())
        known = allowance.quota == quota and left > 0
        return allowance._replace(seconds_left=left) if known else None


def _allowance(quota: Quota, row: Any, before: int, cost: int) -> tuple[Allowance, float]:
    """What one hit was granted, after those `before` it in the same question; and the seconds left.

    Without a row the key was deleted: nothing is left, and within a second it is a bad key.
    """
    total, reset, used, granted, left = row or (0, math.ceil(time.time()), quota.limit, 0, 1)
    counted = min(granted, before + cost)
    remaining = max(0, quota.limit - used - counted)
    accepted = before + cost <= granted if cost else remaining > 0
    return Allowance(quota, accepted, remaining, reset, math.ceil(left), total + counted), left
