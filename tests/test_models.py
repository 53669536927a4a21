"""The state of a key, and the file in which all rows are stored."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import peewee
import pytest

import models
from models import ApiKey, User
from settings import HERE, Settings
from storage.database import create_tables
from storage.outage import one_line

NOON = 1_795_262_400  # 2026-11-21T12:00:00Z


# Keys


@pytest.mark.parametrize(
    ("rotated_at", "expires_at", "revoked_at", "state"),
    [
        (None, None, None, "live"),
        (None, NOON + 1, None, "live"),
        (None, NOON, None, "expired"),
        (NOON - 1, NOON + 1, None, "rotated"),
        (NOON - 1, NOON, None, "expired"),
        (None, None, NOON, "revoked"),
        (NOON - 1, NOON + 1, NOON, "revoked"),
        (None, NOON - 1, NOON, "revoked"),
    ],
)
def test_state_of_a_key_and_whether_it_is_good(
    ada: User,
    monkeypatch: pytest.MonkeyPatch,
    rotated_at: int | None,
    expires_at: int | None,
    revoked_at: int | None,
    state: str,
) -> None:
    monkeypatch.setattr(models, "time", SimpleNamespace(time=lambda: NOON))
    moments = {"rotated_at": rotated_at, "expires_at": expires_at, "revoked_at": revoked_at}
    columns = {"id": "a" * 8, "user": ada, "name": "ci", "type": "production", "digest": ""}
    with models.database.connection_context():
        key = ApiKey.create(**columns, **moments)
        is_live = ApiKey.select().where(ApiKey.live()).exists()
    assert key.state == state
    assert is_live == (not key.has_ended()) == (state in ("live", "rotated"))


# The file


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("is_new", [True, False])
def test_database_is_for_its_owner_only(
    config: Settings, tmp_path: Path, umask: int, is_new: bool
) -> None:
    before = os.umask(umask)
    if not is_new:
        config.sqlite.touch(0o666)
    try:
        create_tables(config)
        with models.database.connection_context():  # so that there is a log of writes
            User.create(username="ada", email="ada@example.com", password_hash="")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("test.db*")}
    models.database.close_all()
    assert modes == dict.fromkeys(("test.db", "test.db-wal", "test.db-shm"), 0o600)


@pytest.mark.skipif(not shutil.which("unshare") or os.getuid() != 0, reason="needs mounts of root")
@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("read_only", ["test.db", ""], ids=["the file", "the directory"])
def test_read_only_database_stops_the_start(
    config: Settings, tmp_path: Path, read_only: str
) -> None:
    models.database.close_all()
    start = "import settings, storage.database as d; d.create_tables(settings.load())"
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, str(tmp_path / read_only)]
    environ = {**os.environ, "DATABASE_URL": f"sqlite:///{config.sqlite}"}
    done = subprocess.run(
        [*command, sys.executable, "-c", start],
        cwd=HERE,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("DATABASE_URL: ")


@pytest.mark.usefixtures("app")
def test_full_disk_is_named_as_the_reason() -> None:
    """SQLite ends the transaction by itself then, and peewee's rollback of it fails."""

    def insert_many_users() -> None:
        with models.database.atomic():
            for number in range(1000):
                User.create(username=number, email=number, password_hash="x" * 1000)

    with models.database.connection_context():
        models.database.execute_sql("PRAGMA max_page_count = 1")
        with pytest.raises(peewee.OperationalError) as failure:
            insert_many_users()
    assert one_line(failure.value) == "database or disk is full"
