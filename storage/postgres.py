"""Keys and counts in PostgreSQL, exact over any number of processes.

Each process makes one query at a time. Requests that arrive in the meantime share the next query,
so the cost of a request falls as the load rises. No request is admitted before it is counted. Needs
psycopg, which is optional.
"""

import math
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

CONNECTIONS = 4  # of a process for pages and the background; one more finds and counts
ANSWER_SECONDS = 0.6  # for a connection, and again for an answer; a busy machine needs 0.4

COUNT = Path(__file__).with_name("count.sql").read_text()
COUNT_UNLOCKED = COUNT.replace("FOR UPDATE OF api_key", "FOR UPDATE OF api_key SKIP LOCKED")


class Impatient(psycopg.Connection[Any]):
    """A connection on which every answer has to come within `patience` seconds.

    All that psycopg sends goes through `wait`: queries, BEGIN, COMMIT and ROLLBACK.
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
        seconds = max(2, math.ceil(patience))  # psycopg takes no less; the worker has a Timeout
        options = {"autoconnect": False, "prefer_psycopg3": True, "connect_timeout": seconds}
        super().__init__(url, max_connections=CONNECTIONS, stale_timeout=60, **options)

    def connect(self, reuse_if_open: bool = False) -> bool:
        try:
            with gevent.Timeout(self.patience):
                while True:
                    try:
                        return bool(super().connect(reuse_if_open))
                    except MaxConnectionsExceeded:
                        # The pool can wait by itself, but raises RuntimeError if a Timeout ends
                        # that: it releases a lock that it does not hold at that moment.
                        gevent.sleep(0.01)
        except gevent.Timeout:
            raise OperationalError(f"no connection within {self.patience} s") from None


class Hit(NamedTuple):
    """A request that is to be counted."""

    key_id: str
    quota: Quota


class PostgresStore:
    """A Store that any number of processes share."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[Any] | None = None
        self._waiting: list[tuple[str | Hit, AsyncResult]] = []
        self._asking = False
        self._remembered = Limiter()  # counts nothing: with a cost of 0 it only computes the window

    def find(self, key_id: str) -> ApiKey | None:
        row = self._ask(key_id)
        return made_of(row) if row else None

    def hit(self, key: ApiKey, quota: Quota, cost: int = 1) -> Allowance | None:
        if not cost:
            return self._remembered.hit(key.id, quota, key.usage, cost)
        return self._ask(Hit(key.id, quota))

    def sync(self, key_ids: set[str]) -> set[str]:
        self._ask("")  # no key has this id, but a lost connection is noticed before a request
        with database.connection_context():
            delete_old_rows(database, "ctid", "FOR UPDATE SKIP LOCKED")
            return ended_keys(key_ids, database)

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    def _ask(self, item: str | Hit) -> Any:
        """The row of a key's id, or the allowance of a hit; None if there is no such key."""
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
                with gevent.Timeout(ANSWER_SECONDS):
                    answers = self._answers([item for item, _ in batch])
            except (Exception, gevent.Timeout) as error:
                self.close()
                # Those who came meanwhile fail, too, so that nobody waits twice.
                batch, self._waiting = batch + self._waiting, []
                answers = [database_error(error)] * len(batch)
            for (_, waiting), answer in zip(batch, answers, strict=True):
                if isinstance(answer, BaseException):
                    waiting.set_exception(answer)
                else:
                    waiting.set(answer)
        self._asking = False

    def _answers(self, items: list[str | Hit]) -> list[Any]:
        """The answer to each item; raises psycopg.Error."""
        ids = [item for item in items if isinstance(item, str)]
        hits = [item for item in items if isinstance(item, Hit)]
        found = {row[0]: row for row in self._query(f"{FIND} = ANY(%s)", [ids])} if ids else {}
        counted = iter(self._count(hits)) if hits else iter(())
        return [found.get(item) if isinstance(item, str) else next(counted) for item in items]

    def _count(self, hits: list[Hit]) -> list[Allowance | OperationalError | None]:
        ids, quotas = zip(*hits, strict=True)
        _, limits, seconds = zip(*quotas, strict=True)
        asked = [list(ids), list(limits), list(seconds)]
        answers: list[Allowance | OperationalError | None] = [None] * len(hits)
        try:
            rows = self._query(COUNT, asked)
        except LockNotAvailable:  # somebody holds a row for long: only its own requests fail
            rows = self._query(COUNT_UNLOCKED, asked)
            answers = [OperationalError("the row of the key is locked")] * len(hits)
        for number, *allowance in rows:
            answers[number - 1] = Allowance(quotas[number - 1], *allowance)
        return answers

    def _query(self, sql: str, parameters: list[Any]) -> list[Any]:
        if not self._connection:
            self._connection = psycopg.connect(self._url, autocommit=True)
        return self._connection.execute(sql.encode(), parameters).fetchall()


def database_error(error: BaseException) -> BaseException:
    """What peewee would raise in place of psycopg's errors; a bug stays what it is."""
    if isinstance(error, gevent.Timeout):
        return OperationalError(f"no answer within {ANSWER_SECONDS} s")
    return OperationalError(str(error)) if isinstance(error, psycopg.Error) else error
