"""The real server beside a PostgreSQL that is stopped, frozen, locked or replaced."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import StartServer
from helpers.load import Load, accepted, refused
from helpers.paths import ME, TEST, TIME, YEAR
from helpers.postgresql import Cluster
from helpers.rawsocket import RawSocket
from helpers.server import eventually, patience, within, writing
from storage.postgres import PAGE_CONNECTIONS

pytestmark = pytest.mark.postgres


@pytest.fixture
def own() -> Iterator[Cluster]:
    """A server that the test may stop."""
    with Cluster() as cluster:
        yield cluster.start()


@pytest.mark.parametrize("outage", ["stop", "freeze"])
def test_outage_under_load_is_503_within_four_seconds_and_no_count_is_wrong(
    own: Cluster, start_server: StartServer, outage: str
) -> None:
    server = start_server(DATABASE_URL=own.new_database(), RATE_LIMITS="free=1000000/day")
    keys = [server.new_key() for _ in range(40)]
    with Load(server.port, *keys, connections=48, rest=0.02) as load:
        replies = own.replies_through(outage, load)
    assert {reply.status for reply in replies} == {200, 503}
    assert max(reply.seconds for reply in replies if reply.status == 503) < patience(4)
    total = sum(map(server.total, keys))
    # What was given up may have been counted.
    assert 0 <= total - len(accepted(replies)) <= (64 if outage == "freeze" else 0)
    for line in ("database unavailable: ", *(["error connecting"] if outage != "freeze" else [])):
        assert 1 <= len(server.log_lines(line)) <= 2, "once a minute for each process"
    assert own.password not in server.log()


def test_memory_does_not_grow_in_an_outage(own: Cluster, start_patched: StartServer) -> None:
    """Most requests are refused at once; what remains of one would take 17 KiB."""
    server = start_patched(
        "from storage import postgres; postgres.MAX_WAITING = 6",
        DATABASE_URL=own.new_database(),
        RATE_LIMITS="free=1000000/day",
        WEB_CONCURRENCY="1",
    )
    key = server.new_key()
    own.stop()
    with Load(server.port, key, connections=12) as load:
        eventually(lambda: refused(load.replies) > 200, 20)
        before = server.resident_kib
        eventually(lambda: refused(load.replies) > 1700, 20)
        assert server.resident_kib - before < 1500 * 17 / 4
        own.start()
        eventually(lambda: load.statuses(time.monotonic() - 0.5) == {200}, patience(5))


def test_workers_start_without_a_server(own: Cluster, start_server: StartServer) -> None:
    server = start_server(DATABASE_URL=own.new_database())
    key = server.new_key()
    before = server.worker_pids
    own.stop()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(set(server.worker_pids) - set(before)) == 2)
    assert [server.ask(path, X_API_Key=key).status for path in (YEAR, TEST)] == [200, 503]
    own.start()
    eventually(lambda: server.ask(TEST, X_API_Key=key).status == 200, patience(5))
    with server.connections(1) as (idle,):  # which the stop waits for
        assert idle.request(TEST, X_API_Key=key).status == 200
        own.freeze()
        server.stop()
    assert server.log_lines("could not save the last counts"), "and nothing else"


@pytest.mark.parametrize("old_primary", ["is read-only", "is silent"])
def test_after_a_failover_all_use_the_new_primary(
    own: Cluster, start_server: StartServer, old_primary: str
) -> None:
    url = own.new_database()
    with Cluster(primary=own) as standby:
        standby.start()
        both = url.replace(f":{own.port}/", f":{own.port},127.0.0.1:{standby.port}/")
        server = start_server(DATABASE_URL=both)
        key, other = server.new_key(), server.new_key()
        with RawSocket(server.port).open(f"{TIME}?api_key={other}") as client:
            assert server.sign_up("before").status == 303
            copy = standby.url(url.rpartition("/")[2])
            eventually(lambda: len(Cluster.query(copy, 'SELECT id FROM "user"')) == 3)
            if old_primary == "is silent":
                own.freeze()
            else:  # also for those who are connected
                own.query(own.url(), "ALTER SYSTEM SET default_transaction_read_only = on")
                own.query(own.url(), "SELECT pg_reload_conf()")
            standby.query(standby.url(), "SELECT pg_promote()")
            with within(15):
                server.flask("key", "revoke", other[8:16])
            with within(2):
                assert client.close_code() == 1008, "although this worker has only read since then"
        eventually(lambda: server.ask(TEST, X_API_Key=key).status == 200, patience(5))
        eventually(lambda: server.sign_up(f"a{time.monotonic_ns()}").status == 303, 60)


def test_database_that_is_far_away_serves_the_first_request_and_the_first_form(
    own: Cluster, start_server: StartServer
) -> None:
    """To connect takes five round trips here: as long as with TLS to a server 100 ms away."""
    with own.far_away(seconds=0.08) as url:
        server = start_server(DATABASE_URL=url, WEB_CONCURRENCY="1")
        answers = [server.ask(ME, X_API_Key=server.new_key()), server.sign_up("ada")]
        assert [answer.status for answer in answers] == [200, 303]


def test_pooler_that_gives_each_transaction_another_session_serves(
    own: Cluster, start_server: StartServer
) -> None:
    """Each statement comes often enough to be prepared; no setting reaches another client.

    A limit that is longer than what a request waits is no reason to refuse the start.
    """
    with own.pooled(statement_timeout="30s", lock_timeout="30s") as url:
        server = start_server(DATABASE_URL=url, RATE_LIMITS="free=1000000/day")
        keys = [server.new_key() for _ in range(3)]
        assert {
            reply.status for reply in Load(server.port, *keys, connections=8, requests=400).join()
        } == {200}
        assert sum(map(server.total, keys)) == 400
        assert [server.sign_up(f"user-{n}").status for n in range(9)] == [303] * 9
        assert [
            own.query(url, "SELECT current_setting('statement_timeout')") for _ in range(9)
        ] == [[("30s",)]] * 9


def test_no_default_of_a_database_fails_a_request_or_a_command(
    cluster: Cluster, start_server: StartServer
) -> None:
    url = cluster.new_database(
        # Where a session kept them, most of these would fail good requests and commands.
        default_transaction_isolation="repeatable read",
        statement_timeout="50ms",
        lock_timeout="10ms",
        idle_in_transaction_session_timeout="1s",
        idle_session_timeout="200ms",
        synchronous_commit="off",
        standard_conforming_strings="off",
        client_encoding="LATIN1",
        timezone="Asia/Tokyo",
        datestyle="German",
        search_path="elsewhere",
    )
    # The test's own sessions may take longer than idle_session_timeout on a busy machine.
    Cluster.query(f"{url}?options=-cidle_session_timeout%3D0", "CREATE SCHEMA elsewhere")
    server = start_server(
        DATABASE_URL=url, RATE_LIMITS="free=1000000/day", PGCLIENTENCODING="SQL_ASCII"
    )
    assert {
        reply.status
        for reply in Load(server.port, server.new_key(), connections=16, requests=400).join()
    } == {200}
    server.env["PGAPPNAME"] = "command"
    with server.start_flask("user", "create", "ada", "a@b.example", "--password-stdin") as command:
        idle = (
            "SELECT 1 FROM pg_stat_activity"
            " WHERE application_name = 'command' AND clock_timestamp() - state_change > '0.4s'"
        )
        eventually(lambda: Cluster.query(cluster.url(), idle))
        assert command.communicate("long enough\n")[1] == "User ada was created.\n"
    name = "я" * 64
    new = server.flask("key", "create", "ada", name).strip()
    assert server.ask(TEST, X_API_Key=new).json()["api_key_name"] == name
    assert server.sign_up("bob").status == 303


def test_idle_process_has_no_connection(own: Cluster, start_patched: StartServer) -> None:
    url = own.new_database()
    server = start_patched(
        "from storage import postgres; postgres.SHRINK_SECONDS = 0.2", DATABASE_URL=url
    )
    key = server.new_key()
    assert [server.ask(path, X_API_Key=key).status for path in (TEST, ME)] == [200] * 2
    assert server.sign_up("ada").status == 303
    open_ones = f"SELECT * FROM pg_stat_activity WHERE datname = '{url.rpartition('/')[2]}'"
    eventually(lambda: not own.query(own.url(), open_ones), 10)
    assert server.ask(ME, X_API_Key=key).status == 200


def test_given_up_statements_end_on_the_server(own: Cluster, start_server: StartServer) -> None:
    """Or they would soon have all of its connections."""
    server = start_server(DATABASE_URL=(url := own.new_database()), WEB_CONCURRENCY="1")
    key = server.new_key()
    for number in range(PAGE_CONNECTIONS + 1):  # the later ones find all connections closed
        assert [
            server.ask(TEST, X_API_Key=key).status,
            server.sign_up(f"user-{number}").status,
        ] == [200, 303], (
            f"after the database closed all connections {number} times: see is_stale, and give "
            "each connection back to its pool, also a closed one: see get_connection"
        )
        own.query(
            url,
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
    with writing(url, 'LOCK TABLE api_key, "user"'):
        assert [server.ask(TEST, X_API_Key=key).status, server.sign_up("bob").status] == [503] * 2
        waiting = "SELECT 1 FROM pg_locks WHERE NOT granted"
        eventually(lambda: not own.query(own.url(), waiting), patience(2))


def test_page_that_waits_for_a_connection_keeps_nobody_from_giving_one_back(
    cluster: Cluster, start_server: StartServer
) -> None:
    """As many sign-ups at once as passwords of a caller are hashed; a process has 3 connections."""
    server = start_server(DATABASE_URL=cluster.new_database(), WEB_CONCURRENCY="1")
    names = [f"user-{number}" for number in range(20)]
    with ThreadPoolExecutor(20) as threads:
        assert {page.status for page in threads.map(server.sign_up, names)} == {303}, (
            "PageDatabase must not hold peewee's lock while it connects"
        )


def test_pages_beside_a_frozen_server_are_503(own: Cluster, start_server: StartServer) -> None:
    server = start_server(DATABASE_URL=own.new_database())
    assert server.sign_up("before").status == 303
    own.freeze()
    with ThreadPoolExecutor(6) as threads, within(10):
        assert [page.status for page in threads.map(server.sign_up, ["ada"] * 6)] == [503] * 6
    own.thaw()
    eventually(lambda: server.sign_up("after").status == 303, patience(60))
