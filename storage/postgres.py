"""Keys and counts in PostgreSQL, exact over any number of processes.

Each process makes one query at a time. Requests that arrive in the meantime share the next query,
so the cost of a request falls as the load rises. No request is admitted before it is counted. Needs
psycopg, which is optional.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gevent
import psycopg
from gevent.event import AsyncResult
from peewee import OperationalError, Psycopg3Adapter
from playhouse.pool import MaxConnectionsExceeded, PooledPostgresqlDatabase
from psycopg.errors import LockNotAvailable

from models import ApiKey, database
from ratelimit import Allowance, Limiter, Quota
from storage.queries import FIND, delete_old_rows, ended_keys, made_of

CONNECTIONS = 4  # per process, for pages and the background; one more finds keys and counts hits
ANSWER_SECONDS = 0.6  # to connect, and again for an answer; a busy machine needs 0.4

COUNT = Path(__file__).with_name("count.sql").read_bytes()
COUNT_WITHOUT_LOCKED = COUNT.replace(b"FOR UPDATE OF api_key", b"FOR UPDATE OF api_key SKIP LOCKED")

Connection = psycopg.Connection[Any]
Query = Callable[[Connection, list[Any]], list[Any]]  # takes items, returns an answer to each


class Impatient(Connection):
    """A connection on which every answer has to come within `patience` seconds.

    After each query, BEGIN, COMMIT and ROLLBACK psycopg calls `wait`, which raises psycopg.Error
    after `timeout` seconds; without one it would wait for ever. A gevent.Timeout cannot do this in
    commands, which gevent has not patched. Connecting is bounded by `Postgres.connect`.
    """

    patience: float = ANSWER_SECONDS

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        return super().wait(gen, interval, timeout or self.patience)


class Adapter(Psycopg3Adapter):
    """Lets peewee use these connections."""

    def connect(self, db: "Postgres", **params: Any) -> Impatient:
        connection = Impatient.connect(db.database, **params)
        connection.patience = db.patience
        return connection


class Postgres(PooledPostgresqlDatabase):
    """A pool of connections on which every wait is short; raises PeeweeException."""

    psycopg3_adapter = Adapter

    def __init__(self, url: str, patience: float) -> None:
        self.patience = patience
        seconds = max(2, math.ceil(patience))  # libpq's minimum is 2; `connect` is shorter
        options = {"autoconnect": False, "prefer_psycopg3": True, "connect_timeout": seconds}
        super().__init__(url, max_connections=CONNECTIONS, stale_timeout=60, **options)

    def connect(self, reuse_if_open: bool = False) -> bool:
        try:
            with gevent.Timeout(self.patience):
                while True:
                    try:
                        return bool(super().connect(reuse_if_open))
                    except MaxConnectionsExceeded:
                        # The pool can wait by itself, but if a Timeout ends that, it raises
                        # RuntimeError, because it releases a lock that it does not hold.
                        gevent.sleep(0.01)
        except gevent.Timeout:
            raise OperationalError(f"no connection within {self.patience} s") from None


class Question(NamedTuple):
    """What one request asks; `query` answers the items of many questions at once."""

    query: Query
    item: Any
    answer: AsyncResult


class PostgresStore:
    """A Store that any number of processes share."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Connection | None = None
        self._waiting: list[Question] = []
        self._asking = False
        self._windows = Limiter()  # counts nothing, only computes the current window

    def find(self, key_id: str) -> ApiKey | None:
        return self._ask(find_keys, key_id)

    def hit(self, key: ApiKey, quota: Quota, cost: int = 1) -> Allowance | None:
        if not cost:
            return self._windows.hit(key.id, quota, key.usage, cost)
        return self._ask(count_hits, (key.id, quota))

    def ended(self, key_ids: set[str]) -> set[str]:
        with database.connection_context():
            return ended_keys(key_ids, database)

    def save(self) -> None:
        """Hits have already been saved."""
        self.find("")  # no key has this id, but a lost connection is noticed before a request
        with database.connection_context():
            delete_old_rows(database)  # mostly none, so it may run at each save

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    def _ask(self, query: Query, item: Any) -> Any:
        """The answer to this item; raises PeeweeException."""
        self._waiting.append(question := Question(query, item, AsyncResult()))
        if not self._asking:
            self._asking = True
            gevent.spawn(self._ask_all)  # not here: this request need not wait for later ones
        return question.answer.get()

    def _ask_all(self) -> None:
        """Answer all waiting questions of one kind with one query, until none is left."""
        while self._waiting:
            kinds = {question.query for question in self._waiting}
            query: Query = (
                find_keys if find_keys in kinds else count_hits
            )  # counting may wait for a lock
            batch = [question for question in self._waiting if question.query is query]
            self._waiting = [question for question in self._waiting if question.query is not query]
            try:
                with gevent.Timeout(ANSWER_SECONDS):
                    answers = query(self._connected(), [question.item for question in batch])
            except (Exception, gevent.Timeout) as error:
                self.close()
                # Questions that came meanwhile fail, too, so that nobody waits twice.
                batch, self._waiting = batch + self._waiting, []
                answers = [database_error(error)] * len(batch)
            for question, answer in zip(batch, answers, strict=True):
                if isinstance(answer, BaseException):
                    question.answer.set_exception(answer)
                else:
                    question.answer.set(answer)
        self._asking = False

    def _connected(self) -> Connection:
        if not self._connection:
            self._connection = psycopg.connect(self._url, autocommit=True)
        return self._connection


def find_keys(connection: Connection, ids: list[str]) -> list[ApiKey | None]:
    """The key with each id, if there is one; raises psycopg.Error."""
    rows = connection.execute(f"{FIND} = ANY(%s)".encode(), [ids])
    found = {key.id: key for key in map(made_of, rows)}
    return [found.get(key_id) for key_id in ids]


def count_hits(
    connection: Connection, hits: list[tuple[str, Quota]]
) -> list[Allowance | OperationalError | None]:
    """The allowance of each hit, None if its key was deleted; raises psycopg.Error."""
    ids, quotas = zip(*hits, strict=True)
    _, limits, seconds = zip(*quotas, strict=True)
    asked = [list(ids), list(limits), list(seconds)]
    answers: list[Allowance | OperationalError | None] = [None] * len(hits)
    try:
        rows = connection.execute(COUNT, asked).fetchall()
    except LockNotAvailable:  # for too long; now only requests for locked rows fail
        rows = connection.execute(COUNT_WITHOUT_LOCKED, asked).fetchall()
        answers = [OperationalError("the row of the key is locked")] * len(hits)
    for number, *allowance in rows:
        answers[number - 1] = Allowance(quotas[number - 1], *allowance)
    return answers


def database_error(error: BaseException) -> BaseException:
    """What peewee would raise in place of psycopg's errors; a bug stays what it is."""
    if isinstance(error, gevent.Timeout):
        return OperationalError(f"no answer within {ANSWER_SECONDS} s")
    return OperationalError(str(error)) if isinstance(error, psycopg.Error) else error
