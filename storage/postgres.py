"""Keys and counts in PostgreSQL, exact over any number of processes.

Each process asks in batches: finds of keys in one, hits in another. Requests that arrive during a
query share the next one, so the cost of a request falls as the load rises. No request is admitted
before it is counted. Needs psycopg, which is optional.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import psycopg
from gevent.event import AsyncResult
from peewee import OperationalError
from psycopg.errors import LockNotAvailable

from models import ApiKey, User, database
from ratelimit import Allowance, Quota
from storage import Store
from storage.connections import ANSWER_SECONDS, connect
from storage.queries import FIND, delete_old_rows, ended_keys, made_of, owner

COUNT = Path(__file__).with_name("count.sql").read_bytes()
COUNT_UNLOCKED = COUNT.replace(b"FOR UPDATE OF api_key", b"FOR UPDATE OF api_key SKIP LOCKED")
# Between two tries to count in a row that is locked. Another process that counts has it for 1 ms or
# two; a page, a command or a person at psql may have it for much longer.
PAUSE_SECONDS = 0.005
LATE_TRIES = 25
LOCKED = object()  # the answer to a hit whose row stays locked
PROBE = ("", Quota("", 1, 1))  # a hit of no key

Connection = psycopg.Connection[Any]
Hit = tuple[str, Quota]  # the id of the key, and the quota of its tier
Query = Callable[[Connection, list[Any]], list[Any]]  # takes items, returns an answer to each


class Batch:
    """Answers all questions that arrive during one query by the next, in the order of arrival.

    It has a connection of its own, so that questions of another kind never wait for these.
    """

    def __init__(self, url: str, query: Query, on_failure: Callable[[], None]) -> None:
        self._url, self._query, self._on_failure = url, query, on_failure
        self._connection: Connection | None = None
        self._is_old = False
        self._waiting: list[tuple[Any, AsyncResult]] = []
        self._asking: gevent.Greenlet | None = None

    def ask(self, item: Any) -> Any:
        """The answer to this item; raises PeeweeException.

        Nobody waits for more than two queries, the one under way and the next.
        """
        answer = AsyncResult()
        self._waiting.append((item, answer))
        if not self._asking:  # a greenlet that has ended, for whatever reason, is false
            # In a greenlet of its own, or this request would also serve those that come later.
            self._asking = gevent.spawn(self._ask_all)
        with gevent.Timeout(2 * ANSWER_SECONDS, OperationalError("no answer in time")):
            return answer.get()

    def renew(self) -> None:
        """Make the next query over a new connection; one that is under way goes on."""
        self._is_old = True

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    def _ask_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                with gevent.Timeout(ANSWER_SECONDS):
                    answers = self._query(self._connected(), [item for item, _ in batch])
            except (Exception, gevent.Timeout) as error:
                self._on_failure()
                # Questions that came meanwhile fail, too, so that nobody waits twice.
                batch, self._waiting = batch + self._waiting, []
                for _, answer in batch:
                    answer.set_exception(database_error(error))
            else:
                for (_, answer), value in zip(batch, answers, strict=True):
                    answer.set(value)

    def _connected(self) -> Connection:
        if self._is_old:
            self.close()
            self._is_old = False
        if not self._connection:
            self._connection = connect(self._url)
        return self._connection


class PostgresStore(Store):
    """A Store that any number of processes share.

    A hit whose row another transaction has locked waits for it, but not among the others: it is
    asked again in a batch of its own, as are all further hits of that key, until one of them has
    got the row.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._finds = Batch(url, find_keys, self.reconnect)
        self._hits = Batch(url, count_hits, self.reconnect)
        late = partial(count_unlocked, tries=LATE_TRIES)
        self._late_hits = Batch(url, late, self.reconnect)
        self._locked: set[str] = set()  # ids of the keys whose hits go there

    def _look_up(self, key_id: str) -> ApiKey | None:
        return self._finds.ask(key_id)

    def hit(self, key_id: str, quota: Quota) -> Allowance | None:
        if key_id not in self._locked:
            allowance = self._hits.ask((key_id, quota))
            if allowance is not LOCKED:
                return allowance
            self._locked.add(key_id)
        allowance = self._late_hits.ask((key_id, quota))
        if allowance is LOCKED:
            raise OperationalError("the row of the key is locked")
        self._locked.discard(key_id)
        return allowance

    def owner(self, key: ApiKey) -> tuple[User, int] | None:
        with database.connection_context():
            return owner(key, database)

    def ended(self, key_ids: set[str]) -> set[str]:
        self._look_up("")  # it calls `reconnect` if the server is lost, before a request notices
        with database.connection_context():
            return ended_keys(key_ids, database)

    def save(self) -> None:
        """Hits have already been saved."""
        self._hits.ask(PROBE)  # so that a server that cannot be written is noticed before a request
        with database.connection_context():
            delete_old_rows(database)  # mostly none, so it may run at each save

    def reconnect(self) -> None:
        """Replace all connections, because a query has failed.

        Another host may be the primary by now, and this one may still answer.
        """
        for batch in (self._finds, self._hits, self._late_hits):
            batch.renew()
        gevent.spawn(database.close_idle)  # which may wait for somebody who is connecting

    def close(self) -> None:
        for batch in (self._finds, self._hits, self._late_hits):
            batch.close()


def find_keys(connection: Connection, ids: list[str]) -> list[ApiKey | None]:
    """The key with each id, if there is one; raises psycopg.Error."""
    rows = connection.execute(f"{FIND} = ANY(%s)".encode(), [ids])
    found = {key.id: key for key in map(made_of, rows)}
    return [found.get(key_id) for key_id in ids]


def count_hits(connection: Connection, hits: list[Hit]) -> list[Any]:
    """The Allowance of each hit, None if its key was deleted, or LOCKED; raises psycopg.Error."""
    try:
        return count(connection, COUNT, hits)
    except LockNotAvailable:  # for some of the rows
        return count_unlocked(connection, hits)


def count_unlocked(connection: Connection, hits: list[Hit], tries: int = 4) -> list[Any]:
    """As `count_hits`, but without waiting for a row: the rows before it would stay locked.

    Leaves out the rows that are locked, and tries these again after a pause.
    """
    answers: list[Any] = [LOCKED] * len(hits)
    while True:
        left = [number for number, answer in enumerate(answers) if answer is LOCKED]
        counted = count(connection, COUNT_UNLOCKED, [hits[number] for number in left])
        for number, allowance in zip(left, counted, strict=True):
            answers[number] = allowance or LOCKED
        tries -= 1
        if not tries or LOCKED not in answers:
            return answers
        gevent.sleep(PAUSE_SECONDS)


def count(connection: Connection, query: bytes, hits: list[Hit]) -> list[Allowance | None]:
    """The Allowance of each hit, None if the query has not found its row; raises psycopg.Error."""
    ids, quotas = zip(*hits, strict=True)
    _, limits, seconds = zip(*quotas, strict=True)
    answers: list[Allowance | None] = [None] * len(hits)
    rows = connection.execute(query, [list(ids), list(limits), list(seconds)])
    for number, chosen, *allowance in rows:
        answers[number - 1] = Allowance(quotas[chosen - 1], *allowance)
    return answers


def database_error(error: BaseException) -> BaseException:
    """What peewee would raise in place of psycopg's errors; a bug stays what it is."""
    if isinstance(error, gevent.Timeout):
        return OperationalError(f"no answer within {ANSWER_SECONDS} s")
    return OperationalError(str(error)) if isinstance(error, psycopg.Error) else error
