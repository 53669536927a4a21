"""Connections to PostgreSQL, and how long anything waits for it.

psycopg's pool makes connections in the background, when they are needed, and closes those that are
not. A request never makes one itself: it waits for one until its time is over.
"""

import logging
from contextlib import nullcontext, suppress
from typing import Any
from weakref import WeakSet

from peewee import OperationalError, PostgresqlDatabase
from psycopg import Connection, Error
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool

# All time limits, in seconds: who waits, and for what.
HIT_SECONDS = 0.9  # a hit, or the look-up of a key: for the next two together
STORE_SECONDS = 0.8  # a query of the store: for a connection
ANSWER_SECONDS = 0.6  # each statement, of a page, too: for its answer
# In PostgreSQL, a count waits for a locked row for 50 ms: SESSION in postgres.py.
PAUSE_SECONDS = 0.5  # a key that has failed: until it is asked about again
PAGE_SECONDS = 3  # a page: for a connection
CONNECT_SECONDS = 2  # the pool, or a command: for each address; libpq's minimum
NODE_SECONDS = 0.3  # keys on other nodes of a Citus cluster: for a node that is away
SHRINK_SECONDS = 7  # between closing two idle connections of a pool: all are gone in a minute
USED_SECONDS = 60  # any connection: until it is replaced

# A statement that was given up ends on the server, too, and does not keep a connection there.
GIVE_UP = b"SET client_connection_check_interval = '500ms'"
# Errors after which all connections are replaced: the server is lost, or read-only, or stopping.
LOST = (None, "25006", "57P01", "57P03")
POOLS: "WeakSet[Pool]" = WeakSet()  # of this process

logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # or it would log each failed attempt


class Impatient(Connection[Any]):
    """A connection on which each answer has to come within `patience` seconds.

    For each query, BEGIN, COMMIT and ROLLBACK psycopg calls `wait`, which raises psycopg.Error
    after `timeout` seconds; without one it would wait for ever.
    """

    patience = ANSWER_SECONDS
    failure = ""  # why connecting has failed the last time, if it has

    @classmethod
    def connect(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().connect(*args, **kwargs)
        except Error as error:
            cls.failure = str(error)
            raise

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        try:
            return super().wait(gen, interval, timeout or self.patience)
        except Error as error:
            if error.sqlstate in LOST:
                for pool in POOLS:
                    pool.drain()
            raise

    def is_lost(self) -> bool:
        """Whether the server has closed it: then its last words, and the end, can be read."""
        try:
            for _ in range(2):
                self.pgconn.consume_input()
        except Error:
            return True
        return False


def address_of(url: str) -> str:
    """The URL with our defaults. Of several hosts, only the primary can be written."""
    options: Any = {"connect_timeout": CONNECT_SECONDS, "target_session_attrs": "read-write"}
    return make_conninfo(**{**options, **conninfo_to_dict(url)})


class Pool(ConnectionPool[Impatient]):
    """At most `size` connections, each of which has executed `session`.

    Whoever finds none free waits for `seconds`, in the order of arrival.
    """

    def __init__(self, url: str, size: int, seconds: float, session: str) -> None:
        def configure(connection: Impatient) -> None:
            connection.execute(session.encode())
            with suppress(Error):  # PostgreSQL on Windows, and before 15 on macOS, does not know it
                connection.execute(GIVE_UP)
            Impatient.failure = ""

        super().__init__(
            address_of(url),
            connection_class=Impatient,
            kwargs={"autocommit": True},
            configure=configure,
            min_size=0,
            max_size=size,
            timeout=seconds,
            max_idle=SHRINK_SECONDS,
            max_lifetime=USED_SECONDS,
            reconnect_timeout=0,
            open=False,
        )
        POOLS.add(self)

    def take(self) -> Impatient:
        """A connection that nobody else has, until `putconn`; raises OperationalError."""
        self.open()
        try:
            while (connection := self.getconn()).is_lost():
                connection.close()
                self.putconn(connection)
            return connection
        except Error as error:
            if Impatient.failure:
                raise OperationalError(Impatient.failure) from None
            raise NoneFree(str(error)) from None

    def fill(self) -> None:
        """Make all connections, so that the first requests find them, if that can be done soon."""
        taken: list[Impatient] = []
        with suppress(OperationalError):
            while len(taken) < self.max_size:
                taken.append(self.take())
        for connection in taken:
            self.putconn(connection)

    def run(self, query: str, values: Any) -> list[Any]:
        """The rows that answer a query; raises OperationalError."""
        connection = self.take()
        try:
            cursor = connection.execute(query.encode(), values)
            return cursor.fetchall() if cursor.description else []
        except Error as error:
            raise OperationalError(str(error)) from None
        finally:
            self.putconn(connection)


class NoneFree(OperationalError):
    """Others used all connections for too long."""


class Postgres(PostgresqlDatabase):
    """The database of commands, each of which makes its connection; raises PeeweeException."""

    def __init__(self, url: str, patience: float) -> None:
        super().__init__(url, autoconnect=False, prefer_psycopg3=True)
        self.patience = patience
        # A statement that was given up does not go on waiting for a lock on the server.
        self.session = f"SET lock_timeout = {int(900 * patience)}"

    def _connect(self) -> Impatient:
        connection = Impatient.connect(address_of(self.database), autocommit=True)
        connection.patience = self.patience
        connection.execute(self.session.encode())
        return connection

    def close_all(self) -> None:
        """Nothing is open between two commands."""

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


class PooledPostgres(Postgres):
    """The database of pages, which share a few connections."""

    def __init__(self, url: str, size: int) -> None:
        super().__init__(url, ANSWER_SECONDS)
        self._pool = Pool(url, size, PAGE_SECONDS, self.session)
        # Who waits for a connection would hold this lock, and nobody could give one back. Nothing
        # needs it, because each greenlet has a state of its own.
        self._lock = nullcontext()

    def _connect(self) -> Impatient:
        return self._pool.take()

    def _close(self, connection: Impatient) -> None:
        self._pool.putconn(connection)

    def close_all(self) -> None:
        self._pool.close(timeout=0)
