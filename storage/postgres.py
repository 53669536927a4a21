"""Keys and counts in PostgreSQL, exact over any number of processes.

A hit is one UPDATE of one row, so a key never waits for another. No request is admitted before it
is counted. Needs psycopg, which is optional.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import gevent
import psycopg
from gevent.event import AsyncResult
from gevent.lock import BoundedSemaphore
from peewee import OperationalError

from models import HOUR, ApiKey, now
from ratelimit import Allowance, Quota, Usage
from storage import Store
from storage.connections import NoFreeConnection, Postgres
from storage.queries import FIND, made_of

HITS, LOOK_UPS = 4, 3  # connections of each process; with those of pages, at most 10
ANSWER_SECONDS = 0.9  # for a hit or a look-up, from its arrival, all its waits included
PAUSE_SECONDS = 0.5  # before a key is asked about again after a failure
STATEMENT_SECONDS = 0.6  # for a statement; less, so that time is left for who waits behind it
NODE_SECONDS = 0.3  # for the keys on other nodes of a Citus cluster while one is away
MANY = 10_000  # failed keys that are remembered

# No count waits for the disk, and none for a locked row for long.
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


def in_time() -> gevent.Timeout:
    return gevent.Timeout(ANSWER_SECONDS, OperationalError(f"no answer within {ANSWER_SECONDS} s"))


def run(database: Postgres, query: str, values: Any) -> list[Any]:
    """The rows that answer a query; raises OperationalError."""
    try:
        connection = database.take()
        try:
            cursor = connection.execute(query.encode(), values)
            return cursor.fetchall() if cursor.description else []
        finally:
            database.give_back(connection)
    except psycopg.Error as error:
        raise OperationalError(str(error)) from None


class Batches:
    """Asks one question at a time about each key; those that come meanwhile are asked together.

    After a failure, because its row is locked, say, a key is left alone for PAUSE_SECONDS. Then it
    may use only half of the connections until it succeeds, so that it keeps no other key waiting.
    This does not concern a key that failed because others had all the connections.
    """

    def __init__(self, connections: int, ask: Callable[[str, list[Any]], list[Any]]) -> None:
        self._ask = ask
        self._waiting: dict[str, list[tuple[Any, AsyncResult]]] = {}
        self._failed: dict[str, tuple[float, str]] = {}  # when, by `monotonic`, and why
        self._half = BoundedSemaphore(connections // 2)

    def ask(self, key_id: str, item: object = None) -> Any:
        """The answer to this item; raises PeeweeException."""
        failed_at, why = self._failed.get(key_id, (-math.inf, ""))
        if time.monotonic() < failed_at + PAUSE_SECONDS:
            raise OperationalError(why)
        answer = AsyncResult()
        if key_id not in self._waiting:
            self._waiting[key_id] = []
            # In a greenlet of its own, or this request would also serve those that come later.
            gevent.spawn(self._ask_all, key_id)
        self._waiting[key_id].append((item, answer))
        with in_time():
            return answer.get()

    def _ask_all(self, key_id: str) -> None:
        try:
            while batch := self._waiting[key_id]:
                self._waiting[key_id] = []
                with in_time(), self._half if key_id in self._failed else nullcontext():
                    answers = self._ask(key_id, [item for item, _ in batch])
                self._failed.pop(key_id, None)
                for (_, answer), value in zip(batch, answers, strict=True):
                    answer.set(value)
        except Exception as error:
            if len(self._failed) > MANY:  # made-up keys during an outage
                self._failed.clear()
            if not isinstance(error, NoFreeConnection):
                self._failed[key_id] = time.monotonic(), str(error)
            # Those who came meanwhile fail, too, so that nobody waits twice.
            for _, answer in batch + self._waiting[key_id]:
                answer.set_exception(error)
        finally:
            del self._waiting[key_id]


class PostgresStore(Store):
    """A Store that any number of processes share."""

    lost = "the chart lacks the last %s"

    def __init__(self, url: str) -> None:
        super().__init__()
        self._look_ups = Postgres(url, LOOK_UPS, STATEMENT_SECONDS, SESSION)
        self._hits = Postgres(url, HITS, STATEMENT_SECONDS, SESSION)
        self._finding = Batches(LOOK_UPS, self._find)
        self._counting = Batches(HITS, self._count)
        self._one = BoundedSemaphore()  # what is not about one key leaves connections for keys
        self._chart = Counter[str]()  # requests of each key that are not in hourly_usage yet

    def _look_up(self, key_id: str) -> ApiKey | None:
        return self._finding.ask(key_id)

    def _find(self, key_id: str, items: list[None]) -> list[ApiKey | None]:
        rows = run(self._look_ups, FIND.replace("?", "%s"), [key_id])
        return [made_of(rows[0]) if rows else None] * len(items)

    def left(self, key: ApiKey, quota: Quota) -> Allowance:
        moment = time.time()
        return key.usage.within(quota, moment).allowance(quota, moment, True)

    def hit(self, key_id: str, quota: Quota) -> Allowance | None:
        return self._counting.ask(key_id, quota)

    def _count(self, key_id: str, quotas: list[Quota]) -> list[Allowance | None]:
        """The Allowance of each hit, or None if the key was deleted.

        A key has one quota. If its tier was just changed, the one of its last hit holds for all.
        """
        quota, answers = quotas[-1], list[Allowance | None]()
        hits = len(quotas)
        while missing := len(quotas) - len(answers):
            moment = time.time()
            end, latest = quota.window_ends(moment)
            values = {"id": key_id, "hits": hits, "end": end, "latest": latest}
            values |= {"now": int(moment), "limit": quota.limit}
            if rows := run(self._hits, HIT, values):
                total, reset, used = rows[0]
                self._chart[key_id] += hits
                for later in reversed(range(hits)):
                    usage = Usage(total - later, reset, used - later)
                    answers.append(usage.allowance(quota, moment, True))
                hits = missing - hits
            elif rows := run(self._hits, USAGE, values):
                usage = Usage(*rows[0]).within(quota, moment)
                hits = min(missing, quota.limit - usage.used)
                if hits <= 0:
                    answers += [usage.allowance(quota, moment, False)] * missing
            else:
                answers += [None] * missing
        return answers

    def ended(self, key_ids: set[str]) -> set[str]:
        self._ask("SELECT 1")  # so that an outage is noticed without a request, too
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
        with in_time(), self._one:
            return run(self._look_ups, query.replace("?", "%s"), values)

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
        self._look_ups.close_all()
        self._hits.close_all()
