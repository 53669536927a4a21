"""The real server on a Citus cluster: a coordinator, and two nodes that hold the rows."""

from collections.abc import Iterator

import pytest

from conftest import StartServer
from helpers.documents import blocks
from helpers.load import Load, accepted
from helpers.paths import KEYS, ME, PROFILE, SECURITY, STATS, TEST, TIME
from helpers.postgresql import CitusCluster
from helpers.rawsocket import RawSocket
from helpers.server import REPOSITORY, Server, bash, clean_environment, eventually
from settings import load
from storage.database import prepare_database

pytestmark = pytest.mark.citus

(DISTRIBUTE,) = blocks(
    "sh", (REPOSITORY / "docs" / "growing.md").read_text().partition("## Past one")[2]
)
LIMITS = "free=1000000/day,five=500/day"


@pytest.fixture(scope="module")
def citus() -> Iterator[CitusCluster]:
    with CitusCluster() as cluster:
        yield cluster


@pytest.fixture
def server(citus: CitusCluster, start_server: StartServer) -> Server:
    url = citus.new_database()
    prepare_database(load({"DATABASE_URL": url}))
    bash(DISTRIBUTE, REPOSITORY, clean_environment(DATABASE_URL=url))
    return start_server(DATABASE_URL=url, WEB_CONCURRENCY="2", RATE_LIMITS=LIMITS)


def test_limit_is_exact_over_two_processes(server: Server) -> None:
    """Each hit is about one node."""
    assert ("  Task Count: 1",) in server.execute(
        "EXPLAIN UPDATE api_key SET used = used + 1 WHERE id = 'aaaaaaaa'"
    )
    keys = [server.new_key(tier="five") for _ in range(4)]
    replies = Load(server.port, *keys, connections=32, requests=3200).join()
    assert {reply.status for reply in replies} == {200, 429}
    for key in keys:
        assert sorted(reply.remaining for reply in accepted(replies) if reply.key == key) == list(
            range(500)
        )
    eventually(lambda: server.execute("SELECT sum(requests) FROM hourly_usage") == [(2000,)])


def test_everything_that_a_user_does(server: Server) -> None:
    """Keys that ended and old hours are deleted in the background."""
    cookie = server.sign_up("ada").headers["Set-Cookie"].partition(";")[0]
    key = server.flask("key", "create", "ada", "ci").strip()
    for path in (TEST, ME, STATS, SECURITY, PROFILE, f"{KEYS}/{key[8:16]}/rotate"):
        assert server.ask(path, X_API_Key=key, Cookie=cookie).status == 200
    assert server.flask("usage").startswith(f"{key[8:16]}\tada\tci\t")
    lost = server.flask("key", "rotate", key[8:16]).strip()
    seen = server.flask("key", "rotate", lost[8:16]).strip()
    assert server.ask(ME, X_API_Key=seen).json()["api_key_count"] == 2
    successor = server.flask("key", "rotate", seen[8:16], "--grace", "0").strip()
    assert server.flask("key", "list").count("\n") == 1, "the others have ended"
    server.execute("INSERT INTO hourly_usage VALUES (0, 'aaaaaaaa', 1), (0, 'aaaaaaab', 1)")
    assert server.ask(TEST, X_API_Key=successor).status == 200
    eventually(lambda: server.execute("SELECT id FROM api_key") == [(successor[8:16],)])
    eventually(lambda: server.execute("SELECT 1 FROM hourly_usage WHERE hour = 0") == [])
    with RawSocket(server.port) as client:
        client.open(f"{TIME}?api_key={successor}")
        server.flask("user", "delete", "ada")
        assert client.close_code() == 1008
    assert server.execute("SELECT id FROM api_key") == server.execute('SELECT id FROM "user"') == []
    assert not server.log_lines("database unavailable")


@pytest.mark.parametrize("outage", ["stop", "freeze"])
def test_node_that_was_away_serves_again_and_nothing_is_admitted_uncounted(
    citus: CitusCluster, server: Server, outage: str
) -> None:
    keys = [server.new_key() for _ in range(20)]
    with Load(server.port, *keys, rest=0.02) as load:
        replies = citus.nodes[1].replies_through(outage, load)
    assert {reply.status for reply in replies} == {200, 503}
    [(counted,)] = server.execute("SELECT sum(total) FROM api_key")
    assert counted >= len(accepted(replies))
