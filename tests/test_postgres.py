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

import gevent
import peewee
import psycopg
import pytest
from flask import Flask
from gevent.selectors import GeventSelector
from psycopg import waiting

import accounts
import auth
import models
from auth import Guard
from models import ApiKey, User
from postgresql import Cluster, Network
from protocol.problems import Problem
from ratelimit import Quota
from serving import REPOSITORY, clean_environment
from settings import Settings, SettingsError, load
from storage import postgres
from storage.database import create_tables, open_database
from storage.postgres import PostgresStore

LONG = Quota("free", 5, 10**9)  # no window turns during a test


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


NewRow = Callable[[], ApiKey]


@pytest.fixture
def new_key(place: Settings) -> NewRow:
    user = accounts.create("ada", "ada@example.com", "a password")
    return lambda: auth.create_key(user, "ci", "production")[0]


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


# Batches


def test_requests_that_come_during_a_query_make_up_the_next_one(
    store: PostgresStore, new_key: NewRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [new_key() for _ in range(3)]
    execute = psycopg.Connection.execute
    under_way = queries = 0

    def watched(connection: Any, *args: Any) -> Any:
        nonlocal under_way, queries
        assert under_way == 0, "one at a time"
        under_way, queries = under_way + 1, queries + 1
        gevent.sleep(0.05)
        done = execute(connection, *args)
        under_way -= 1
        return done

    monkeypatch.setattr(psycopg.Connection, "execute", watched)
    first = gevent.spawn(store.hit, keys[0], LONG)
    gevent.sleep(0.02)
    others = [gevent.spawn(store.hit, key, LONG) for key in keys * 5]
    finding = gevent.spawn(store.find, keys[0].id)
    asked = [greenlet.get(timeout=5) for greenlet in (first, *others)]

    assert finding.get(timeout=5) == keys[0]
    assert queries == 3, "the first one, the hits that came meanwhile, and the finds"
    assert [allowance.accepted for allowance in asked] == [True] * 13 + [False, True, True]
    remaining = [allowance.remaining for allowance in asked]
    assert remaining == [4, *(3, 4, 4), *(2, 3, 3), *(1, 2, 2), *(0, 1, 1), *(0, 0, 0)]
    totals = [allowance.total for allowance in asked]
    assert totals == [1, *(2, 1, 1), *(3, 2, 2), *(4, 3, 3), *(5, 4, 4), *(5, 5, 5)]


def test_request_that_is_killed_takes_no_other_along(store: PostgresStore, new_key: NewRow) -> None:
    """The greenlet of a client that has left may be the one that asked first."""
    key = new_key()
    first, second = [gevent.spawn(store.hit, key, LONG) for _ in range(2)]
    gevent.sleep(0)
    first.kill()
    assert second.get(timeout=5).accepted


def test_deleted_key_is_a_bad_key(store: PostgresStore, new_key: NewRow, place: Settings) -> None:
    key, kept = new_key(), new_key()
    guard = Guard({"free": LONG}, store)
    query(place, f"DELETE FROM api_key WHERE id = '{key.id}'")
    hits = [gevent.spawn(store.hit, one, LONG) for one in (key, kept)]
    assert [bool(hit.get(timeout=5)) for hit in hits] == [False, True]
    with Flask(__name__).test_request_context(), pytest.raises(Problem) as refusal:
        guard.spend(key)
    assert refusal.value.get_response().get_json()["code"] == "invalid_api_key"


# Waits


def test_answer_that_does_not_come_fails_all_who_wait_within_a_second(
    cooperative: None, network: Network, new_key: NewRow, place: Settings
) -> None:
    key, store = new_key(), PostgresStore(network.url(str(place.database_url)))
    assert store.hit(key, LONG)
    network.die()
    started = time.monotonic()
    first = gevent.spawn(store.hit, key, LONG)
    gevent.sleep(0.3)
    second = gevent.spawn(store.hit, key, LONG)
    for waiting_one in (first, second):
        with pytest.raises(peewee.OperationalError, match="no answer within"):
            waiting_one.get(timeout=5)
    assert 0.5 < time.monotonic() - started < 1

    network.heal()
    assert store.hit(key, LONG)
    store.close()


@pytest.mark.parametrize("word", ["BEGIN", "INSERT", "COMMIT", "ROLLBACK"])
def test_every_word_of_a_transaction_is_answered_in_time_or_fails(
    network: Network, place: Settings, word: str
) -> None:
    """peewee sends the first and the last past `execute_sql`, psycopg all through `wait`."""
    open_database(load({"DATABASE_URL": network.url(str(place.database_url))}))
    ada = {"username": "ada", "email": "ada@example.com", "password_hash": ""}

    def change() -> None:
        with models.database.connection_context(), models.database.atomic() as transaction:
            User.create(**ada)
            if word == "ROLLBACK":
                transaction.rollback()

    with ThreadPoolExecutor(1) as thread:
        network.die(word.encode())
        started = time.monotonic()
        try:
            with pytest.raises(peewee.PeeweeException):
                thread.submit(change).result(timeout=5)
            assert time.monotonic() - started < 1.5
        finally:
            network.close()  # or the thread would wait for ever
    models.database.close_all()


def test_connection_that_is_not_free_in_time_is_an_outage(
    place: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "CONNECTIONS", 1)
    open_database(place)

    def connect() -> None:
        with models.database.connection_context():
            pass

    with ThreadPoolExecutor(1) as thread, models.database.connection_context():
        started = time.monotonic()
        with pytest.raises(peewee.OperationalError, match="no connection within"):
            thread.submit(connect).result(timeout=5)
        assert time.monotonic() - started < 1


def test_connection_that_the_server_closed_is_replaced(place: Settings, new_key: NewRow) -> None:
    """As at a restart of the server while nobody asks."""
    new_key()
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    assert query(place, f"SELECT pg_terminate_backend(pid) {others}") == [(True,)]
    with models.database.connection_context():
        assert ApiKey.select().count() == 1


# Starting


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
def test_server_that_cannot_be_used_is_one_line_without_the_password(
    cluster: Cluster, right: str, wrong: str, reason: str
) -> None:
    url = cluster.new_database().replace(right, wrong, 1)
    with pytest.raises(SettingsError) as refusal:
        create_tables(load({"DATABASE_URL": url}))
    line = str(refusal.value)
    assert line.startswith("DATABASE_URL: PostgreSQL: ")
    assert reason in line
    assert "\n" not in line
    assert cluster.password not in line
