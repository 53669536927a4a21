"""The real server on a Citus cluster: a coordinator, and two nodes that hold the rows."""

import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from conftest import StartServer
from load import Load, accepted
from paths import KEYS, ME, PROFILE, SECURITY, STATS, STATUS, TEST, TIME
from postgresql import CitusCluster, Cluster
from rawsocket import RawSocket, form_bytes
from serving import REPOSITORY, Server, eventually
from settings import load
from storage.database import create_tables

pytestmark = pytest.mark.citus

CHAPTER = (REPOSITORY / "docs" / "growing.md").read_text().partition("## Past one")[2]
DISTRIBUTE = re.findall(r"SELECT create_\w+_table\([^;]*\)", CHAPTER)


@pytest.fixture(scope="module")
def citus() -> Iterator[CitusCluster]:
    with closing(CitusCluster()) as cluster:
        yield cluster


@pytest.fixture
def server(citus: CitusCluster, start_server: StartServer) -> Server:
    url = citus.new_database()
    create_tables(load({"DATABASE_URL": url}))
    for statement in DISTRIBUTE:
        Cluster.query(url, statement)
    limits = "free=1000000/day,five=500/day"
    return start_server(DATABASE_URL=url, WEB_CONCURRENCY="2", RATE_LIMITS=limits)


def rows(server: Server, sql: str) -> list[Any]:
    return Cluster.query(server.env["DATABASE_URL"], sql)


def test_limit_is_exact_over_two_processes(server: Server) -> None:
    """Each hit is about one node."""
    plan = rows(server, "EXPLAIN UPDATE api_key SET used = used + 1 WHERE id = 'aaaaaaaa'")
    assert "  Task Count: 1" in [line for (line,) in plan]
    keys = [server.new_key(tier="five") for _ in range(4)]
    replies = Load(server.port, *keys, connections=32, requests=3200).join()
    assert {reply.status for reply in replies} == {200, 429}
    for key in keys:
        mine = [reply for reply in accepted(replies) if reply.key == key]
        assert sorted(reply.remaining for reply in mine) == list(range(500))
    eventually(lambda: rows(server, "SELECT sum(requests) FROM hourly_usage") == [(2000,)])


def test_everything_that_a_user_does(server: Server) -> None:
    cookie = server.sign_up("ada").headers["Set-Cookie"].partition(";")[0]
    key = server.flask("key", "create", "ada", "ci").strip()
    for path in (TEST, ME, STATS):
        assert server.ask(path, X_API_Key=key).status == 200
    for path in (SECURITY, PROFILE, f"{KEYS}/{key[8:16]}/rotate"):
        assert server.ask(path, Cookie=cookie).status == 200
    successor = server.flask("key", "rotate", key[8:16], "--grace", "0").strip()
    assert server.ask(ME, X_API_Key=successor).json()["api_key_count"] == 1
    assert server.ask(TEST, X_API_Key=key).status == 401
    server.flask("key", "tier", successor[8:16], "five")
    assert server.flask("key", "list").count("\n") == 1
    with RawSocket(server.port) as client:
        client.open(f"{TIME}?api_key={successor}")
        server.flask("user", "delete", "ada")
        assert client.close_code() == 1008
    assert rows(server, "SELECT id FROM api_key") == rows(server, 'SELECT id FROM "user"') == []
    assert server.sign_up("bob").status == 303
    assert not server.log_lines("database unavailable")


def test_two_requests_at_once_make_no_51st_key(server: Server) -> None:
    cookie = server.sign_up("ada").headers["Set-Cookie"].partition(";")[0]
    copies = """INSERT INTO api_key (id, user_id, name, type, tier, digest, created_at)
        SELECT 'copy' || (1000 + i), id, 'k', 'production', 'free', '', 0
        FROM "user", generate_series(1, 49) i"""
    rows(server, copies)

    def create(number: int) -> int:
        fields = {"name": "ci", "type": "production", "expires": "never"}
        raw = form_bytes(KEYS, **fields).replace(b"\r\n", f"\r\nCookie: {cookie}\r\n".encode(), 1)
        return server.send(raw).status

    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(create, range(4)))[0] == 200
    assert rows(server, "SELECT count(*) FROM api_key") == [(50,)]


def test_old_rows_are_deleted_and_a_column_is_one_line(
    server: Server, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    key, newer = server.new_key(), tmp_path_factory.mktemp("newer") / "newer"
    rows(server, "INSERT INTO hourly_usage VALUES (0, 'aaaaaaaa', 1), (0, 'aaaaaaab', 1)")
    rows(server, f"UPDATE api_key SET expires_at = 1 WHERE id <> '{key[8:16]}'")
    shutil.copytree(REPOSITORY, newer, ignore=shutil.ignore_patterns(".*", "tests", "*.db*"))
    last = re.search("    used = .*", (newer / "models.py").read_text())
    assert last
    column = f"{last[0]}\n    place = BigIntegerField(null=True, index=True)"
    models = (newer / "models.py").read_text().replace(last[0], column)
    (newer / "models.py").write_text(models)
    command = server.start_flask("user", "list", cwd=newer)
    with Load(server.port, key, connections=1) as load:
        assert command.communicate(timeout=20)[1] == ""
        done = time.monotonic()
        eventually(lambda: load.statuses(max(done, time.monotonic() - 0.5)) == {200})
    assert load.statuses() <= {200, 503}, "all shards are locked for some tenths of a second"
    assert rows(server, "SELECT place FROM api_key") == [(None,)]
    url = server.env["DATABASE_URL"]
    again = start_server(DATABASE_URL=url, WEB_CONCURRENCY="1")  # looks for old rows at once
    eventually(lambda: rows(again, "SELECT 1 FROM hourly_usage WHERE hour = 0") == [])


@pytest.mark.parametrize("outage", ["stop", "freeze"])
def test_node_that_was_away_serves_again_and_nothing_is_admitted_uncounted(
    citus: CitusCluster, server: Server, outage: str
) -> None:
    keys, away = [server.new_key() for _ in range(20)], citus.nodes[1]
    with Load(server.port, *keys, rest=0.02) as load:
        eventually(lambda: len(load.replies) > 500)
        getattr(away, outage)()
        eventually(lambda: 503 in load.statuses())
        assert server.ask(STATUS).status == 200
        back = time.monotonic()
        away.thaw() if outage == "freeze" else away.start()
        eventually(lambda: load.statuses(max(back, time.monotonic() - 0.5)) == {200}, 10)
        replies = load.stop()
    assert {reply.status for reply in replies} == {200, 503}
    [(counted,)] = rows(server, "SELECT sum(total) FROM api_key")
    assert counted >= len(accepted(replies))
