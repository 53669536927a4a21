"""Counts are saved, changes made elsewhere are noticed, and an outage loses nothing."""

import logging
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import peewee
import pytest
from flask import Flask
from flask.testing import FlaskClient

import app as service
import models
from conftest import NewKey
from models import QUIET_SYNCS, ApiKey, HourlyUsage, Outage
from protocol.websocket import Close
from settings import Settings
from storage.background import Background
from storage.sqlite import SqliteStore

NOON = 1_795_262_400  # 2026-11-21T12:00:00Z
HOUR = 3600
STATS = "/api/v1/usage/stats"

Ask = Callable[[str], int]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, for the background and for whoever changes a key: `now.moment`."""
    now = SimpleNamespace(moment=NOON)
    clock = SimpleNamespace(time=lambda: now.moment)
    monkeypatch.setattr(models, "time", clock)
    return now


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    """No outage was logged yet."""
    outage = Outage()
    monkeypatch.setattr(models, "outage", outage)
    return outage


@pytest.fixture
def background(app: Flask, now: SimpleNamespace, outage: Outage) -> Background:
    return Background(app)


@pytest.fixture
def ask(app: Flask, client: FlaskClient) -> Ask:
    """Asks for the usage of a key, always at noon; returns the status."""
    stop_clock(app)
    return lambda key: client.get(STATS, headers={"X-API-Key": key}).status_code


@pytest.fixture
def another(app: Flask, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Another program's connection to the same database."""
    with closing(sqlite3.connect(tmp_path / "test.db", isolation_level=None)) as connection:
        yield connection


def stop_clock(app: Flask) -> None:
    """From now on it is noon for the limiter, however long the test takes."""
    app.extensions["guard"].limiter._clock = lambda: NOON


@contextmanager
def locked(connection: sqlite3.Connection) -> Iterator[None]:
    """For a while, another program writes."""
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("ROLLBACK")


@contextmanager
def renamed(connection: sqlite3.Connection, table: str, column: str) -> Iterator[None]:
    """For a while, a column has another name, so that queries with it fail."""
    connection.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO away")
    yield
    connection.execute(f"ALTER TABLE {table} RENAME COLUMN away TO {column}")


def copy_with_revoked_keys(directory: Path) -> Path:
    """A copy of the database in which all keys are revoked."""
    copy = directory / "copy.db"
    with (
        closing(sqlite3.connect(directory / "test.db")) as source,
        closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
        target.execute("UPDATE api_key SET revoked_at = 1, expires_at = 1")
        target.commit()
    return copy


def saved(key: str) -> ApiKey:
    with models.database.connection_context():
        row: ApiKey = ApiKey.get_by_id(key[8:16])
    return row


def saved_total(key: str) -> int:
    total: int = saved(key).total
    return total


def hourly() -> list[tuple[int, str, int]]:
    with models.database.connection_context():
        rows = HourlyUsage.select(HourlyUsage.hour, HourlyUsage.key_id, HourlyUsage.requests)
        return list(rows.order_by(HourlyUsage.hour).tuples())


# Counts


def test_requests_do_not_wait_for_the_database(background: Background, ask: Ask, key: str) -> None:
    ask(key)
    assert saved_total(key) == 0


def test_counts_reach_the_database(background: Background, ask: Ask, key: str) -> None:
    ask(key)
    ask(key)
    background.sync()
    row = saved(key)
    assert (row.total, row.used, row.reset, row.last_used_at) == (2, 2, NOON + HOUR, NOON)


def test_counts_add_up_in_the_database(background: Background, ask: Ask, key: str) -> None:
    for _ in range(3):
        ask(key)
        background.sync()
    assert saved_total(key) == 3


def test_without_requests_a_sync_changes_nothing(
    background: Background, ask: Ask, key: str, now: SimpleNamespace
) -> None:
    ask(key)
    background.sync()
    now.moment += 60
    background.sync()
    row = saved(key)
    assert (row.total, row.last_used_at) == (1, NOON)


def test_counts_of_each_key_are_its_own(background: Background, ask: Ask, new_key: NewKey) -> None:
    one, two = new_key(), new_key()
    for key in (one, two, two):
        ask(key)
    background.sync()
    assert (saved_total(one), saved_total(two)) == (1, 2)


def test_counts_of_a_deleted_key_stop_no_others(
    background: Background, ask: Ask, new_key: NewKey, another: sqlite3.Connection
) -> None:
    one, two = new_key(), new_key()
    ask(one)
    ask(two)
    another.execute("DELETE FROM api_key WHERE id = ?", (one[8:16],))
    background.sync()
    assert saved_total(two) == 1


def test_counts_survive_into_a_new_app(
    background: Background, config: Settings, ask: Ask, key: str
) -> None:
    ask(key)
    ask(key)
    background.sync()
    models.database.close_all()
    successor = service.create_app(config).test_client()
    stats = successor.get(STATS, headers={"X-API-Key": key}).get_json()
    assert stats["total_requests"] == 3


def test_what_was_used_of_a_window_survives_into_a_new_app(
    background: Background, config: Settings, ask: Ask, new_key: NewKey
) -> None:
    key = new_key(tier="five")
    assert [ask(key) for _ in range(6)] == [200] * 5 + [429]
    background.sync()
    models.database.close_all()
    successor = service.create_app(config)
    stop_clock(successor)
    assert successor.test_client().get(STATS, headers={"X-API-Key": key}).status_code == 429


def test_stop_saves_once_more(background: Background, ask: Ask, key: str) -> None:
    ask(key)
    background.stopping.set()
    background.run()
    assert saved_total(key) == 1


def test_run_goes_on_until_it_is_stopped(background: Background, ask: Ask, key: str) -> None:
    running = gevent.spawn(background.run)
    gevent.sleep(0)
    assert not running.ready()
    ask(key)
    background.stopping.set()
    running.get(timeout=5)
    assert saved_total(key) == 1


# Outages


def test_locked_database_loses_no_count(
    background: Background, ask: Ask, key: str, another: sqlite3.Connection
) -> None:
    ask(key)
    with locked(another):
        background.sync()
        assert ask(key) == 200
        background.sync()
    background.sync()
    assert saved_total(key) == 2


def test_locked_database_saves_nothing_twice(
    background: Background, ask: Ask, key: str, another: sqlite3.Connection
) -> None:
    ask(key)
    with locked(another):
        background.sync()
    background.sync()
    background.sync()
    assert (saved_total(key), sum(row[2] for row in hourly())) == (1, 1)


def test_locked_database_is_logged_once_and_so_is_its_end(
    background: Background,
    ask: Ask,
    key: str,
    another: sqlite3.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ask(key)
    with locked(another):
        background.sync()
        background.sync()
    for _ in range(QUIET_SYNCS + 1):
        background.sync()
    assert caplog.record_tuples == [
        ("models", logging.ERROR, "database unavailable: database is locked"),
        ("models", logging.WARNING, "database available again"),
    ]


def test_table_that_cannot_be_read_is_noticed_without_sockets(
    background: Background, another: sqlite3.Connection
) -> None:
    with renamed(another, "api_key", "expires_at"):
        assert not background.sync()
    assert background.sync()


def test_broken_database_is_noticed_without_requests(
    background: Background, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models.database.close_all()
    (tmp_path / "test.db").write_bytes(b"no database" * 1000)
    background.sync()
    assert caplog.messages == ["database unavailable: file is not a database"]


def test_last_save_is_tried_until_it_is_done(
    background: Background, ask: Ask, key: str, another: sqlite3.Connection
) -> None:
    ask(key)
    with locked(another):
        background.stopping.set()
        saving = gevent.spawn(background.run)
        gevent.sleep(0.5)
        assert not saving.ready()
    saving.get(timeout=5)
    assert saved_total(key) == 1


@pytest.mark.parametrize("put_back", [shutil.move, shutil.copyfile])
def test_file_put_in_the_place_of_another_is_noticed(
    background: Background,
    ask: Ask,
    key: str,
    tmp_path: Path,
    put_back: Callable[[Path, Path], object],
) -> None:
    copy = copy_with_revoked_keys(tmp_path)
    assert ask(key) == 200
    background.sync()
    put_back(copy, tmp_path / "test.db")
    background.sync()
    assert ask(key) == 401


@pytest.mark.parametrize(
    ("table", "column"),
    [
        pytest.param("hourly_usage", "requests", id="saving"),
        pytest.param("api_key", "expires_at", id="asking which keys have ended"),
    ],
)
def test_sync_that_fails_half_way_saves_nothing_and_the_next_all_once(
    background: Background,
    app: Flask,
    ask: Ask,
    key: str,
    another: sqlite3.Connection,
    table: str,
    column: str,
) -> None:
    ask(key)
    open_socket(app, key)
    with renamed(another, table, column):
        assert not background.sync()
        assert another.execute("SELECT total FROM api_key").fetchall() == [(0,)]
    background.sync()
    assert saved_total(key) == 1


def test_requests_made_during_a_save_are_saved_by_the_next(
    background: Background, ask: Ask, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(key)
    store = background._store
    assert isinstance(store, SqliteStore)
    exchange = store._try_exchange

    def and_ask(*args: Any) -> Any:
        outcome = exchange(*args)
        asked.wait(timeout=5)  # in the thread that saves, so others go on
        return outcome

    asked = threading.Event()
    monkeypatch.setattr(store, "_try_exchange", and_ask)
    saving = gevent.spawn(background.sync)
    gevent.sleep(0.01)
    ask(key)
    asked.set()
    assert saving.get(timeout=5)
    assert saved_total(key) == 1
    monkeypatch.undo()
    background.sync()
    assert (saved_total(key), saved(key).used) == (2, 2)


def test_thread_that_cannot_start_loses_no_count_and_counts_none_twice(
    background: Background, ask: Ask, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    ask(key)
    with monkeypatch.context() as patch:
        patch.setattr("gevent.threadpool.start_new_thread", fail)
        assert not background.sync()
    assert background.sync()
    background.sync()
    assert saved_total(key) == 1


def test_after_the_last_save_everything_is_in_one_file(
    background: Background, ask: Ask, key: str, tmp_path: Path
) -> None:
    ask(key)
    background.stopping.set()
    background.run()
    assert [file.name for file in tmp_path.iterdir()] == ["test.db"]


# Changes


def test_key_is_remembered_while_nobody_else_writes(
    app: Flask, background: Background, ask: Ask, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    background.sync()
    ask(key)
    monkeypatch.setattr(app.extensions["guard"], "_find_key", lambda key_id: None)
    for _ in range(3):
        background.sync()
        assert ask(key) == 200


def test_after_each_sync_the_one_file_is_complete(
    background: Background, ask: Ask, key: str, tmp_path: Path
) -> None:
    ask(key)
    background.sync()
    copy = shutil.copy(tmp_path / "test.db", tmp_path / "copy.db")
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("SELECT id, total FROM api_key").fetchall() == [(key[8:16], 1)]


def test_usage_changed_by_hand_counts(
    background: Background, ask: Ask, new_key: NewKey, another: sqlite3.Connection
) -> None:
    key = new_key(tier="five")
    assert [ask(key) for _ in range(6)] == [200] * 5 + [429]
    background.sync()
    another.execute("UPDATE api_key SET used = 3")
    background.sync()
    assert [ask(key) for _ in range(3)] == [200, 200, 429]


def test_usage_changed_by_hand_counts_while_the_key_is_used_without_a_pause(
    background: Background,
    client: FlaskClient,
    ask: Ask,
    key: str,
    another: sqlite3.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each sync finds a request that came while the one before was saving."""
    store = background._store
    exchange = store.exchange

    def and_ask(*args: Any) -> Any:
        ask(key)
        return exchange(*args)

    monkeypatch.setattr(store, "exchange", and_ask)
    ask(key)
    background.sync()
    another.execute("UPDATE api_key SET total = 500, used = 600")
    background.sync()
    background.sync()
    stats = client.get(STATS, headers={"X-API-Key": key}).get_json()
    assert (stats["total_requests"], stats["requests_remaining"]) == (504, 1000 - 604)


def test_checkpoint_that_fails_counts_nothing_twice(
    background: Background, ask: Ask, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = background._store
    assert isinstance(store, SqliteStore)
    execute = store._database.execute_sql

    def fail(sql: str, *args: Any) -> Any:
        if "checkpoint" in sql:
            raise peewee.OperationalError("database or disk is full")
        return execute(sql, *args)

    ask(key)
    with monkeypatch.context() as patch:
        patch.setattr(store._database, "execute_sql", fail)
        assert background.sync()
    background.sync()
    assert saved_total(key) == 1


def test_file_that_was_replaced_during_a_sync_is_noticed_by_the_next(
    background: Background, ask: Ask, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_with_revoked_keys(tmp_path)
    ask(key)
    background.sync()
    assert ask(key) == 200
    ended_keys = models.ended_keys

    def and_replace(*args: Any) -> set[str]:
        monkeypatch.undo()
        copy.rename(tmp_path / "test.db")
        return ended_keys(*args)

    monkeypatch.setattr(models, "ended_keys", and_replace)
    background.sync()
    background.sync()
    assert ask(key) == 401


def test_too_many_keys_are_not_remembered(
    app: Flask, background: Background, ask: Ask, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auth.MAX_KNOWN", 0)
    background.sync()
    ask(key)
    background.sync()
    guard = app.extensions["guard"]
    assert (len(guard._known), len(guard.limiter._usage)) == (0, 0)


class OpenSocket:
    """Stands in for a WebSocket, and keeps the code with which it was ended."""

    code: int | None = None

    def end(self, code: int) -> None:
        self.code = code


def open_socket(app: Flask, key: str) -> OpenSocket:
    """A time socket of this key."""
    ws = OpenSocket()
    app.extensions["sockets"].key_ids[ws] = key[8:16]
    return ws


def change_elsewhere(key: str, **changes: object) -> None:
    """As `flask key ...` does in another process."""
    with models.database.connection_context():
        assert models.change_key(key[8:16], **changes)


def test_key_revoked_elsewhere_is_noticed(background: Background, ask: Ask, key: str) -> None:
    assert ask(key) == 200
    change_elsewhere(key, expires_at=NOON)
    background.sync()
    assert ask(key) == 401


def test_tier_changed_elsewhere_is_noticed(
    background: Background, client: FlaskClient, ask: Ask, key: str
) -> None:
    ask(key)
    change_elsewhere(key, tier="pro")
    background.sync()
    stats = client.get(STATS, headers={"X-API-Key": key}).get_json()
    assert stats["rate_limit_tier"] == "pro"


@pytest.mark.parametrize(
    "change",
    ["DELETE FROM api_key", "DELETE FROM user", "UPDATE api_key SET digest = ''"],
)
def test_row_changed_by_hand_is_noticed(
    background: Background, ask: Ask, key: str, another: sqlite3.Connection, change: str
) -> None:
    assert ask(key) == 200
    another.execute(change)
    background.sync()
    assert ask(key) == 401


def test_key_revoked_during_an_outage_is_refused_after_it(
    background: Background, ask: Ask, key: str, another: sqlite3.Connection
) -> None:
    assert ask(key) == 200
    another.execute("BEGIN IMMEDIATE")
    background.sync()
    another.execute("UPDATE api_key SET expires_at = ? WHERE id = ?", (NOON, key[8:16]))
    another.execute("COMMIT")
    background.sync()
    assert ask(key) == 401


@pytest.mark.parametrize(
    "change",
    [
        f"UPDATE api_key SET expires_at = {NOON}",
        "DELETE FROM api_key",
        "DELETE FROM user",
    ],
)
def test_sockets_of_an_ended_key_are_closed(
    background: Background, app: Flask, key: str, another: sqlite3.Connection, change: str
) -> None:
    ws = open_socket(app, key)
    another.execute(change)
    background.sync()
    assert ws.code == Close.REVOKED


@pytest.mark.parametrize("changes", [{"tier": "pro"}, {"expires_at": NOON + 1}])
def test_sockets_of_a_live_key_stay_open(
    background: Background, app: Flask, key: str, changes: dict[str, object]
) -> None:
    ws = open_socket(app, key)
    change_elsewhere(key, **changes)
    background.sync()
    assert ws.code is None


def test_sockets_of_another_key_stay_open(
    background: Background, app: Flask, new_key: NewKey
) -> None:
    ended, live = new_key(), new_key()
    ws = open_socket(app, live)
    change_elsewhere(ended, expires_at=NOON)
    background.sync()
    assert ws.code is None


def test_sockets_of_more_keys_than_one_query_takes_are_asked_about(
    background: Background, app: Flask, key: str
) -> None:
    """SQLite takes 32,766 values in a query at most; some builds only 999."""
    strangers = [open_socket(app, f"sk_live_{number:08}") for number in range(2500)]
    ws = open_socket(app, key)
    background.sync()
    assert {stranger.code for stranger in strangers} == {Close.REVOKED}
    assert ws.code is None


def test_sockets_stay_open_while_the_database_is_away(
    background: Background, app: Flask, key: str, another: sqlite3.Connection
) -> None:
    ws = open_socket(app, key)
    with renamed(another, "api_key", "expires_at"):
        background.sync()
    assert ws.code is None


# Hours


def test_requests_of_an_hour_are_one_row(
    background: Background, ask: Ask, key: str, now: SimpleNamespace
) -> None:
    ask(key)
    background.sync()
    now.moment += HOUR - 1
    ask(key)
    background.sync()
    assert hourly() == [(NOON, key[8:16], 2)]


def test_next_hour_has_a_row_of_its_own(
    background: Background, ask: Ask, key: str, now: SimpleNamespace
) -> None:
    ask(key)
    background.sync()
    now.moment += HOUR
    ask(key)
    background.sync()
    assert hourly() == [(NOON, key[8:16], 1), (NOON + HOUR, key[8:16], 1)]


@pytest.mark.parametrize(("hours", "kept"), [(24, True), (25, False)])
def test_hours_are_dropped_after_a_day(
    background: Background, ask: Ask, key: str, now: SimpleNamespace, hours: int, kept: bool
) -> None:
    ask(key)
    background.sync()
    now.moment += hours * HOUR
    ask(key)
    background.sync()
    assert (NOON in [hour for hour, _, _ in hourly()]) == kept
