"""PostgreSQL in this process: queries in batches, waits with an end, and what psycopg has to be.

test_storage.py has what both databases do, test_wire_database.py what a client sees.
"""

import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import gevent
import peewee
import psycopg
import pytest
from flask import Flask
from gevent import GreenletExit
from gevent.event import Event
from gevent.selectors import GeventSelector
from psycopg import waiting

import accounts
import auth
import models
from auth import Guard
from postgresql import Cluster, Network
from protocol.problems import Problem
from ratelimit import Quota
from serving import REPOSITORY, clean_environment, patience
from settings import Settings, SettingsError, load
from storage import connections
from storage.database import create_tables, open_database
from storage.postgres import PostgresStore

LONG = Quota("free", 5, 10**9)  # no window turns during a test
NewId = Callable[[], str]


@pytest.fixture
def place(cluster: Cluster) -> Iterator[Settings]:
    """A new database, with its tables."""
    settings = load({"DATABASE_URL": cluster.new_database()})
    create_tables(settings)
    open_database(settings)
    yield settings
    models.database.close_all()


@pytest.fixture
def network(cluster: Cluster) -> Iterator[Network]:
    with contextlib.closing(Network(cluster)) as network:
        yield network


@pytest.fixture
def new_id(place: Settings) -> NewId:
    user = accounts.create("ada", "ada@example.com", "a password")
    return lambda: str(auth.create_key(user, "ci", "production")[0].id)


@pytest.fixture
def cooperative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other greenlets run while psycopg waits, as under gunicorn, where gevent patches all."""
    monkeypatch.setattr(waiting, "DefaultSelector", GeventSelector)
    monkeypatch.setattr(waiting, "wait", waiting.wait_selector)


@pytest.fixture
def store(cooperative: None, place: Settings) -> Iterator[PostgresStore]:
    opened = PostgresStore(str(place.database_url))
    yield opened
    opened.close()


def query(place: Settings, sql: str) -> list[Any]:
    return Cluster.query(str(place.database_url), sql)


def test_requests_that_come_during_a_query_make_up_the_next_one(
    store: PostgresStore, new_id: NewId, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [new_id() for _ in range(3)]
    execute = psycopg.Connection.execute
    under_way: list[Any] = []
    queries, is_asking, may_go_on = 0, Event(), Event()

    def watched(connection: Any, *args: Any) -> Any:
        nonlocal queries
        assert connection not in under_way, "one at a time"
        under_way.append(connection)
        queries += 1
        is_asking.set()
        may_go_on.wait()
        done = execute(connection, *args)
        under_way.remove(connection)
        return done

    monkeypatch.setattr(psycopg.Connection, "execute", watched)
    first = gevent.spawn(store.hit, ids[0], LONG)
    is_asking.wait()
    others = [gevent.spawn(store.hit, key_id, LONG) for key_id in ids * 5]
    gevent.idle()
    may_go_on.set()
    asked = [greenlet.get(timeout=5) for greenlet in (first, *others)]

    assert queries == 2, "the first one, and those that came meanwhile"
    assert [allowance.accepted for allowance in asked] == [True] * 13 + [False, True, True]
    remaining = [allowance.remaining for allowance in asked]
    assert remaining == [4, *(3, 4, 4), *(2, 3, 3), *(1, 2, 2), *(0, 1, 1), *(0, 0, 0)]
    totals = [allowance.total for allowance in asked]
    assert totals == [1, *(2, 1, 1), *(3, 2, 2), *(4, 3, 3), *(5, 4, 4), *(5, 5, 5)]


def test_hits_of_a_key_in_one_query_have_one_quota(store: PostgresStore, new_id: NewId) -> None:
    """As when its tier was just changed; never the limit of one and the window of the other."""
    key_id, other = new_id(), Quota("fast", 1000, 1)
    hits = [gevent.spawn(store.hit, key_id, quota) for quota in (LONG, other)]
    asked = [hit.get(timeout=5) for hit in hits]
    assert [(allowance.quota, allowance.remaining) for allowance in asked] == [
        (other, 999),
        (other, 998),
    ]


def test_batch_goes_on_after_any_error(
    store: PostgresStore, new_id: NewId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even after one that ends the greenlet that asks."""
    key_id = new_id()
    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Connection, "execute", mock.Mock(side_effect=GreenletExit))
        with pytest.raises(peewee.OperationalError, match="no answer"):
            store.hit(key_id, LONG)
    assert store.hit(key_id, LONG)


def test_request_that_is_killed_takes_no_other_along(store: PostgresStore, new_id: NewId) -> None:
    """The greenlet of a client that has left may be the one that asked first."""
    key_id = new_id()
    first, second = [gevent.spawn(store.hit, key_id, LONG) for _ in range(2)]
    gevent.sleep(0)
    first.kill()
    assert second.get(timeout=5).accepted


def test_deleted_key_is_a_bad_key(store: PostgresStore, new_id: NewId, place: Settings) -> None:
    deleted, kept = new_id(), new_id()
    guard, key = Guard({"free": LONG}, store), store.find(deleted)
    assert key
    query(place, f"DELETE FROM api_key WHERE id = '{deleted}'")
    hits = [gevent.spawn(store.hit, one, LONG) for one in (deleted, kept)]
    assert [bool(hit.get(timeout=5)) for hit in hits] == [False, True]
    with Flask(__name__).test_request_context(), pytest.raises(Problem) as refusal:
        guard.spend(key)
    assert refusal.value.get_response().get_json()["code"] == "invalid_api_key"


def test_silent_host_is_left_for_the_next_one(
    cooperative: None, cluster: Cluster, network: Network, new_id: NewId, place: Settings
) -> None:
    """By requests, and by a start or a command."""
    key_id, url = new_id(), network.url(str(place.database_url))
    url = url.replace("/test_", f",127.0.0.1:{cluster.port}/test_")
    network.die()
    store = PostgresStore(url)
    with pytest.raises(peewee.OperationalError):
        store.hit(key_id, LONG)
    assert store.hit(key_id, LONG)
    store.close()
    create_tables(load({"DATABASE_URL": url}))


def test_no_free_connection_is_an_outage(place: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 1)
    open_database(place)

    def connect() -> None:
        with models.database.connection_context():
            pass

    with ThreadPoolExecutor(1) as thread, models.database.connection_context():
        started = time.monotonic()
        with pytest.raises(peewee.OperationalError, match="no connection within"):
            thread.submit(connect).result(timeout=5)
        assert time.monotonic() - started < patience(1)


def test_many_may_start_at_once_on_an_empty_database(cluster: Cluster) -> None:
    environ = clean_environment(DATABASE_URL=cluster.new_database())
    script = "import settings, storage.database as d; print(end='.', flush=True); input()"
    command = [sys.executable, "-c", f"{script}; d.create_tables(settings.load())"]
    pipe = subprocess.PIPE
    many = [
        subprocess.Popen(command, cwd=REPOSITORY, env=environ, stdin=pipe, stdout=pipe, stderr=pipe)
        for _ in range(4)
    ]
    for process in many:
        assert process.stdout
        assert process.stdout.read(1) == b".", "all have loaded their modules"
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(lambda process: process.communicate(b"\n", 20), many))
    assert outputs == [(b"", b"")] * 4


def test_role_that_may_create_nothing_can_start(cluster: Cluster, place: Settings) -> None:
    url, role = str(place.database_url), f"guest_{secrets.token_hex(4)}"
    query(place, f"CREATE ROLE {role} LOGIN PASSWORD '{cluster.password}'")
    grants = "SELECT, INSERT, UPDATE, DELETE"
    query(place, f"GRANT {grants} ON ALL TABLES IN SCHEMA public TO {role}")
    create_tables(load({"DATABASE_URL": url.replace("demo:", f"{role}:")}))


@pytest.mark.parametrize(
    ("right", "wrong", "reason"),
    [
        ("demo:", "nobody:", "password authentication failed"),
        ("127.0.0.1", "nowhere.invalid", "nowhere.invalid"),
        ("127.0.0.1", "127.0.0.2", "refused"),
        ("/test_", "/absent_", "does not exist"),
        ("/test_", "?sslmode=require&dbname=test_", "SSL"),
    ],
)
def test_useless_server_is_one_line(cluster: Cluster, right: str, wrong: str, reason: str) -> None:
    url = cluster.new_database().replace(right, wrong, 1)
    with pytest.raises(SettingsError) as refusal:
        create_tables(load({"DATABASE_URL": url}))
    line = str(refusal.value)
    assert line.startswith("DATABASE_URL: PostgreSQL: ")
    assert reason in line
    assert "\n" not in line
    assert cluster.password not in line
