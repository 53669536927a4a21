"""Connections to PostgreSQL on which nothing waits for long.

Every wait is bounded by one of these, because none of them bounds all:

- The store bounds all its waits with one gevent.Timeout.
- `Postgres` waits for a free connection for FREE_SECONDS at most, and a gevent.Timeout bounds
  connecting, including the look-up of the host's name.
- `Impatient.wait` bounds each answer. Commands are not patched by gevent, so its Timeouts never
  fire there.
- `connect_timeout` bounds connecting in a command, to CONNECT_SECONDS for each address.
"""

import time
from collections import defaultdict
from contextlib import nullcontext, suppress
from typing import Any

import gevent
from gevent.lock import BoundedSemaphore
from gevent.queue import LifoQueue
from peewee import OperationalError, PostgresqlDatabase
from psycopg import Connection, Error
from psycopg.conninfo import conninfo_attempts, conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

PAGES = 3  # connections of each process for pages; with those of the store, at most 10
FREE_SECONDS = 5  # how long to wait for one while others use them all
ANSWER_SECONDS = 0.6  # to connect, and again for an answer; a busy machine needs 0.4
CONNECT_SECONDS = 2  # to connect to an address in a command; libpq's minimum
# How long a connection is used: after a failover, all lead to the new primary by then. The old one
# may still answer, and be read-only.
USED_SECONDS = 3
# The server ends a statement that was given up, instead of carrying it out later. Needs version 14.
GIVE_UP = "SET client_connection_check_interval = '500ms'"

# When connecting to an address last failed; the others are tried before it.
failed_at: defaultdict[str, float] = defaultdict(float)


class NoFreeConnection(OperationalError):
    """Others used all connections, so nothing was asked."""


class Impatient(Connection[Any]):
    """A connection on which each answer has to come within `patience` seconds.

    After each query, BEGIN, COMMIT and ROLLBACK psycopg calls `wait`, which raises psycopg.Error
    after `timeout` seconds; without one it would wait for ever.
    """

    patience: float = ANSWER_SECONDS
    made_at: float

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
        with suppress(Error):
            return connect_to(address)
    return connect_to(last)  # whose error, if there is one, is raised


def connect_to(address: str) -> Impatient:
    try:
        return Impatient.connect(address, autocommit=True)
    except BaseException:  # a Timeout, too
        failed_at[address] = time.monotonic()
        raise


class Postgres(PostgresqlDatabase):
    """A database with a few connections, each made when needed; raises PeeweeException.

    Who waits for one gets it in the order of arrival. `session` is what a new one executes.
    """

    def __init__(self, url: str, size: int, patience: float, session: str) -> None:
        super().__init__(url, autoconnect=False, prefer_psycopg3=True)
        self._patience, self._session = patience, session
        self._turn = BoundedSemaphore()  # of who waits: else one who comes later might go first
        self._free = LifoQueue(items=[None] * size)  # each a connection, or one to be made
        # Who waits for a connection would hold this lock, and nobody could give one back. Nothing
        # needs it, because each greenlet has a state of its own.
        self._lock = nullcontext()

    def take(self) -> Impatient:
        """A connection that nobody else has; raises psycopg.Error, or OperationalError."""
        late = OperationalError(f"no free connection within {FREE_SECONDS} s")
        try:
            with gevent.Timeout(FREE_SECONDS, late), self._turn:
                connection: Impatient | None = self._free.get()
        except OperationalError as error:  # also of a Timeout around this one
            raise NoFreeConnection(str(error)) from None
        try:
            if connection and time.monotonic() > connection.made_at + USED_SECONDS:
                connection.close()
                connection = None
            return connection or self._new_connection()
        except BaseException:  # a Timeout, too
            self._free.put(None)
            raise

    def _new_connection(self) -> Impatient:
        late = OperationalError(f"no connection within {self._patience} s")
        with gevent.Timeout(self._patience, late):
            connection = connect(self.database)
            connection.patience, connection.made_at = self._patience, time.monotonic()
            connection.execute(f"{GIVE_UP}; {self._session}".encode())
        return connection

    def give_back(self, connection: Impatient) -> None:
        """Let others have it, unless it is lost, or still waits for an answer."""
        if connection.info.transaction_status != TransactionStatus.IDLE:
            connection.close()
        self._free.put(None if connection.closed else connection)

    _connect, _close = take, give_back  # as peewee calls them

    def close_all(self) -> None:
        """Close the connections that are not in use."""
        for connection in [self._free.get() for _ in range(self._free.qsize())]:
            if connection:
                connection.close()
            self._free.put(None)

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
