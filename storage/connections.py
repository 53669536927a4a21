"""Connections to PostgreSQL on which nothing waits for long.

Every wait is bounded by one of these, because none of them bounds all:

- The store bounds all its waits with one gevent.Timeout.
- `Pool.take` waits for a free connection for FREE_SECONDS at most, and a gevent.Timeout there
  bounds connecting, including the look-up of the host's name.
- `Impatient.wait` bounds each answer to a page or a command. Commands are not patched by gevent, so
  its Timeouts never fire there.
- `connect_timeout` bounds connecting in a command, to CONNECT_SECONDS for each address.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import gevent
import peewee
from gevent.queue import Empty, LifoQueue
from psycopg import Connection, OperationalError
from psycopg.conninfo import conninfo_attempts, conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

CONNECTIONS = 3  # for pages, in each process
FREE_SECONDS = 5  # how long to wait for one while others use them all
ANSWER_SECONDS = 0.6  # to connect, and again for an answer; a busy machine needs 0.4
CONNECT_SECONDS = 2  # to connect to an address in a command; libpq's minimum
# Of a connection of the store: no count waits for the disk, and none for a locked row for long.
SESSION = "SET synchronous_commit = off; SET lock_timeout = '50ms'"

# When connecting to an address last failed; the others are tried before it.
failed_at: defaultdict[str, float] = defaultdict(float)


class Impatient(Connection[Any]):
    """A connection on which each answer has to come within `patience` seconds.

    After each query, BEGIN, COMMIT and ROLLBACK psycopg calls `wait`, which raises psycopg.Error
    after `timeout` seconds; without one it would wait for ever.
    """

    patience: float = ANSWER_SECONDS

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        return super().wait(gen, interval, timeout or self.patience)


def connect(url: str) -> Impatient:
    """Connect to the first address that accepts it; raises psycopg.Error.

    The URL may name several hosts, and a host may have several addresses. Of several servers, only
    the primary can be written.
    """
    wanted: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, **conninfo_to_dict(url)}
    wanted.setdefault("target_session_attrs", "read-write")
    attempts: list[Any] = conninfo_attempts(wanted)
    *others, last = sorted((make_conninfo(**each) for each in attempts), key=failed_at.__getitem__)
    for address in others:
        with suppress(OperationalError):
            return connect_to(address)
    return connect_to(last)  # whose error, if there is one, is raised


def connect_to(address: str) -> Impatient:
    try:
        return Impatient.connect(address, autocommit=True)
    except BaseException:  # a Timeout, too
        failed_at[address] = time.monotonic()
        raise


class Pool:
    """A few connections that are used in turn; raises psycopg.Error. Each is made when needed."""

    def __init__(self, url: str, size: int, patience: float, session: str) -> None:
        self._url, self._patience, self._session = url, patience, session
        self._free = LifoQueue(items=[None] * size)
        self._new = set[Impatient]()  # those that were made since `close`

    def take(self) -> Impatient:
        """A connection that nobody else has; give it back."""
        try:
            connection: Impatient | None = self._free.get(timeout=FREE_SECONDS)
        except Empty:
            raise OperationalError(f"no free connection within {FREE_SECONDS} s") from None
        late = OperationalError(f"no connection within {self._patience} s")
        try:
            if not connection:
                with gevent.Timeout(self._patience, late):
                    connection = connect(self._url)
                    connection.patience = self._patience
                    connection.execute(self._session.encode())
                self._new.add(connection)
        except BaseException:
            if connection:
                connection.close()
            self._free.put(None)
            raise
        return connection

    def give(self, connection: Impatient) -> None:
        """Take a connection back; if it is lost, or waits for an answer, it is replaced."""
        is_idle = connection.info.transaction_status == TransactionStatus.IDLE
        if is_idle and connection in self._new:
            self._free.put(connection)
        else:
            self._new.discard(connection)
            connection.close()
            self._free.put(None)

    @contextmanager
    def connection(self) -> Iterator[Impatient]:
        connection = self.take()
        try:
            yield connection
        finally:
            self.give(connection)

    def close(self) -> None:
        """Close all connections, but those in use when they are given back; then make new ones."""
        self._new.clear()
        for connection in [self._free.get() for _ in range(self._free.qsize())]:
            if connection:
                connection.close()
            self._free.put(None)


class Postgres(peewee.PostgresqlDatabase):
    """The connections of pages and commands; raises PeeweeException."""

    def __init__(self, url: str, patience: float) -> None:
        super().__init__(url, autoconnect=False, prefer_psycopg3=True)
        # A statement that was given up does not go on waiting for a lock on the server.
        self._pool = Pool(url, CONNECTIONS, patience, f"SET lock_timeout = {int(900 * patience)}")
        self._lock = nullcontext()  # peewee's own would be held while one waits for a connection

    def _connect(self) -> Impatient:
        return self._pool.take()

    def _close(self, conn: Impatient) -> None:
        self._pool.give(conn)

    def close_all(self) -> None:
        self._pool.close()

    def commit(self) -> Any:
        try:
            return super().commit()
        except peewee.OperationalError as error:
            words = "COMMIT was not answered, so the change may have been stored"
            raise peewee.OperationalError(f"{words}: {error}") from None

    def rollback(self) -> Any:
        """After an error that has broken the connection, there is nothing to roll back."""
        with suppress(peewee.OperationalError):
            return super().rollback()
