"""PostgreSQL in place of SQLite: exact over two processes, and back by itself after an outage."""

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from conftest import StartServer
from load import Load, accepted
from postgresql import Cluster, connected
from rawsocket import CLOSE, Answer, RawSocket
from serving import REPOSITORY, Server, StartError, clean_environment, eventually, free_port
from storage import copy

TIME, STATS = "/api/v1/ws/time", "/api/v1/usage/stats"
TEST, STATUS = "/api/v1/protected/test", "/api/v1/status"


@pytest.fixture
def database(cluster: Cluster) -> str:
    """The URL of a new database on the server that always runs."""
    return cluster.new_database()


@pytest.fixture(scope="module")
def shared(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service of two workers for all tests that only talk to it."""
    settings = {"DATABASE_URL": cluster.new_database(), "WEB_CONCURRENCY": "2"}
    running = Server(tmp_path_factory.mktemp("two"), RATE_LIMITS=LIMITS, **settings)
    try:
        yield running.start()
        running.close(signal.SIGTERM)
        assert "Traceback" not in running.log()
    finally:
        running.close()


@pytest.fixture
def two(start_server: StartServer, database: str) -> Server:
    """A service of two workers for one test."""
    return start_server(DATABASE_URL=database, WEB_CONCURRENCY="2", RATE_LIMITS=LIMITS)


LIMITS = "free=1000000/day,hourly=5000/hour,blink=50/second,five=5/day"


@pytest.fixture(scope="module")
def second_cluster(with_postgres: None) -> Iterator[Cluster]:
    running = Cluster()
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def own_cluster(second_cluster: Cluster) -> Cluster:
    """A PostgreSQL server that the test may stop."""
    second_cluster.close_server()  # as a failed test may have left it
    return second_cluster.start()


def ask(server: Server, path: str, key: str = "", method: str = "GET") -> Answer:
    with RawSocket(server.port) as connection:
        return connection.request(path, method, X_API_Key=key)


def query(server: Server, sql: str, *values: object) -> list[Any]:
    """Ask the server's database."""
    return Cluster.query(server.env["DATABASE_URL"], sql, *values)


def total_requests(server: Server, key: str) -> int:
    """What was counted for the key before this question."""
    total: int = ask(server, STATS, key).json()["total_requests"]
    return total - 1


def away_from_the_turn(window: int, margin: float) -> None:
    left = window - time.time() % window
    if left < margin:
        time.sleep(left)


class Browser:
    """A user of the pages, logged in after `sign_up`."""

    def __init__(self, server: Server) -> None:
        self.server, self.cookie = server, ""

    def sign_up(self, name: str) -> "Browser":
        fields = {"username": name, "email": f"{name}@example.com", "password": "x" * 10}
        assert self.post("/sign-up", **fields)[0] == 303
        return self

    def post(self, path: str, **fields: str) -> tuple[int, str]:
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Cookie": self.cookie}
        return self._ask("POST", path, urlencode(fields), headers)

    def get(self, path: str) -> tuple[int, str]:
        return self._ask("GET", path, "", {"Cookie": self.cookie})

    def _ask(self, method: str, path: str, body: str, headers: dict[str, str]) -> tuple[int, str]:
        connection = self.server.connection()
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            cookie = answer.headers.get("Set-Cookie", "")
            self.cookie = cookie.partition(";")[0] or self.cookie
            return answer.status, answer.read().decode()


class TestExactness:
    def test_given_20000_requests_over_two_workers_then_5000_are_accepted(
        self, shared: Server
    ) -> None:
        key = shared.new_key(tier="hourly")
        away_from_the_turn(3600, margin=20)
        replies = Load(shared.port, key, connections=64, requests=20_000).join()

        statuses = Counter(reply.status for reply in replies)
        assert statuses == {200: 5000, 429: 15_000}, shared.log_lines("available")
        told = sorted(reply.remaining for reply in accepted(replies))
        assert told == list(range(5000))

    def test_given_counts_of_two_workers_then_both_tell_the_same_total(
        self, shared: Server
    ) -> None:
        key = shared.new_key()
        replies = Load(shared.port, key, connections=16, requests=1000).join()

        assert Counter(reply.status for reply in replies) == {200: 1000}
        totals = [total_requests(shared, key) for _ in range(20)]  # each over a new connection
        assert totals == list(range(1000, 1020))

    def test_given_many_keys_and_short_windows_then_no_window_admits_more(
        self, shared: Server
    ) -> None:
        keys = [shared.new_key(tier="blink") for _ in range(8)]
        with Load(shared.port, *keys, connections=32, rest=0.02) as load:
            time.sleep(4)

        windows = Counter((reply.key, reply.reset) for reply in accepted(load.replies))
        told = Counter((r.key, r.reset, r.remaining) for r in accepted(load.replies))
        assert len(windows) > len(keys)  # windows have turned
        assert max(windows.values()) == 50
        assert max(told.values()) == 1

    def test_given_many_keys_then_each_total_is_the_number_of_its_answers(
        self, shared: Server
    ) -> None:
        keys = [shared.new_key() for _ in range(8)]
        replies = Load(shared.port, *keys, connections=32, requests=2000).join()

        accepted_ones = Counter(reply.key[8:16] for reply in accepted(replies))
        ids = list(accepted_ones)
        totals = query(shared, "SELECT id, total FROM api_key WHERE id = ANY(%s)", ids)
        assert dict(totals) == accepted_ones
        charted = "SELECT key_id, sum(requests)::int FROM hourly_usage WHERE key_id = ANY(%s)"
        assert dict(query(shared, f"{charted} GROUP BY key_id", ids)) == accepted_ones

    def test_given_a_window_used_up_in_the_other_worker_then_it_is_used_up(
        self, shared: Server
    ) -> None:
        key = shared.new_key(tier="five")
        statuses = [ask(shared, TEST, key).status for _ in range(20)]  # over either worker

        assert statuses == [200] * 5 + [429] * 15

    def test_given_a_row_changed_by_hand_then_it_counts_within_two_seconds(
        self, shared: Server
    ) -> None:
        key = shared.new_key(tier="five")
        for _ in range(20):
            ask(shared, TEST, key)
        query(shared, "UPDATE api_key SET used = 4 WHERE id = %s", key[8:16])

        eventually(lambda: ask(shared, TEST, key).status == 200, 2)

    def test_given_two_workers_that_stop_then_no_count_is_lost(self, two: Server) -> None:
        key = two.new_key()
        with Load(two.port, key) as load:
            eventually(lambda: len(load.replies) > 200)
            status, seconds = two.stop()
            replies = load.stop()

        assert (status, seconds < 5) == (0, True)
        counted = sum(1 for _ in accepted(replies))
        lost = sum(reply.status == 0 for reply in replies)  # counted or not
        assert counted <= total_requests(two.restart(), key) <= counted + lost

    def test_given_kill_9_of_the_service_then_no_count_is_lost(self, two: Server) -> None:
        key = two.new_key()
        with Load(two.port, key) as load:
            eventually(lambda: len(load.replies) > 200)
            two.stop(signal.SIGKILL)
            replies = load.stop()

        counted = sum(1 for _ in accepted(replies))
        assert counted <= total_requests(two.restart(), key) <= counted + 16

    def test_given_more_fewer_and_new_workers_under_load_then_nothing_fails(
        self, two: Server
    ) -> None:
        key, before = two.new_key(), set(two.worker_pids)
        with Load(two.port, key, connections=4) as load:
            os.kill(two.pid, signal.SIGTTIN)
            eventually(lambda: len(two.worker_pids) == 3)
            os.kill(two.pid, signal.SIGTTOU)
            eventually(lambda: len(two.worker_pids) == 2, 10)
            os.kill(two.pid, signal.SIGHUP)
            eventually(lambda: not before & set(two.worker_pids), 10)
            eventually(lambda: len(two.worker_pids) == 2, 10)
            replies = load.stop()

        counted = sum(1 for _ in accepted(replies))
        assert {reply.status for reply in replies} <= {200, 0}
        # A connection that a worker closes may cut off a request that it has not read.
        assert total_requests(two, key) == counted


class TestChanges:
    def test_given_a_revoked_key_then_both_workers_refuse_it_within_two_seconds(
        self, shared: Server
    ) -> None:
        key = shared.new_key()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(RawSocket(shared.port)) for _ in range(12)]
            assert {client.request(TEST, X_API_Key=key).status for client in clients} == {200}
            shared.flask("key", "revoke", key[8:16])
            revoked = time.monotonic()
            while {client.request(TEST, X_API_Key=key).status for client in clients} != {401}:
                assert time.monotonic() - revoked < 2

    def test_given_a_revoked_key_then_time_sockets_of_both_workers_close_with_1008(
        self, shared: Server
    ) -> None:
        key = shared.new_key()
        with time_sockets(shared, key) as clients:
            shared.flask("key", "revoke", key[8:16])
            revoked = time.monotonic()
            assert {close_code(client) for client in clients} == {1008}
            assert time.monotonic() - revoked < 2

    def test_given_syncs_then_the_connections_of_views_stay_open(
        self, start_server: StartServer, database: str
    ) -> None:
        server = start_server(DATABASE_URL=database)
        key = server.new_key()
        others = "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        others += " AND pid <> pg_backend_pid() ORDER BY pid"

        def connections() -> list[Any]:
            assert ask(server, "/api/v1/user/me", key).status == 200
            return query(server, others)

        connections()
        time.sleep(0.6)  # the background connects at its first sync
        before = connections()
        time.sleep(1.2)  # two syncs; they leave no trace to wait for
        assert connections() == before

    def test_given_a_rotated_key_then_both_workers_end_it_when_the_grace_is_over(
        self, shared: Server
    ) -> None:
        key = shared.new_key()
        with time_sockets(shared, key) as clients:
            started = time.monotonic()
            successor = shared.flask("key", "rotate", key[8:16], "--grace", "5s").strip()
            printed = time.monotonic()
            assert {ask(shared, TEST, one).status for one in [key, successor] * 4} == {200}
            assert {close_code(client) for client in clients} == {1008}
            ended = time.monotonic()
            assert ended - started >= 4
            assert ended - printed <= 5 + 2  # on a busy machine the command takes its time
        assert {ask(shared, TEST, key).status for _ in range(8)} == {401}
        assert {ask(shared, TEST, successor).status for _ in range(8)} == {200}

    def test_given_another_tier_then_both_workers_know_it_within_two_seconds(
        self, shared: Server
    ) -> None:
        key = shared.new_key(tier="five")
        shared.flask("key", "tier", key[8:16], "free")
        changed = time.monotonic()
        while {ask(shared, TEST, key).headers["RateLimit-Policy"][:6] for _ in range(8)} != {
            '"free"'
        }:
            assert time.monotonic() - changed < 2

    def test_given_a_deleted_user_under_load_then_nobody_else_notices(self, two: Server) -> None:
        doomed = [two.new_key() for _ in range(3)]
        two.new_user("bystander")
        bystander = two.flask("key", "create", "bystander", "k", "--type", "production").strip()
        with Load(two.port, bystander, *doomed, rest=0.02) as load:
            eventually(lambda: len(load.replies) > 100)
            two.flask("user", "delete", "user0")
            eventually(lambda: 401 in load.statuses(), 2)
            replies = load.stop()

        assert {reply.status for reply in replies if reply.key == bystander} == {200}
        assert {reply.status for reply in replies} <= {200, 401, 429}
        assert not two.log_lines("unavailable")

    def test_given_40_keys_created_at_once_then_25_are(self, shared: Server) -> None:
        keen = Browser(shared).sign_up("keen")

        user = re.findall(r'name="form" value="([0-9]+)', keen.get("/settings/security")[1])[0]

        def create(number: int) -> int:
            fields = {"form": f"{user}.{number}", "name": f"key {number}", "type": "production"}
            status = keen.post("/settings/security/keys", **fields)[0]
            return create(number) if status == 503 else status  # a busy machine keeps it waiting

        with ThreadPoolExecutor(8) as threads:
            statuses = Counter(threads.map(create, range(40)))

        assert statuses == {200: 25, 422: 15}
        assert len(shared.flask("key", "list", "keen").splitlines()) == 25

    def test_given_a_taken_name_with_email_in_it_then_the_name_is_blamed(
        self, shared: Server
    ) -> None:
        Browser(shared).sign_up("email1")
        taken = {"username": "email1", "email": "other@example.com", "password": "x" * 10}
        status, page = Browser(shared).post("/sign-up", **taken)

        assert status == 422
        assert (
            page.index('name="username"') < page.index("already taken") < page.index('name="email"')
        )

    def test_given_nul_in_a_name_then_it_is_a_bad_request(self, shared: Server) -> None:
        status, _ = Browser(shared).post("/log-in", username="a\0b", password="x" * 10)

        assert status == 400

    def test_given_nul_in_a_key_then_it_is_a_bad_key(self, shared: Server) -> None:
        answer = ask(shared, TEST, "sk_live_\0")

        assert answer.status in (400, 401)
        assert ask(shared, f"{STATUS}?api_key=%00").status == 200

    def test_given_requests_then_the_chart_shows_them_and_drops_old_hours(
        self, shared: Server
    ) -> None:
        user = Browser(shared).sign_up("charted")
        key = shared.flask("key", "create", "charted", "k", "--type", "production").strip()
        insert = "INSERT INTO hourly_usage VALUES (%s, %s, 40)"
        hour = int(time.time()) // 3600 * 3600
        query(shared, insert, hour - 22 * 3600, key[8:16])
        query(shared, insert, hour - 26 * 3600, key[8:16])
        assert [ask(shared, TEST, key).status for _ in range(3)] == [200] * 3

        hours = "SELECT hour FROM hourly_usage WHERE requests = 40"
        eventually(lambda: query(shared, hours) == [(hour - 22 * 3600,)])
        assert "<strong>43</strong> requests" in user.get("/settings/security")[1]


@contextlib.contextmanager
def time_sockets(server: Server, key: str) -> Iterator[list[RawSocket]]:
    """So many of this key that each worker has some."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawSocket(server.port)) for _ in range(12)]
        for client in clients:
            client.open(f"{TIME}?api_key={key}")
        yield clients


def close_code(client: RawSocket) -> int:
    while (found := client.frame()).opcode != CLOSE:
        pass
    return found.close_code


def fast(cluster: Cluster) -> None:
    cluster.stop()
    time.sleep(1)
    cluster.start()


def at_once(cluster: Cluster) -> None:
    cluster.stop()
    cluster.start()


def killed(cluster: Cluster) -> None:
    cluster.kill()
    time.sleep(1)
    cluster.start()


def frozen(cluster: Cluster) -> None:
    cluster.freeze()
    time.sleep(2)
    cluster.thaw()


class TestOutage:
    @pytest.mark.parametrize("outage", [fast, at_once, killed, frozen])
    def test_given_an_outage_under_load_then_503_at_once_and_no_count_is_wrong(
        self, own_cluster: Cluster, start_server: StartServer, outage: object
    ) -> None:
        server = start_server(
            DATABASE_URL=own_cluster.new_database(), WEB_CONCURRENCY="2", RATE_LIMITS=LIMITS
        )
        key = server.new_key()
        with Load(server.port, key, rest=0.02) as load:
            eventually(lambda: len(load.replies) > 200)
            assert callable(outage)
            outage(own_cluster)
            back = time.monotonic()
            eventually(lambda: 200 in load.statuses(since=back), 3)
            lines = server.log_lines  # one each way of each worker that noticed
            eventually(lambda: len(lines("available again")) == len(lines("unavailable: ")))
            replies = load.stop()

        assert {reply.status for reply in replies} == {200, 503}
        assert max(reply.seconds for reply in replies) < 1
        counted = sum(1 for _ in accepted(replies))
        total = total_requests(server, key)
        if outage is frozen:  # a question given up may still have been counted
            assert counted <= total <= counted + 64
        elif outage is killed:
            last = max(r.started for r in accepted(replies) if r.started < back - 1)
            kept = sum(r.started < last - 1 or r.started > back for r in accepted(replies))
            assert kept <= total <= counted
        else:
            assert total == counted
        assert 1 <= len(server.log_lines("database unavailable")) <= 2
        assert own_cluster.password not in server.log()
        assert "Traceback" not in server.log()

    def test_given_a_restart_while_nobody_asks_then_it_is_not_noticed(
        self, own_cluster: Cluster, start_server: StartServer
    ) -> None:
        server = start_server(DATABASE_URL=own_cluster.new_database(), WEB_CONCURRENCY="2")
        key = server.new_key()
        assert {ask(server, TEST, key).status for _ in range(8)} == {200}
        own_cluster.stop()
        own_cluster.start()

        assert {ask(server, TEST, key).status for _ in range(8)} == {200}

    def test_given_no_database_then_public_answers_go_on_and_new_workers_serve(
        self, own_cluster: Cluster, start_server: StartServer
    ) -> None:
        server = start_server(DATABASE_URL=own_cluster.new_database(), WEB_CONCURRENCY="2")
        key, before = server.new_key(), server.worker_pids
        own_cluster.stop()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(set(server.worker_pids) - set(before)) == 2)

        assert ask(server, STATUS).status == 200
        answer = ask(server, TEST, key)
        assert (answer.status, answer.json()["code"]) == (503, "unavailable")
        own_cluster.start()
        eventually(lambda: ask(server, TEST, key).status == 200, 3)

    def test_given_no_database_then_the_stop_is_quick_and_nothing_is_said_to_be_lost(
        self, own_cluster: Cluster, start_server: StartServer
    ) -> None:
        server = start_server(DATABASE_URL=own_cluster.new_database(), WEB_CONCURRENCY="2")
        own_cluster.freeze()
        eventually(lambda: len(server.log_lines("database unavailable")) == 2, 15)
        status, seconds = server.stop()

        assert (status, seconds < 3) == (0, True)
        assert not server.log_lines("could not be saved")

    def test_given_a_row_that_is_locked_then_503_within_a_second(
        self, two: Server, database: str
    ) -> None:
        key = two.new_key()
        with connected(database) as other:
            other.execute("BEGIN")
            other.execute("SELECT * FROM api_key FOR UPDATE")
            started = time.monotonic()
            assert ask(two, TEST, key).status == 503
            assert time.monotonic() - started < 1
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            eventually(lambda: query(two, waiting) == [(0,)])
        eventually(lambda: ask(two, TEST, key).status == 200, 2)

    def test_given_a_table_that_is_locked_then_few_server_processes_pile_up(
        self, two: Server, database: str
    ) -> None:
        key = two.new_key()
        processes = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        with connected(database) as other, Load(two.port, key, rest=0.02) as load:
            other.execute("BEGIN")
            other.execute("LOCK TABLE api_key IN ACCESS EXCLUSIVE MODE")
            locked = time.monotonic()
            eventually(lambda: 503 in load.statuses(since=locked), 2)
            time.sleep(2)
            ((count,),) = other.execute(processes).fetchall()
            other.execute("ROLLBACK")
            free = time.monotonic()
            eventually(lambda: 200 in load.statuses(since=free), 3)
            replies = load.stop()

        assert max(reply.seconds for reply in replies) < 1
        assert count < 60


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A stopped service on SQLite, with two users, and keys in all states."""
    server = Server(tmp_path_factory.mktemp("used"), RATE_LIMITS=LIMITS).start()
    try:
        for name in ("ada", "eve"):
            server.new_user(name)
        for name, tier in (("ada", "free"), ("ada", "five"), ("eve", "free")):
            options = ["--type", "production", "--tier", tier]
            key = server.flask("key", "create", name, "k", *options)
            server.env[f"KEY_{name}_{tier}"] = key.strip()
        for _ in range(4):
            assert ask(server, TEST, server.env["KEY_ada_five"]).status == 200
        server.flask("key", "revoke", server.env["KEY_eve_free"][8:16])
        server.stop()
        yield server
    finally:
        server.close()


class TestCopy:
    """`flask db copy`: a SQLite file that a service has used, into PostgreSQL."""

    @pytest.fixture
    def used(self, stopped: Server, tmp_path: Path) -> Iterator[Server]:
        """Another service on a copy of its file."""
        server = Server(tmp_path / "used", RATE_LIMITS=LIMITS)
        server.env |= {name: key for name, key in stopped.env.items() if name.startswith("KEY_")}
        shutil.copy(stopped.database, server.database)
        with contextlib.closing(server):
            yield server

    def test_given_a_used_file_then_users_keys_and_counts_go_on(
        self, used: Server, database: str
    ) -> None:
        file = str(used.database)
        used.env["DATABASE_URL"] = database
        printed = used.flask("db", "copy", file)
        used.start()

        assert printed.splitlines() == ["user: 2 rows", "api_key: 3 rows", "hourly_usage: 1 rows"]
        key = used.env["KEY_ada_five"]
        stats = ask(used, STATS, key).json()
        assert (stats["total_requests"], stats["requests_remaining"]) == (5, 0)
        assert ask(used, TEST, key).status == 429
        assert ask(used, TEST, used.env["KEY_ada_free"]).status == 200
        assert ask(used, TEST, used.env["KEY_eve_free"]).status == 401
        used.new_user("next")  # with an id of its own
        assert len(used.flask("user", "list").splitlines()) == 3

    def test_given_a_target_with_data_then_one_line_and_nothing_is_copied(
        self, used: Server, database: str
    ) -> None:
        file = str(used.database)
        used.env["DATABASE_URL"] = database
        used.flask("db", "copy", file)
        done = copy_of(file, database)

        assert done.returncode != 0
        assert done.stderr == "Error: there is data in PostgreSQL already, in the table user\n"
        assert query(used, "SELECT count(*) FROM api_key") == [(3,)]

    def test_given_more_rows_than_a_batch_then_all_are_copied(
        self, used: Server, database: str
    ) -> None:
        rows = [(hour, "k" * 8, hour) for hour in range(copy.BATCH * 2 + 1)]
        with contextlib.closing(sqlite3.connect(used.database)) as file, file:
            file.execute("DELETE FROM hourly_usage")
            file.executemany("INSERT INTO hourly_usage VALUES (?, ?, ?)", rows)
        done = copy_of(str(used.database), database)

        assert done.stdout.splitlines()[-1] == f"hourly_usage: {len(rows)} rows"
        used.env["DATABASE_URL"] = database
        assert query(used, "SELECT * FROM hourly_usage ORDER BY hour") == rows

    def test_given_a_file_without_a_table_then_one_line_and_nothing_is_copied(
        self, used: Server, database: str
    ) -> None:
        with contextlib.closing(sqlite3.connect(used.database)) as file:
            file.execute("DROP TABLE hourly_usage")
        done = copy_of(str(used.database), database)

        assert done.stderr == f"Error: {used.database}: no such table: hourly_usage\n"
        used.env["DATABASE_URL"] = database
        assert query(used, 'SELECT count(*) FROM "user"') == [(0,)]

    @pytest.mark.parametrize("content", [b"", b"no database" * 1000])
    def test_given_another_file_then_one_line_and_nothing_is_copied(
        self, tmp_path: Path, database: str, content: bytes
    ) -> None:
        (tmp_path / "other").write_bytes(content)
        done = copy_of(str(tmp_path / "other"), database)

        assert done.returncode != 0
        assert done.stderr.startswith(f"Error: {tmp_path}/other: ")
        assert len(done.stderr.splitlines()) == 1

    def test_given_sqlite_as_the_target_then_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "from.db").touch()
        done = copy_of(str(tmp_path / "from.db"), f"sqlite:///{tmp_path}/to.db")

        assert "must be postgresql://" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def copy_of(file: str, url: str) -> "subprocess.CompletedProcess[str]":
    environment = clean_environment(DATABASE_URL=url)
    command = [sys.executable, "-m", "flask", "db", "copy", file]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)


class TestStart:
    def test_given_an_empty_database_then_many_may_start_at_once(self, database: str) -> None:
        environment = {**os.environ, "DATABASE_URL": database}
        command = [sys.executable, "-m", "flask", "user", "list"]
        starting = [
            subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE)
            for _ in range(4)
        ]
        errors = [process.communicate()[1] for process in starting]

        assert errors == [b""] * 4

    @pytest.mark.parametrize("options", ["", "?sslmode=disable", "?sslmode=prefer"])
    def test_given_the_other_scheme_and_sslmode_then_it_starts(
        self, start_server: StartServer, database: str, options: str
    ) -> None:
        url = database.replace("postgresql://", "postgres://") + options
        assert ask(start_server(DATABASE_URL=url), STATUS).status == 200

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (("demo:", "nobody:"), "password authentication failed"),
            (("127.0.0.1", "nowhere.invalid"), "nowhere.invalid"),
            (("/test_", "/absent_"), "does not exist"),
            (("/test_", "/test_%zz"), "must be"),
            (("@", "stray@sign@"), "must be"),
        ],
    )
    def test_given_a_wrong_url_then_one_line_without_the_password(
        self,
        cluster: Cluster,
        database: str,
        start_server: StartServer,
        change: tuple[str, str],
        reason: str,
    ) -> None:
        with pytest.raises(StartError) as refused:
            start_server(DATABASE_URL=database.replace(*change, 1), WEB_CONCURRENCY="2")

        (line,) = [line for line in refused.value.output.splitlines() if "[INFO]" not in line]
        assert line.startswith("DATABASE_URL")
        assert reason in line
        assert cluster.password not in line

    def test_given_sslmode_require_and_a_server_without_then_one_line(
        self, database: str, start_server: StartServer
    ) -> None:
        with pytest.raises(StartError, match=r"DATABASE_URL: PostgreSQL: .*SSL"):
            start_server(DATABASE_URL=f"{database}?sslmode=require")

    def test_given_no_server_then_one_line(self, start_server: StartServer) -> None:
        url = f"postgresql://demo:secret-word@127.0.0.1:{free_port()}/demo"
        with pytest.raises(StartError, match=r"DATABASE_URL: PostgreSQL: .*refused") as refused:
            start_server(DATABASE_URL=url, WEB_CONCURRENCY="3")

        assert "secret-word" not in refused.value.output
        assert "Traceback" not in refused.value.output

    def test_given_no_driver_then_one_line_names_it(
        self, start_server: StartServer, tmp_path: Path
    ) -> None:
        (tmp_path / "psycopg.py").write_text("raise ImportError")
        with pytest.raises(StartError, match=r"DATABASE_URL: PostgreSQL: .*psycopg\[binary\]"):
            start_server(DATABASE_URL="postgresql://h/d", PYTHONPATH=str(tmp_path))

    def test_given_a_running_service_then_no_process_list_shows_the_password(
        self, cluster: Cluster, shared: Server
    ) -> None:
        shared.new_key()
        lines = b""
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has just ended
                lines += file.read_bytes()

        assert b"gunicorn" in lines
        assert cluster.password.encode() not in lines
