"""The database: what it refuses, what it remembers, and what is said when it is away."""

import dataclasses
import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import peewee
import pytest
from flask import Flask
from playhouse import pool

import models
from conftest import NewKey
from models import ApiKey, HourlyUsage, Outage, User
from ratelimit import Usage
from settings import Settings, SettingsError

YESTERDAY = 86_400


def insert_user(username: str = "bob", email: str = "bob@example.com") -> User:
    with models.database.connection_context():
        user: User = User.create(username=username, email=email, password_hash="none")
    return user


def stored(key_id: str) -> ApiKey:
    with models.database.connection_context():
        row: ApiKey = ApiKey.get_by_id(key_id)
    return row


def change(key_id: str, **changes: object) -> bool:
    with models.database.connection_context():
        return models.change_key(key_id, **changes)


# Starting


def test_missing_file_is_made_with_all_tables(app: Flask, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "test.db")) as connection:
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        assert {name for (name,) in rows} == {"user", "api_key", "hourly_usage"}


def test_second_start_keeps_what_is_there(config: Settings, ada: User) -> None:
    models.database.close_all()
    models.init(config)
    with models.database.connection_context():
        assert User.get().username == "ada"


def test_file_that_is_no_database_stops_the_start(config: Settings, tmp_path: Path) -> None:
    (tmp_path / "test.db").write_text("This is a letter to Ada. " * 100)
    with pytest.raises(SettingsError) as mistake:
        models.init(config)
    assert str(mistake.value).startswith(f"DATABASE_URL: {tmp_path}/test.db: ")
    models.database.close_all()


def test_other_directory_is_another_database(config: Settings, ada: User, tmp_path: Path) -> None:
    models.database.close_all()
    models.init(dataclasses.replace(config, database=tmp_path / "other.db"))
    with models.database.connection_context():
        assert not User.select().exists()


@pytest.mark.parametrize(
    ("pragma", "value"),
    [("journal_mode", "wal"), ("foreign_keys", 1), ("synchronous", 1), ("busy_timeout", 100)],
)
def test_connection_is_set_up(app: Flask, pragma: str, value: object) -> None:
    with models.database.connection_context():
        assert models.database.execute_sql(f"PRAGMA {pragma}").fetchone() == (value,)


def test_file_that_vanished_is_not_replaced_by_an_empty_one(app: Flask, tmp_path: Path) -> None:
    models.database.close_all()
    (tmp_path / "test.db").unlink()
    with pytest.raises(peewee.OperationalError), models.database.connection_context():
        pass
    assert not (tmp_path / "test.db").exists()


def test_connections_are_renewed(app: Flask, monkeypatch: pytest.MonkeyPatch) -> None:
    def connection() -> object:
        with models.database.connection_context():
            return models.database.connection()

    first = connection()
    assert connection() is first
    now = time.time()
    monkeypatch.setattr(pool, "time", SimpleNamespace(time=lambda: now + 3))
    assert connection() is not first


def test_query_outside_a_connection_fails_loudly(app: Flask) -> None:
    with pytest.raises(peewee.InterfaceError):
        User.select().exists()


def test_transaction_that_may_write_locks_from_its_start(app: Flask, tmp_path: Path) -> None:
    """Or two processes would both read first, and what one of them writes be lost."""
    with (
        closing(sqlite3.connect(tmp_path / "test.db", timeout=0)) as other,
        models.database.connection_context(),
        models.database.atomic(),
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        other.execute("BEGIN IMMEDIATE")


# Users


@pytest.mark.parametrize(
    "taken",
    [
        {"username": "ada"},
        {"username": "ADA"},
        {"email": "ada@example.com"},
        {"email": "Ada@Example.COM"},
    ],
)
def test_name_and_address_are_unique_whatever_the_capitals(
    ada: User, taken: dict[str, str]
) -> None:
    with pytest.raises(peewee.IntegrityError):
        insert_user(**taken)


def test_user_without_conflict_is_inserted(ada: User) -> None:
    assert insert_user().id != ada.id


def test_key_needs_a_user(app: Flask) -> None:
    key = ApiKey(id="a" * 8, user=1, name="ci", type="production", digest="none")
    with models.database.connection_context(), pytest.raises(peewee.IntegrityError):
        key.save(force_insert=True)


def test_saved_profile_brings_back_no_old_password(ada: User) -> None:
    with models.database.connection_context():
        profile = User.get()
        User.update(password_hash="new").execute()
        profile.username = "lovelace"
        profile.save()
        assert (User.get().username, User.get().password_hash) == ("lovelace", "new")


# Keys


def test_live_key_is_found(key: str, ada: User) -> None:
    found = models.find_key(key[8:16])
    assert found
    assert found[:5] == (key[8:16], ada.id, "ci", "production", "free")


@pytest.mark.parametrize("key_id", ["", "nobody's", "%", "a" * 1000])
def test_unknown_id_finds_nothing(key: str, key_id: str) -> None:
    assert models.find_key(key_id) is None


def test_other_capitals_are_another_id(key: str) -> None:
    assert models.find_key(key[8:16].swapcase()) is None


def test_revoked_key_is_not_found(key: str) -> None:
    assert change(key[8:16], revoked_at=1)
    assert models.find_key(key[8:16]) is None


def test_live_keys_are_the_users_own_and_not_revoked(ada: User, new_key: NewKey) -> None:
    live, revoked = new_key(), new_key()
    change(revoked[8:16], revoked_at=1)
    bob = insert_user()
    with models.database.connection_context():
        assert [row.id for row in models.live_keys(ada)] == [live[8:16]]
        assert not models.live_keys(bob).exists()


def test_change_is_stored_with_its_time(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "now", lambda: YESTERDAY)
    assert change(key[8:16], tier="pro")
    assert (stored(key[8:16]).tier, stored(key[8:16]).changed_at) == ("pro", YESTERDAY)


def test_new_key_is_no_change(key: str) -> None:
    assert stored(key[8:16]).changed_at is None


def test_change_of_one_key_leaves_the_others(new_key: NewKey) -> None:
    one, two = new_key(), new_key()
    change(one[8:16], tier="pro")
    assert stored(two[8:16]).tier == "free"


def test_unknown_key_cannot_be_changed(key: str) -> None:
    assert not change("nobody's", tier="pro")


@pytest.mark.parametrize(
    "changes", [{"revoked_at": None}, {"revoked_at": YESTERDAY}, {"tier": "pro"}]
)
def test_revoked_key_cannot_be_changed(key: str, changes: dict[str, object]) -> None:
    change(key[8:16], revoked_at=1)
    assert not change(key[8:16], **changes)
    assert (stored(key[8:16]).revoked_at, stored(key[8:16]).tier) == (1, "free")


# Usage


def test_unused_key_has_used_nothing(key: str) -> None:
    assert models.load_usage(key[8:16]) == Usage(0, 0, 0)


def test_usage_is_what_was_stored(key: str) -> None:
    with models.database.connection_context():
        ApiKey.update(total=40, reset=60, used=3).execute()
    assert models.load_usage(key[8:16]) == Usage(total=40, reset=60, used=3)


def test_an_hour_of_a_key_is_one_row(app: Flask) -> None:
    with models.database.connection_context():
        HourlyUsage.create(hour=0, key_id="a" * 8, requests=1)
        with pytest.raises(peewee.IntegrityError):
            HourlyUsage.create(hour=0, key_id="a" * 8, requests=1)


@pytest.mark.parametrize("look_up", [models.find_key, models.load_usage])
def test_look_up_leaves_no_connection_open(app: Flask, look_up: object) -> None:
    assert callable(look_up)
    look_up("a" * 8)
    assert models.database.is_closed()


# Outages


@pytest.mark.usefixtures("app")
def test_outage_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    outage.note(OSError("locked"))
    outage.note(OSError("locked"))
    assert caplog.record_tuples == [("models", logging.ERROR, "database unavailable: locked")]


@pytest.mark.usefixtures("app")
def test_end_of_an_outage_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    outage.note(OSError("locked"))
    caplog.clear()
    outage.note(None)
    outage.note(None)
    assert caplog.record_tuples == [("models", logging.WARNING, "database available again")]


def test_without_an_outage_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    Outage().note(None)
    assert not caplog.records


@pytest.mark.usefixtures("app")
def test_second_outage_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    outage.note(OSError("locked"))
    outage.note(None)
    outage.note(OSError("gone"))
    assert "database unavailable: gone" in caplog.text


def test_outage_leaves_no_connection_that_saw_it(app: Flask) -> None:
    models.load_usage("a" * 8)
    assert models.database._connections, "one is kept for the next request"
    Outage().note(OSError("gone"))
    assert not models.database._connections
