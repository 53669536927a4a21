"""The file in which all rows are stored."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import peewee
import pytest

from models import User, db
from settings import Settings, SettingsError, load
from storage.database import command_connection, prepare_database
from storage.outage import reason_of


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mode", [None, 0o640])
def test_file_is_for_its_owner(config: Settings, tmp_path: Path, mode: int | None) -> None:
    """A file that has another mode keeps it."""
    if mode:
        (tmp_path / "test.db").touch()
        (tmp_path / "test.db").chmod(mode)
    prepare_database(config)
    with command_connection(config):
        User.create(username="ada", email="ada@example.com", password_hash="")
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("test.db*")}
    assert modes == dict.fromkeys(("test.db", "test.db-wal", "test.db-shm"), mode or 0o600)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a user with no special permissions, also where root runs the tests."""
    if is_root := os.geteuid() == 0:
        os.setresuid(65534, 65534, 0)
    try:
        with tempfile.TemporaryDirectory(dir="/tmp") as made:
            yield Path(made)
    finally:
        if is_root:
            os.setresuid(0, 0, 0)


@pytest.mark.parametrize("name", ["test.db", "."])
@pytest.mark.parametrize("mode", [0o111, 0o555])
def test_database_without_permission_is_one_line(folder: Path, name: str, mode: int) -> None:
    """For example, root has made it, and the service runs as another user."""
    prepare_database(config := load({"DATABASE_URL": f"sqlite:///{folder}/test.db"}))
    held = folder / name
    held.chmod(mode)
    with pytest.raises(SettingsError) as refusal:
        prepare_database(config)
    folder.chmod(0o700)
    assert str(refusal.value) == (
        f"DATABASE_URL: {folder}/test.db: no permission to read and write {held}; "
        "change its owner, or make its file system writable"
    )


def test_log_of_a_file_that_was_moved_away_is_not_taken_over(
    config: Settings, tmp_path: Path
) -> None:
    """Also if DATABASE_URL names a link to the file."""
    (tmp_path / "test.db").symlink_to(tmp_path / "moved.db")
    (tmp_path / "moved.db-wal").touch()
    with pytest.raises(SettingsError, match=r"is missing, but moved\.db-wal is there: put"):
        prepare_database(config)
    assert not (tmp_path / "moved.db").exists()


def test_file_that_is_no_database_stays_as_it_was(config: Settings, tmp_path: Path) -> None:
    file = tmp_path / "test.db"
    file.write_text(text := "This is no database. " * 100)
    file.chmod(0o644)
    with pytest.raises(SettingsError, match=f"^DATABASE_URL: {file}: file is not a database$"):
        prepare_database(config)
    assert (file.read_text(), file.stat().st_mode & 0o777) == (text, 0o644)


@pytest.mark.usefixtures("app")
def test_full_disk_is_named_as_the_reason() -> None:
    """SQLite ends the transaction by itself then, and peewee's rollback of it fails."""
    with db.connection_context():
        db.execute_sql("PRAGMA cache_size = 10")  # so that it writes before the end
        db.execute_sql("PRAGMA max_page_count = 1")
        with pytest.raises(peewee.OperationalError) as failure, db.atomic():
            [User.create(username=n, email=n, password_hash="x" * 4000) for n in range(300)]
    assert reason_of(failure.value) == "database or disk is full"
