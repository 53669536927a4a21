"""Keys and counts in PostgreSQL, exact over any number of processes; needs psycopg.

A hit is one UPDATE of one row, and no request is admitted before it. psycopg's pools connect in the
background. A request waits for a connection and for the answer to each statement, and each of these
waits has its own limit.
"""

import logging
import time
from collections import Counter
from contextlib import nullcontext
from select import POLLIN
from typing import Any

from gevent.monkey import get_original
from peewee import OperationalError, PostgresqlDatabase
from psycopg import Connection, Error
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import ConnectionPool, TooManyRequests

from models import HOUR, now
from ratelimit import Allowance, Quota, Usage
from storage.key_store import KeyStore
from storage.outage import once_per_minute

CONNECTION_SECONDS = 1.3  # how long a request waits for a connection
ANSWER_SECONDS = 0.5  # how long the answer to a statement may take
# How long a hit takes at most: two statements, each with its connection, and some time between.
HIT_SECONDS = 2 * (CONNECTION_SECONDS + ANSWER_SECONDS) + 0.4
SAVE_CONNECTION_SECONDS = 0.5  # how long a save waits for a connection; a stop waits for the save
CONNECT_SECONDS = 2  # the time to connect to each address; the least that libpq allows
SHRINK_SECONDS = 7  # between closing two idle connections of a pool
KEY_CONNECTIONS = 7  # of each process, for keys
PAGE_CONNECTIONS = 3  # of each process, for pages
# How many keys a save names, so that it ends in time. They are sorted, because processes that save
# the same keys in different orders wait for each other.
MAX_SAVED = 5000
MAX_WAITING = 500  # requests that wait, with those that gave up (see `get_connection`)
# What each session sets, because a role or a database may have other defaults. At a stricter
# isolation level, PostgreSQL refuses a hit that waited for another hit of the same key.
SESSION = {
    "default_transaction_isolation": "read committed",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "transaction_timeout": "0",
    "synchronous_commit": "on",
    "citus.multi_shard_modify_mode": "sequential",  # a transaction may change "user" after the keys
    "idle_session_timeout": "0",  # a command may wait for a password to be typed
}
# What a start checks. No session sets the last two: `is_stale` reads one of them, and with an
# operator's value of the other, PostgreSQL frees the locks of clients that are gone.
NEEDED = SESSION | {
    "server_encoding": "UTF8",
    "default_transaction_read_only": "off",
    "idle_in_transaction_session_timeout": "0",
}
# A time limit that is longer than a request waits is no reason to refuse a start. With a Turkish
# collation, `IDA` and `ida` would be two users.
UNMET = f"""SELECT name, setting, needed
    FROM pg_settings JOIN unnest(%s::text[], %s::text[]) AS wanted (name, needed) USING (name)
    WHERE setting <> needed
    AND CASE unit WHEN 'ms' THEN setting::int < {1000 * ANSWER_SECONDS} ELSE true END
    UNION ALL SELECT 'lower(''I'')', lower('I'), 'i' WHERE lower('I') <> 'i'"""
# `Usage.in_current_window` in SQL, because one statement has to decide and count: adds one request
# if the limit allows it. A row whose `reset` is one of the two ends of `Quota.window_ends`, or
# between them, belongs to the current window.
SAME_WINDOW = "reset BETWEEN %(end)s AND %(latest)s"
USED_AFTER = f"1 + CASE WHEN {SAME_WINDOW} THEN used ELSE 0 END"
HIT = f"""UPDATE api_key SET total = total + 1, used = {USED_AFTER}, last_used_at = %(now)s,
    reset = CASE WHEN {SAME_WINDOW} THEN reset ELSE %(end)s END
    WHERE id = %(id)s AND {USED_AFTER} <= %(limit)s RETURNING total, reset, used"""
SAVE_HOUR = """INSERT INTO hourly_usage (hour, key_id, requests)
    SELECT %s, * FROM unnest(%s::text[], %s::bigint[])
    ON CONFLICT (hour, key_id) DO UPDATE SET requests = hourly_usage.requests + excluded.requests"""
poll = get_original("select", "poll")  # gevent's own would let other greenlets run

# The pool says why it cannot connect only to this logger, at each attempt.
pool_log = logging.getLogger("psycopg.pool")
pool_log.setLevel(logging.WARNING)
pool_log.addFilter(once_per_minute)


class TimedConnection(Connection[Any]):
    """A connection on which each answer has to come within ANSWER_SECONDS.

    For each statement psycopg calls `wait`, which raises psycopg.Error after `timeout` seconds.
    Without one it would wait for ever for a server that is frozen.
    """

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        return super().wait(gen, interval, timeout or ANSWER_SECONDS)


def options(url: str) -> dict[str, Any]:
    """The connection options: those of the URL, and ours."""
    return {
        "connect_timeout": CONNECT_SECONDS,
        "target_session_attrs": "read-write",  # of several hosts, the primary is used
        **conninfo_to_dict(url),
        "client_encoding": "UTF8",
    }


def set_session(connection: Connection[Any], settings: dict[str, str]) -> None:
    """Change settings of the session, but not behind a pooler.

    A pooler like PgBouncer, whose process ID is not the server's, may run each transaction in
    another session: settings would reach other clients, and prepared statements would be missing.
    """
    query = """SELECT set_config(name, value, false)
        FROM unnest(%s::text[], %s::text[]) AS setting (name, value)
        WHERE pg_backend_pid() = %s AND current_setting(name, true) IS NOT NULL"""
    if not connection.execute(
        query, [list(settings), list(settings.values()), connection.info.backend_pid]
    ).fetchone():
        connection.prepare_threshold = None


def connection_pool(url: str, size: int, **more: str) -> ConnectionPool[TimedConnection]:
    """A pool of at most `size` connections, whose sessions have SESSION and `more`.

    `get_connection` opens it.
    """
    # A statement that was given up ends on the server, too, and does not keep its connection there.
    session = SESSION | {"statement_timeout": f"{1000 * ANSWER_SECONDS:.0f}"} | more
    return ConnectionPool(
        url,
        connection_class=TimedConnection,
        kwargs=options(url) | {"autocommit": True},  # a hit is one round trip, without a COMMIT
        configure=lambda connection: set_session(connection, session),
        # One idle connection is closed every SHRINK_SECONDS: all of them, within a minute.
        min_size=0,
        max_size=size,
        max_idle=SHRINK_SECONDS,
        # Memory does not grow in an outage.
        max_waiting=MAX_WAITING,
        # With more than 0, psycopg would try to connect ever more rarely after an outage, and also
        # while nothing asks for a connection.
        reconnect_timeout=0,
        # Threads do not survive the fork of gunicorn's workers.
        open=False,
    )


def get_connection(
    pool: ConnectionPool[TimedConnection], timeout: float = CONNECTION_SECONDS
) -> TimedConnection:
    """A connection that can be used, within `timeout` seconds; raises psycopg.Error.

    Until there is a connection, the pool keeps all requests that gave up waiting, with all that
    belongs to them. Once it has MAX_WAITING of them, it would not even try to connect.
    """
    pool.open()
    deadline = time.monotonic() + timeout
    try:
        while is_stale(connection := pool.getconn(deadline - time.monotonic())):
            connection.close()
            pool.putconn(connection)  # the pool replaces it
        return connection
    except TooManyRequests:
        pool.check()  # lets a pool that has no connection try to connect
        raise


def is_stale(connection: TimedConnection) -> bool:
    """Whether the server has closed an idle connection, or may no longer be the primary.

    Both are known without a query: a connection that was closed has something to read, and
    PostgreSQL 14 and later says with each answer whether it is read-only.
    """
    poller = poll()
    poller.register(connection, POLLIN)
    return bool(
        poller.poll(0) or connection.info.parameter_status("default_transaction_read_only") == "on"
    )


class CommandDatabase(PostgresqlDatabase):
    """The connection of a start or a command, which may wait."""

    def __init__(self, url: str) -> None:
        super().__init__(url, autoconnect=False, prefer_psycopg3=True, **options(url))

    def _connect(self) -> Connection[Any]:
        """Raises OperationalError if requests would fail with the settings of the server."""
        connection = super()._connect()
        set_session(connection, SESSION)
        if unmet := connection.execute(UNMET, [list(NEEDED), list(NEEDED.values())]).fetchone():
            connection.close()
            raise OperationalError("{} is {}, and must be {}".format(*unmet))
        return connection


class PageDatabase(PostgresqlDatabase):
    """The connections of pages."""

    def __init__(self, url: str) -> None:
        super().__init__(url, autoconnect=False, prefer_psycopg3=True)
        self._pool = connection_pool(url, PAGE_CONNECTIONS)
        # A greenlet that waits for a connection would hold this lock, and no other could give one
        # back. Nothing needs it, because each greenlet has a state of its own.
        self._lock = nullcontext()

    def _connect(self) -> TimedConnection:
        return get_connection(self._pool)

    def _close(self, connection: TimedConnection) -> None:
        self._pool.putconn(connection)

    def close_all(self) -> None:
        self._pool.close(timeout=0)


class Store(KeyStore):
    """A KeyStore that any number of processes share."""

    def __init__(self, url: str) -> None:
        # No count waits for the disk.
        self._pool = connection_pool(url, KEY_CONNECTIONS, synchronous_commit="off")
        self._chart = Counter[str]()  # requests of each key that are not in hourly_usage yet

    def hit(self, key_id: str, quota: Quota) -> Allowance | None:
        moment = time.time()
        end, latest = quota.window_ends(moment, HIT_SECONDS)
        values = {
            "id": key_id,
            "end": end,
            "latest": latest,
            "now": int(moment),
            "limit": quota.limit,
        }
        if rows := self._execute(HIT, values):
            self._chart[key_id] += 1
            return Usage(*rows[0]).allowance(quota, moment, True)
        # From here on, too, `moment` decides on the window, which may have ended since.
        key = self._look_up(key_id)
        if key is None:
            return None
        usage = key.usage.in_current_window(quota, moment, HIT_SECONDS)
        if usage.used < quota.limit:  # another process has begun the next window
            return self.hit(key_id, quota)
        return usage.allowance(quota, moment, False)

    def save(self) -> bool:
        """A request counts for the hour in which it is saved.

        What is saved is taken out first, so that no other greenlet saves it, too.
        """
        saved = {key_id: self._chart.pop(key_id) for key_id in sorted([*self._chart][:MAX_SAVED])}
        if not saved:
            return False
        try:
            self._execute(
                SAVE_HOUR,
                (now() // HOUR * HOUR, [*saved], [*saved.values()]),
                timeout=SAVE_CONNECTION_SECONDS,
            )
        except BaseException:
            self._chart.update(saved)  # which adds
            raise
        return True

    def save_to_keys(self) -> None:
        """Do nothing: a hit is counted in the key's row, so no revocation waits for the chart."""

    def save_and_close(self) -> None:
        super().save_and_close()
        self._pool.close(timeout=0)

    def _query(self, query: str, *values: object) -> list[Any]:
        return self._execute(query.replace("?", "%s"), values)

    def _execute(self, query: str, values: Any, timeout: float = CONNECTION_SECONDS) -> list[Any]:
        """The rows; waits for a connection for at most `timeout` seconds."""
        try:
            connection = get_connection(self._pool, timeout)
            try:
                cursor = connection.execute(query.encode(), values)
                return cursor.fetchall() if cursor.description else []
            finally:
                self._pool.putconn(connection)
        except Error as error:
            raise OperationalError(error, str(error)) from None  # with its SQLSTATE, as `orig`
