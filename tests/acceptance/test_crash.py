"""What SQLite flushes to the disk, and so survives a power failure, as strace sees it."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from conftest import StartServer
from helpers.paths import TEST
from helpers.server import eventually, serve_command


def test_what_a_page_stores_is_flushed_and_so_is_what_a_checkpoint_moves(
    start_server: StartServer, tmp_path: Path
) -> None:
    """But no count. A checkpoint comes with the first save once the log (-wal) has 4 MiB."""
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    options = ["-D", "-f", "-y", "-e", "trace=fsync,fdatasync", "-o", f"{tmp_path}/trace"]
    server = start_server("strace", *options, *serve_command())
    key, file = server.new_key(), server.database

    def flushed(name: str) -> int:
        return (tmp_path / "trace").read_text().count(f"{name}>")

    def count(total: int) -> None:
        assert server.ask(TEST, X_API_Key=key).status == 200
        eventually(lambda: server.execute("SELECT total FROM api_key") == [(total,)])

    assert server.sign_up("ada").status == 303  # which begins the log
    log, rest = flushed(f"{file}-wal"), flushed(str(file))
    assert server.sign_up("bob").status == 303
    eventually(lambda: flushed(f"{file}-wal") > log)
    log = flushed(f"{file}-wal")
    count(1)
    assert (flushed(f"{file}-wal"), flushed(str(file))) == (log, rest)
    with closing(sqlite3.connect(file)) as other, other:
        other.execute("PRAGMA wal_autocheckpoint = 0")
        other.execute("UPDATE user SET password_hash = ? WHERE id = 1000", ["x" * 5_000_000])
    count(2)
    eventually(lambda: flushed(str(file)) > rest)
