"""Counts reach the database, changes made elsewhere are noticed, and an outage loses nothing."""

import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import gevent
import pytest
from flask import Flask
from flask.testing import FlaskClient

import app as service
import models
from conftest import NewKey
from models import ApiKey, HourlyUsage, Outage
from protocol.websocket import REVOKED
from settings import Settings
from storage.background import Background

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
    """Nothing was said about any outage yet."""
    outage = Outage()
    monkeypatch.setattr(models, "outage", outage)
    return outage


@pytest.fixture
def background(app: Flask, now: SimpleNamespace, outage: Outage) -> Background:
    return Background(app)


@pytest.fixture
def ask(app: Flask, client: FlaskClient) -> Ask:
    """Asks for the usage of a key, always at noon; returns the status."""
    stand_still(app)
    return lambda key: client.get(STATS, headers={"X-API-Key": key}).status_code


@pytest.fixture
def another(app: Flask, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Another program's connection to the same database."""
    with closing(sqlite3.connect(tmp_path / "test.db", isolation_level=None)) as connection:
        yield connection


def stand_still(app: Flask) -> None:
    """From now on it is noon for the limiter, however long the test takes."""
    app.extensions["guard"].limiter._clock = lambda: NOON


@contextmanager
def locked(connection: sqlite3.Connection) -> Iterator[None]:
    """For a while, another program writes."""
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("ROLLBACK")


@contextmanager
def away(connection: sqlite3.Connection, table: str, column: str) -> Iterator[None]:
    """For a while, a column is not where it should be."""
    connection.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO away")
    yield
    connection.execute(f"ALTER TABLE {table} RENAME COLUMN away TO {column}")


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


def test_requests_wait_for_no_counter_to_be_written(
    background: Background, ask: Ask, key: str
) -> None:
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


def test_quiet_time_changes_nothing(
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
    background: Background, app: Flask, config: Settings, new_key: NewKey
) -> None:
    key_id, quota = new_key(tier="five")[8:16], config.quotas["five"]
    stand_still(app)
    for _ in range(5):
        app.extensions["guard"].limiter.hit(key_id, quota)
    background.sync()
    models.database.close_all()
    successor = service.create_app(config)
    stand_still(successor)
    assert not successor.extensions["guard"].limiter.hit(key_id, quota).accepted


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


def test_locked_database_is_logged_once_and_its_return_once(
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
    background.sync()
    background.sync()
    assert caplog.record_tuples == [
        ("models", logging.ERROR, "database unavailable: database is locked"),
        ("models", logging.WARNING, "database available again"),
    ]


def test_lock_is_noticed_though_there_is_nothing_to_save(
    background: Background, another: sqlite3.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with locked(another):
        background.sync()
    assert caplog.messages == ["database unavailable: database is locked"]


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


def test_file_put_in_the_place_of_another_is_noticed(
    background: Background, app: Flask, ask: Ask, key: str, tmp_path: Path
) -> None:
    assert ask(key) == 200
    models.database.close_all()  # as idle connections are, after two seconds
    copy = shutil.copy(tmp_path / "test.db", tmp_path / "copy.db")
    with closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("UPDATE api_key SET revoked_at = 1, changed_at = ?", (NOON,))
    Path(copy).rename(tmp_path / "test.db")
    background.sync()
    assert ask(key) == 401


@pytest.mark.parametrize(
    ("table", "column"),
    [
        pytest.param("hourly_usage", "requests", id="saving"),
        pytest.param("api_key", "changed_at", id="learning what changed"),
    ],
)
def test_what_fails_half_way_saves_nothing_and_nothing_twice(
    background: Background, ask: Ask, key: str, another: sqlite3.Connection, table: str, column: str
) -> None:
    ask(key)
    with away(another, table, column):
        background.sync()
        assert another.execute("SELECT total FROM api_key").fetchall() == [(0,)]
    background.sync()
    assert saved_total(key) == 1


def test_key_revoked_during_an_outage_is_refused_after_it(
    background: Background, ask: Ask, key: str, another: sqlite3.Connection, now: SimpleNamespace
) -> None:
    assert ask(key) == 200
    another.execute("BEGIN IMMEDIATE")
    background.sync()
    now.moment += HOUR
    another.execute(
        "UPDATE api_key SET revoked_at = ?, changed_at = ? WHERE id = ?",
        (NOON + 1, NOON + 1, key[8:16]),
    )
    another.execute("COMMIT")
    background.sync()
    assert ask(key) == 401


def test_key_revoked_while_counts_cannot_be_saved_is_refused(
    background: Background, ask: Ask, key: str, another: sqlite3.Connection
) -> None:
    with away(another, "hourly_usage", "requests"):
        assert ask(key) == 200
        change_elsewhere(key, revoked_at=NOON)
        background.sync()
        assert ask(key) == 401


# Changes


def change_elsewhere(key: str, **changes: object) -> None:
    """As a `flask key ...` does in another process: nobody here is told."""
    with models.database.connection_context():
        assert models.change_key(key[8:16], **changes)


def test_key_revoked_elsewhere_is_noticed(background: Background, ask: Ask, key: str) -> None:
    assert ask(key) == 200
    change_elsewhere(key, revoked_at=NOON)
    assert ask(key) == 200, "nobody has looked yet"
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


def test_change_by_a_slow_clock_is_noticed(
    background: Background, ask: Ask, key: str, now: SimpleNamespace
) -> None:
    background.sync()
    ask(key)
    now.moment -= 30
    change_elsewhere(key, revoked_at=NOON)
    now.moment += 30
    background.sync()
    assert ask(key) == 401


def test_change_is_noticed_however_long_the_database_was_away(
    background: Background, ask: Ask, key: str, another: sqlite3.Connection, now: SimpleNamespace
) -> None:
    with away(another, "api_key", "changed_at"):
        now.moment += HOUR
        background.sync()
    ask(key)
    now.moment -= HOUR - 5
    change_elsewhere(key, revoked_at=NOON)
    now.moment += HOUR
    background.sync()
    assert ask(key) == 401


def test_old_change_is_not_looked_at_again(
    background: Background, ask: Ask, key: str, another: sqlite3.Connection, now: SimpleNamespace
) -> None:
    change_elsewhere(key, tier="pro")
    for _ in range(2):
        now.moment += HOUR
        background.sync()
    assert ask(key) == 200
    another.execute("UPDATE api_key SET revoked_at = 1")  # by hand, so nobody is told
    background.sync()
    assert ask(key) == 200, "it is still remembered"


class Channel:
    """Stands for an open socket, and keeps the code with which it was ended."""

    code: int | None = None

    def end(self, code: int) -> None:
        self.code = code


@pytest.mark.parametrize(
    ("changes", "code"), [({"revoked_at": NOON}, REVOKED), ({"tier": "pro"}, None)]
)
def test_only_revocation_ends_the_sockets_of_a_key(
    background: Background, app: Flask, key: str, changes: dict[str, object], code: int | None
) -> None:
    channel = Channel()
    app.extensions["crowd"].callers[channel] = key[8:16]
    change_elsewhere(key, **changes)
    background.sync()
    assert channel.code == code


def test_revocation_ends_sockets_though_counts_cannot_be_saved(
    background: Background, app: Flask, ask: Ask, key: str, another: sqlite3.Connection
) -> None:
    channel = Channel()
    app.extensions["crowd"].callers[channel] = key[8:16]
    with away(another, "hourly_usage", "requests"):
        ask(key)
        change_elsewhere(key, revoked_at=NOON)
        background.sync()
        assert channel.code == REVOKED


def test_revocation_ends_no_socket_of_another_key(
    background: Background, app: Flask, key: str
) -> None:
    channel = Channel()
    app.extensions["crowd"].callers[channel] = "another"
    change_elsewhere(key, revoked_at=NOON)
    background.sync()
    assert channel.code is None


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
