"""Connections to PostgreSQL on which nothing waits for long.

Every wait is bounded by one of these, because none of them bounds all:

- The store bounds all its waits with one gevent.Timeout.
- `Postgres.connect` waits for a free connection for FREE_SECONDS at most, and a gevent.Timeout
  there bounds connecting, including the look-up of the host's name.
- `Impatient.wait` bounds each answer to a page or a command. Commands are not patched by gevent, so
  its Timeouts never fire there.
- `connect_timeout` bounds connecting in a command, to CONNECT_SECONDS for each address.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import gevent
from gevent.lock import BoundedSemaphore
from gevent.queue import LifoQueue
from peewee import OperationalError, Psycopg3Adapter
from playhouse.pool import PooledPostgresqlDatabase
from psycopg import Connection, Error
from psycopg.conninfo import conninfo_attempts, conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

CONNECTIONS = 3  # for pages, in each process
FREE_SECONDS = 5  # how long to wait for one while others use them all
ANSWER_SECONDS = 0.6  # to connect, and again for an answer; a busy machine needs 0.4
CONNECT_SECONDS = 2  # to connect to an address in a command; libpq's minimum
STALE_SECONDS = 10  # how long a connection of the pool is used
# Of a connection of the store: no count waits for the disk, and none for a locked row for long.
SESSION = "SET synchronous_commit = off; SET lock_timeout = '50ms'"

# When connecting to an address last failed; the others are tried before it.
failed_at: defaultdict[str, float] = defaultdict(float)


def connect(url: str, kind: type[Connection[Any]] = Connection) -> Any:
    """Connect to the first address that accepts it; raises psycopg.Error.

    The URL may name several hosts, and a host may have several addresses. Of several servers, only
    the primary can be written.
    """
    wanted: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, **conninfo_to_dict(url)}
    wanted.setdefault("target_session_attrs", "read-write")
    attempts: list[Any] = conninfo_attempts(wanted)
    *others, last = sorted((make_conninfo(**each) for each in attempts), key=failed_at.__getitem__)
    for address in others:
        with suppress(Error):
            return connect_to(address, kind)
    return connect_to(last, kind)  # whose error, if there is one, is raised


def connect_to(address: str, kind: type[Connection[Any]]) -> Any:
    try:
        return kind.connect(address, autocommit=True)
    except BaseException:  # a Timeout, too
        failed_at[address] = time.monotonic()
        raise


class Pool:
    """A few connections of the store, used in turn. Raises psycopg.Error, and waits without limit.

    Each is made when it is first used. Counts need not wait for the disk.
    """

    def __init__(self, url: str, size: int) -> None:
        self._url, self._generation = url, 0
        self._free = LifoQueue(items=[(0, None)] * size)  # with the generation of each

    @contextmanager
    def connection(self) -> Iterator[Connection[Any]]:
        generation, connection = self._free.get()
        try:
            if connection and generation != self._generation:
                connection.close()
                connection = None
            if not connection:
                generation, connection = self._generation, connect(self._url)
                connection.execute(SESSION)
            yield connection
        finally:
            if connection and connection.info.transaction_status != TransactionStatus.IDLE:
                connection.close()  # it is lost, or its answer did not come
                connection = None
            self._free.put((generation, connection))

    def renew(self) -> None:
        """Replace all connections when they are next used."""
        self._generation += 1

    def close(self) -> None:
        """Close those that are not in use."""
        while not self._free.empty():
            if connection := self._free.get()[1]:
                connection.close()


class Impatient(Connection[Any]):
    """A connection on which each answer has to come within `patience` seconds.

    After each query, BEGIN, COMMIT and ROLLBACK psycopg calls `wait`, which raises psycopg.Error
    after `timeout` seconds; without one it would wait for ever.
    """

    patience: float = ANSWER_SECONDS

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        return super().wait(gen, interval, timeout or self.patience)


class Adapter(Psycopg3Adapter):
    """Lets peewee use these connections."""

    def connect(self, db: "Postgres", **_: Any) -> Impatient:
        connection: Impatient = connect(db.database, Impatient)
        connection.patience = db.patience
        return connection


class Postgres(PooledPostgresqlDatabase):
    """A pool of connections for pages, commands and the background; raises PeeweeException."""

    psycopg3_adapter = Adapter

    def __init__(self, url: str, patience: float) -> None:
        self.patience = patience
        self._free = BoundedSemaphore(CONNECTIONS)  # given in the order of arrival
        options = {"autoconnect": False, "prefer_psycopg3": True, "stale_timeout": STALE_SECONDS}
        super().__init__(url, CONNECTIONS, **options)

    def connect(self, reuse_if_open: bool = False) -> bool:
        if not self.is_closed():
            return bool(super().connect(reuse_if_open))
        if not self._free.acquire(timeout=FREE_SECONDS):
            raise OperationalError(f"no free connection within {FREE_SECONDS} s")
        try:
            with gevent.Timeout(self.patience):
                return bool(super().connect(reuse_if_open))
        except gevent.Timeout:
            raise OperationalError(f"no connection within {self.patience} s") from None
        finally:
            if self.is_closed():
                self._free.release()

    def close(self) -> None:
        if not self.is_closed():
            super().close()
            self._free.release()

    def commit(self) -> Any:
        try:
            return super().commit()
        except OperationalError as error:
            words = "COMMIT was not answered, so the change may have been stored"
            raise OperationalError(f"{words}: {error}") from None

    def rollback(self) -> Any:
        """After an error that has broken the connection, there is nothing to roll back."""
        with suppress(OperationalError):
            return super().rollback()
