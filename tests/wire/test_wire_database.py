"""The real server beside a database that is locked, slow or away."""

import resource
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import pytest

from conftest import StartServer, in_ci
from helpers.load import Load, accepted
from helpers.paths import PROTECTED, STATS, TEST, TIME
from helpers.rawsocket import RawSocket
from helpers.server import (
    REPOSITORY,
    eventually,
    find_program,
    listens,
    patience,
    serve_command,
    within,
    writing,
)


def test_lock_by_another_process_loses_nothing(start_server: StartServer) -> None:
    """Nobody waits for it; what was revoked by hand, or its socket, ends."""
    server = start_server(RATE_LIMITS="free=1000000/day")
    key, revoked = server.new_key(), server.new_key()
    with RawSocket(server.port) as stream:
        stream.open(f"{TIME}?api_key={revoked}")
        server.execute("DELETE FROM api_key WHERE id = ?", revoked[8:16])
        with (
            writing(str(server.database), "BEGIN IMMEDIATE"),
            Load(server.port, key, connections=1) as load,
        ):
            assert server.sign_up("early").status == 503, "a form waits: use BUSY_SECONDS"
            with within(2):
                assert stream.close_code() == 1008, "see close_ended in ws/open_sockets.py"
            eventually(lambda: len(load.replies) > 100)
        assert server.sign_up("late").status == 303
    assert load.statuses() == {200}, "counts wait for the file: see Store in storage/sqlite.py"
    eventually(
        lambda: server.execute("SELECT total FROM api_key") == [(len(load.replies),)], patience(2)
    )
    # A wait for the lock would come back at each sync; a pause of the machine hits one or two.
    seconds = sorted(reply.seconds for reply in load.replies)
    assert seconds[-3] < patience(0.1), "each save waits for the lock: use BUSY_SECONDS"
    assert seconds[-1] < 4, "who waits for a lock halts all: use BUSY_SECONDS"
    assert len(server.log_lines("database unavailable")) == 1, "an outage is logged once a minute"


@pytest.mark.ci
def test_moved_file_loses_nothing(start_server: StartServer, tmp_path: Path) -> None:
    """Its name has what a URI would take apart."""
    file = tmp_path / "50%20 of a?b=c#d.db"
    away = tmp_path / "away"
    server = start_server(DATABASE_URL=f"sqlite:///{file}", WEB_CONCURRENCY="1")
    keys = [server.new_key() for _ in range(2)]
    assert server.ask(TEST, X_API_Key=keys[0]).status == 200
    file.rename(away)
    answers = [server.ask(path, X_API_Key=keys[1]).status for path in ("/log-in", TEST)]
    assert answers == [200, 200], "a Store has one connection: thread_safe=False"
    assert server.sign_up("bob").status in (303, 503)
    assert not file.exists()
    away.rename(file)
    assert server.sign_up("ada").status == 303
    assert server.flask("key", "list").count("\n") == 2
    server.stop()
    assert {path.name for path in tmp_path.glob("*.db*")} == {file.name, f"{file.name}-lock"}
    assert server.execute("PRAGMA integrity_check") == [("ok",)]
    assert server.execute("SELECT total FROM api_key") == [(1,), (1,)]


@pytest.mark.parametrize("ends", [True, in_ci(False)])
def test_stop_waits_for_a_lock(start_server: StartServer, ends: bool) -> None:
    server = start_server()
    key = server.new_key()
    with ThreadPoolExecutor(1) as thread:
        with writing(str(server.database), "BEGIN IMMEDIATE"):
            answers = [server.ask(TEST, X_API_Key=key).status for _ in range(2)]
            stopping = thread.submit(server.stop)
            # The worker closes its listener right before the last save.
            eventually(lambda: not listens("127.0.0.1", server.port))
            wait([stopping], timeout=0.5 if ends else None)
        stopping.result()
    assert answers == [200] * 2
    assert len(server.log_lines("could not save the last counts: database is locked")) == (
        0 if ends else 1
    )
    assert server.start().total(key) == (2 if ends else 0), "see LAST_SECONDS"


@pytest.mark.parametrize("hindrance", ["", in_ci("another program"), in_ci("disk I/O error")])
def test_file_is_complete_after_a_stop_although_another_program_has_it_open(
    start_server: StartServer, hindrance: str
) -> None:
    """Or else the log says why: that program reads an older snapshot, or nothing can be written."""
    server = start_server()
    key = server.new_key()
    with closing(sqlite3.connect(server.database, isolation_level=None)) as other:
        other.execute("BEGIN")
        assert other.execute("SELECT total FROM api_key").fetchall() == [(0,)]
        if hindrance != "another program":
            other.execute("COMMIT")
        assert server.ask(TEST, X_API_Key=key).status == 200
        if hindrance == "disk I/O error":  # for all files that are larger than the log
            eventually(lambda: server.execute("SELECT total FROM api_key") == [(1,)])
            resource.prlimit(server.worker_pid, resource.RLIMIT_FSIZE, (4096, 4096))
        server.stop()
        alone = shutil.copy(server.database, server.directory / "alone.db")
    with closing(sqlite3.connect(alone)) as copy:
        assert copy.execute("SELECT total FROM api_key").fetchall() == [(int(not hindrance),)]
    lines = server.log_lines("the file is complete only together with its -wal file: ")
    assert [hindrance in line for line in lines] == [True] * bool(hindrance), (
        "the log says so if -wal is still needed, and only then: see save_and_close"
    )


@pytest.mark.ci
def test_what_a_page_stores_is_flushed_and_so_is_what_a_checkpoint_moves(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Counts are not flushed. What is, as strace sees it, survives a power failure.

    A checkpoint comes with the first save once the log (-wal) has 4 MiB.
    """
    options = ["-D", "-f", "-y", "-e", "trace=fsync,fdatasync", "-o", f"{tmp_path}/trace"]
    server = start_server(find_program("strace"), *options, *serve_command())
    key = server.new_key()
    file = server.database

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


# With SQLite, and with PostgreSQL under --postgres


def test_limit_is_exact_over_64_connections(start_server: StartServer) -> None:
    """Over two processes with PostgreSQL; each number of requests left is told once for a key."""
    server = start_server(RATE_LIMITS="free=500/day")
    keys = [server.new_key(), server.new_key()]
    replies = Load(server.port, *keys, connections=64, requests=1500).join()
    assert {reply.status for reply in replies} == {200, 429}
    assert [
        sorted(reply.remaining for reply in accepted(replies) if reply.key == key) for key in keys
    ] == [[*range(500)]] * 2, (
        f"of 1500 requests with two keys, {len(accepted(replies))} were accepted, not 500 of each, "
        "or two were told the same number of requests left, or one that of the other key: see "
        "Limiter.hit, or `hit` and HIT in storage/postgres.py"
    )


def test_what_was_used_up_is_used_up_after_a_restart(start_server: StartServer) -> None:
    """Of each tier, and of an endpoint with a limit of its own of up to 30 requests."""
    server = start_server(RATE_LIMITS="free=20/day,five=5/day,much=10000/day")
    asked = [
        (path, server.new_key(tier=tier)) for path in PROTECTED for tier in ("free", "five", "much")
    ]
    refused = {
        (path, key)
        for path, key in asked
        if [server.ask(path, X_API_Key=key).status for _ in range(31)][-1] != 200
    }
    assert len(refused) >= 2 * len(set(PROTECTED) - {STATS})
    server.stop()
    server.start()
    assert refused == {
        (path, key) for path, key in asked if server.ask(path, X_API_Key=key).status != 200
    }, "keep what is counted in a column, or in a table"


LAST_COLUMN = 'used = BigIntegerField(default=0, constraints=[SQL("DEFAULT 0")])\n'
NEW_COLUMNS = """
    colour = CharField(default='0', constraints=[SQL('DEFAULT 0')])
    place = BigIntegerField(null=True, index=True)
"""


@pytest.mark.ci
def test_new_column_is_one_line(start_server: StartServer, tmp_path: Path) -> None:
    """The version before goes on with the same database."""
    newer = shutil.copytree(
        REPOSITORY, tmp_path / "newer", ignore=shutil.ignore_patterns(".*", "tests", "*.db*")
    )
    models = (newer / "models.py").read_text()
    (newer / "models.py").write_text(models.replace(LAST_COLUMN, LAST_COLUMN + NEW_COLUMNS))
    server = start_server()
    key = server.new_key()
    server.flask("user", "list", cwd=newer)
    new = server.flask("key", "create", "user0", "by the version before").strip()
    assert [server.ask(TEST, X_API_Key=each).status for each in (key, new)] == [200, 200]
    assert set(server.execute("SELECT colour, place FROM api_key")) == {("0", None)}
