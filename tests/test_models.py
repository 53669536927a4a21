"""The database: how it is opened and upgraded, what it refuses, and how outages are logged."""

import dataclasses
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import peewee
import pytest
from flask import Flask

import app as service
import auth
import models
from conftest import NewKey
from models import QUIET_SYNCS, ApiKey, HourlyUsage, Outage, User
from ratelimit import Quota
from settings import Settings, SettingsError

OLDER = (Path(__file__).parent / "data" / "older.sql").read_text()


NOON = 1_795_262_400  # 2026-11-21T12:00:00Z


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time for `models`: `now.seconds`."""
    now = SimpleNamespace(seconds=NOON)
    monkeypatch.setattr(models, "time", SimpleNamespace(time=lambda: now.seconds))
    return now


def insert_user(username: str = "bob", email: str = "bob@example.com") -> User:
    with models.database.connection_context():
        user: User = User.create(username=username, email=email, password_hash="none")
    return user


def insert_many_users() -> None:
    with models.database.atomic():
        for number in range(1000):
            User.create(username=number, email=number, password_hash="x" * 1000)


def stored(key_id: str) -> ApiKey:
    with models.database.connection_context():
        row: ApiKey = ApiKey.get_by_id(key_id)
    return row


def change(key_id: str, **changes: object) -> bool:
    with models.database.connection_context():
        return models.change_key(key_id, **changes)


# Starting


def test_missing_file_is_created_with_all_tables(app: Flask, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "test.db")) as connection:
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        assert {name for (name,) in rows} == {"user", "api_key", "hourly_usage"}


def test_second_start_keeps_the_rows(config: Settings, ada: User) -> None:
    models.database.close_all()
    models.init(config)
    with models.database.connection_context():
        assert User.get().username == "ada"


def test_file_that_is_no_database_stops_the_start_and_stays_as_it_was(config: Settings) -> None:
    config.sqlite.write_text("This is no database. " * 100)
    config.sqlite.chmod(0o644)
    assert refusal(config) == f"DATABASE_URL: {config.sqlite}: file is not a database"
    assert config.sqlite.read_text() == "This is no database. " * 100
    assert config.sqlite.stat().st_mode & 0o777 == 0o644


def test_another_file_is_another_database(config: Settings, ada: User, tmp_path: Path) -> None:
    models.database.close_all()
    models.init(dataclasses.replace(config, sqlite=tmp_path / "other.db"))
    with models.database.connection_context():
        assert not User.select().exists()


@pytest.mark.parametrize(
    ("pragma", "value"),
    [("journal_mode", "wal"), ("foreign_keys", 1), ("synchronous", 1), ("busy_timeout", 100)],
)
def test_connection_is_set_up(app: Flask, pragma: str, value: object) -> None:
    with models.database.connection_context():
        assert models.database.execute_sql(f"PRAGMA {pragma}").fetchone() == (value,)


def test_deleted_file_is_not_created_again(app: Flask, tmp_path: Path) -> None:
    models.database.close_all()
    (tmp_path / "test.db").unlink()
    with pytest.raises(peewee.OperationalError), models.database.connection_context():
        pass
    assert not (tmp_path / "test.db").exists()


def test_query_without_a_connection_fails(app: Flask) -> None:
    with pytest.raises(peewee.InterfaceError):
        User.select().exists()


def test_transaction_that_may_write_locks_from_its_start(app: Flask, tmp_path: Path) -> None:
    """Otherwise two processes could both read first, and one would undo what the other wrote."""
    with (
        closing(sqlite3.connect(tmp_path / "test.db", timeout=0)) as other,
        models.database.connection_context(),
        models.database.atomic(),
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        other.execute("BEGIN IMMEDIATE")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_new_database_is_for_its_owner_only(config: Settings, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        models.init(config)
        insert_user()  # so that there is a log of writes, and its index
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    models.database.close_all()
    assert modes == dict.fromkeys(("test.db", "test.db-wal", "test.db-shm"), 0o600)


def test_database_that_others_could_read_is_closed_to_them(
    config: Settings, tmp_path: Path
) -> None:
    (tmp_path / "test.db").touch(0o644)
    models.init(config)
    assert (tmp_path / "test.db").stat().st_mode & 0o777 == 0o600


def test_new_database_is_closed_to_others_from_the_first_moment(
    config: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the help of chmod, which also fails on a file of another owner."""

    def chmod(file: Path, mode: int) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "chmod", chmod)
    models.init(config)
    assert (tmp_path / "test.db").stat().st_mode & 0o777 == 0o600


def test_database_locked_for_long_stops_the_start(
    config: Settings, app: Flask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "COMMAND_SECONDS", 0.1)
    with closing(sqlite3.connect(tmp_path / "test.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert refusal(config) == f"DATABASE_URL: {tmp_path}/test.db: database is locked"


@pytest.mark.skipif(not shutil.which("unshare") or os.getuid() != 0, reason="needs mounts of root")
@pytest.mark.parametrize("read_only", ["test.db", ""], ids=["the file", "the directory"])
def test_read_only_database_stops_the_start(
    config: Settings, app: Flask, tmp_path: Path, read_only: str
) -> None:
    models.database.close_all()
    start = "import settings, models; models.init(settings.load())"
    mounted = tmp_path / read_only
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, mounted, sys.executable, "-c", start],
        cwd=Path(models.__file__).parent,
        env={**os.environ, "DATABASE_URL": f"sqlite:///{config.sqlite}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith(f"DATABASE_URL: {config.sqlite}")


@pytest.mark.usefixtures("app")
def test_full_disk_is_named_as_the_reason(tmp_path: Path) -> None:
    """SQLite ends the transaction by itself then, and peewee's rollback of it fails."""
    with models.database.connection_context():
        models.database.execute_sql("PRAGMA max_page_count = 1")
        with pytest.raises(peewee.OperationalError) as failure:
            insert_many_users()
    assert models.reason(failure.value) == "database or disk is full"


# Databases of other versions


@pytest.fixture
def older(config: Settings) -> Path:
    """A database of an older version, at the place of the new one."""
    with closing(sqlite3.connect(config.sqlite)) as connection, connection:
        connection.executescript(OLDER)
    return config.sqlite


def contents(file: Path, *columns: str) -> dict[str, list[tuple[object, ...]]]:
    """The rows of all tables; of the keys, only these columns."""
    queries = {
        "user": "SELECT * FROM user",
        "hourly_usage": "SELECT * FROM hourly_usage",
        "api_key": f"SELECT {', '.join(columns)} FROM api_key",
    }
    with closing(sqlite3.connect(file)) as connection:
        return {table: connection.execute(query).fetchall() for table, query in queries.items()}


def refusal(config: Settings) -> str:
    """The message with which the start fails."""
    with pytest.raises(SettingsError) as mistake:
        models.init(config)
    return str(mistake.value)


@pytest.mark.parametrize("starts", [1, 2])
def test_older_database_loses_nothing(config: Settings, older: Path, starts: int) -> None:
    columns = "id user_id name type tier digest created_at revoked_at last_used_at total reset used"
    before = contents(older, *columns.split())
    assert {table: len(rows) for table, rows in before.items()} == {
        "user": 2,
        "hourly_usage": 2,
        "api_key": 3,
    }
    for _ in range(starts):
        models.init(config)
    assert contents(older, *columns.split()) == before


def test_key_of_an_older_database_goes_on(config: Settings, older: Path) -> None:
    key = models.PREFIXES["production"] + f"Live0001_{'0' * auth.SECRET_LENGTH}"
    key += auth.checksum(key)
    with closing(sqlite3.connect(older)) as connection, connection:
        connection.execute(
            "UPDATE api_key SET digest = ? WHERE id = 'Live0001'", (auth.digest(key),)
        )
    client = service.create_app(config).test_client()
    answer = client.get("/api/v1/usage/stats", headers={"X-API-Key": key})
    models.database.close_all()
    assert (answer.status_code, answer.get_json()["total_requests"]) == (200, 1235)


def test_revoked_key_of_an_older_database_stays_revoked(config: Settings, older: Path) -> None:
    models.init(config)
    states = {key_id: stored(key_id).state for key_id in ("Live0001", "Revoked1", "Changed1")}
    assert states == {"Live0001": "live", "Revoked1": "revoked", "Changed1": "live"}


def test_key_revoked_by_an_older_version_meanwhile_stays_revoked(
    config: Settings, older: Path
) -> None:
    """The older version may go on for a while, or come back: it knows of no `expires_at`."""
    models.init(config)
    change("Changed1", expires_at=9**9 * 9)
    with closing(sqlite3.connect(older)) as connection, connection:
        connection.execute("UPDATE api_key SET revoked_at = 1795266002")
    models.init(config)
    assert {stored(key_id).state for key_id in ("Live0001", "Changed1")} == {"revoked"}


def test_older_database_takes_new_rows(config: Settings, older: Path) -> None:
    models.init(config)
    with models.database.connection_context():
        key = auth.create_key(User.get(), "new", "production", expires_at=9**9 * 9)[0]
        assert ApiKey.get_by_id(key.id).expires_at == 9**9 * 9
    models.database.close_all()


FOREIGN = {
    "newer": "ALTER TABLE api_key ADD COLUMN scopes TEXT",
    "newer user": "ALTER TABLE user ADD COLUMN locked_at INTEGER",
    "newer usage": "ALTER TABLE hourly_usage ADD COLUMN country TEXT",
    "another program's": "DROP TABLE api_key; CREATE TABLE api_key (id INTEGER, owner TEXT)",
    "much older": "ALTER TABLE api_key DROP COLUMN digest",
}


@pytest.mark.parametrize("mode", ["delete", "wal"])
@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_database_of_another_shape_stops_the_start_and_stays_as_it_was(
    config: Settings, older: Path, change: str, mode: str
) -> None:
    with closing(sqlite3.connect(older)) as connection:
        connection.executescript(f"PRAGMA journal_mode = {mode}; {change}")
    older.chmod(0o644)
    before = older.read_bytes()
    message = refusal(config)
    assert message.startswith(f"DATABASE_URL: {older}: the table ")
    assert "newer version or another program" in message
    assert "\n" not in message
    assert older.read_bytes() == before
    assert older.stat().st_mode & 0o777 == 0o644
    assert list(older.parent.iterdir()) == [older]


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
def test_name_and_address_are_unique_ignoring_case(ada: User, taken: dict[str, str]) -> None:
    with pytest.raises(peewee.IntegrityError):
        insert_user(**taken)


def test_user_without_conflict_is_inserted(ada: User) -> None:
    assert insert_user().id != ada.id


def test_key_needs_a_user(app: Flask) -> None:
    key = ApiKey(id="a" * 8, user=1, name="ci", type="production", digest="none")
    with models.database.connection_context(), pytest.raises(peewee.IntegrityError):
        key.save(force_insert=True)


def test_saved_profile_does_not_write_the_old_password_again(ada: User) -> None:
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


def test_id_in_another_case_is_another_id(key: str) -> None:
    assert models.find_key(key[8:16].swapcase()) is None


def test_key_without_its_user_is_not_found(key: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "test.db")) as other, other:
        other.execute("DELETE FROM user")  # by hand, so without foreign keys
    assert models.find_key(key[8:16]) is None


def test_live_keys_are_those_that_have_not_ended(new_key: NewKey, now: SimpleNamespace) -> None:
    live, expiring, expired, revoked = (new_key()[8:16] for _ in range(4))
    change(expiring, expires_at=NOON + 1)
    change(expired, expires_at=NOON)
    with models.database.connection_context():
        models.revoke_key(revoked)
        rows = ApiKey.select().where(ApiKey.live())
        assert {row.id for row in rows} == {live, expiring}


@pytest.mark.parametrize(
    ("expires_at", "revoked_at", "state"),
    [
        (None, None, "live"),
        (NOON + 1, None, "live"),
        (NOON, None, "expired"),
        (NOON - 1, None, "expired"),
        (NOON, NOON, "revoked"),
    ],
)
def test_state_of_a_key_follows_from_its_end(
    now: SimpleNamespace, expires_at: int | None, revoked_at: int | None, state: str
) -> None:
    assert ApiKey(expires_at=expires_at, revoked_at=revoked_at).state == state


def test_revoking_ends_a_key_at_once(key: str, now: SimpleNamespace) -> None:
    change(key[8:16], expires_at=NOON + 60)
    with models.database.connection_context():
        assert models.revoke_key(key[8:16])
    assert (stored(key[8:16]).expires_at, stored(key[8:16]).revoked_at) == (NOON, NOON)


@pytest.mark.parametrize("changes", [{"expires_at": 1}, {"expires_at": 1, "revoked_at": 1}])
def test_key_that_has_ended_is_not_revoked_again(key: str, changes: dict[str, object]) -> None:
    change(key[8:16], **changes)
    before = stored(key[8:16]).revoked_at
    with models.database.connection_context():
        assert not models.revoke_key(key[8:16])
    assert stored(key[8:16]).revoked_at == before


def test_change_of_one_key_leaves_the_others(new_key: NewKey) -> None:
    one, two = new_key(), new_key()
    change(one[8:16], tier="pro")
    assert stored(two[8:16]).tier == "free"


def test_unknown_key_cannot_be_changed(key: str) -> None:
    assert not change("nobody's", tier="pro")


@pytest.mark.parametrize("changes", [{"expires_at": None}, {"expires_at": 9**9}, {"tier": "pro"}])
def test_key_that_has_ended_cannot_be_changed(key: str, changes: dict[str, object]) -> None:
    change(key[8:16], expires_at=1)
    assert not change(key[8:16], **changes)
    assert (stored(key[8:16]).expires_at, stored(key[8:16]).tier) == (1, "free")


# Usage


def test_an_hour_of_a_key_is_one_row(app: Flask) -> None:
    with models.database.connection_context():
        HourlyUsage.create(hour=0, key_id="a" * 8, requests=1)
        with pytest.raises(peewee.IntegrityError):
            HourlyUsage.create(hour=0, key_id="a" * 8, requests=1)


def test_look_up_leaves_no_connection_open(app: Flask) -> None:
    models.find_key("a" * 8)
    assert models.database.is_closed()


# Outages


@pytest.mark.usefixtures("app")
def test_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    outage.note(OSError("locked"))
    outage.note(OSError("locked"))
    assert caplog.record_tuples == [("models", logging.ERROR, "database unavailable: locked")]


@pytest.mark.usefixtures("app")
def test_end_of_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    outage.note(OSError("locked"))
    caplog.clear()
    for _ in range(QUIET_SYNCS - 1):
        outage.note(None)
    assert not caplog.records
    for _ in range(3):
        outage.note(None)
    assert caplog.record_tuples == [("models", logging.WARNING, "database available again")]


def test_without_an_outage_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    Outage().note(None)
    assert not caplog.records


@pytest.mark.usefixtures("app")
def test_second_outage_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    outage.note(OSError("locked"))
    for _ in range(QUIET_SYNCS):
        outage.note(None)
    outage.note(OSError("gone"))
    assert "database unavailable: gone" in caplog.text


@pytest.mark.usefixtures("app")
def test_outage_goes_on_while_somebody_fails_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage = Outage()
    for _ in range(3):
        outage.note(OSError("locked"))
        for _ in range(QUIET_SYNCS - 1):
            outage.note(None)
    assert len(caplog.records) == 1


def test_connections_are_closed_after_an_outage(app: Flask) -> None:
    models.find_key("a" * 8)
    assert models.database._connections, "one is kept for the next request"
    Outage().note(OSError("gone"))
    assert not models.database._connections


def test_full_disk_is_logged_by_its_name(
    config: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models.init(config)
    monkeypatch.setattr(models, "outage", Outage())
    limits = {"journal_mode": "wal", "max_page_count": 1}  # so no more than there are already
    monkeypatch.setitem(models.SQLITE_OPTIONS, "pragmas", limits)
    app = service.create_app(config)
    for number in range(1000):
        app.extensions["guard"].limiter.hit(f"{number:08}", Quota("free", 1, 60))
    assert not app.extensions["background"].sync()
    assert [record.getMessage() for record in caplog.records] == [
        "database unavailable: database or disk is full"
    ]
    models.database.close_all()
