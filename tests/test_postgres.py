"""PostgreSQL in place of SQLite: exact over two processes, and back by itself after an outage."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlencode

import pytest

from conftest import StartServer
from load import Load, accepted
from postgresql import Cluster, connected
from rawsocket import CLOSE, Answer, RawSocket
from serving import REPOSITORY, Server, StartError, eventually, free_port

TIME, STATS = "/api/v1/ws/time", "/api/v1/usage/stats"
TEST, STATUS = "/api/v1/protected/test", "/api/v1/status"


@pytest.fixture
def database(cluster: Cluster) -> str:
    """The URL of a new database on the server that always runs."""
    return cluster.new_database()


@pytest.fixture
def two(start_server: StartServer, database: str) -> Server:
    """A service of two workers."""
    return start_server(DATABASE_URL=database, WEB_CONCURRENCY="2", RATE_LIMITS=LIMITS)


LIMITS = "free=1000000/day,hourly=5000/hour,blink=50/second,five=5/day"


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A PostgreSQL server that the test may stop."""
    running = Cluster()
    try:
        yield running.start()
    finally:
        running.close()


def ask(server: Server, path: str, key: str = "", method: str = "GET") -> Answer:
    with RawSocket(server.port) as connection:
        return connection.request(path, method, X_API_Key=key)


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
        self, two: Server
    ) -> None:
        key = two.new_key(tier="hourly")
        away_from_the_turn(3600, margin=60)
        replies = Load(two.port, key, connections=64, requests=20_000).join()

        statuses = Counter(reply.status for reply in replies)
        assert statuses == {200: 5000, 429: 15_000}, two.log_lines("available")
        told = sorted(reply.remaining for reply in accepted(replies))
        assert told == list(range(5000))

    def test_given_counts_of_two_workers_then_both_tell_the_same_total(self, two: Server) -> None:
        key = two.new_key()
        replies = Load(two.port, key, connections=16, requests=1000).join()

        assert Counter(reply.status for reply in replies) == {200: 1000}
        totals = [total_requests(two, key) for _ in range(20)]  # each over a new connection
        assert totals == list(range(1000, 1020))

    def test_given_many_keys_and_short_windows_then_no_window_admits_more(
        self, two: Server
    ) -> None:
        keys = [two.new_key(tier="blink") for _ in range(8)]
        with Load(two.port, *keys, connections=32) as load:
            time.sleep(4)

        windows = Counter((reply.key, reply.reset) for reply in accepted(load.replies))
        told = Counter((r.key, r.reset, r.remaining) for r in accepted(load.replies))
        assert len(windows) > len(keys)  # windows have turned
        assert max(windows.values()) == 50
        assert max(told.values()) == 1

    def test_given_many_keys_then_each_total_is_the_number_of_its_answers(
        self, two: Server, database: str
    ) -> None:
        keys = [two.new_key() for _ in range(8)]
        replies = Load(two.port, *keys, connections=32, requests=2000).join()

        counted = dict(Cluster.query(database, "SELECT id, total FROM api_key"))
        assert counted == Counter(reply.key[8:16] for reply in accepted(replies))
        (charted,) = Cluster.query(database, "SELECT sum(requests) FROM hourly_usage")
        assert charted == (2000,)

    def test_given_a_window_used_up_in_the_other_worker_then_it_is_used_up(
        self, two: Server
    ) -> None:
        key = two.new_key(tier="five")
        statuses = [ask(two, TEST, key).status for _ in range(20)]  # over either worker

        assert statuses == [200] * 5 + [429] * 15

    def test_given_a_row_changed_by_hand_then_it_counts_within_two_seconds(
        self, two: Server, database: str
    ) -> None:
        key = two.new_key(tier="five")
        for _ in range(20):
            ask(two, TEST, key)
        Cluster.query(database, "UPDATE api_key SET used = 4")

        eventually(lambda: ask(two, TEST, key).status == 200, 2)

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
        self, two: Server
    ) -> None:
        key = two.new_key()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(RawSocket(two.port)) for _ in range(12)]
            assert {client.request(TEST, X_API_Key=key).status for client in clients} == {200}
            two.flask("key", "revoke", key[8:16])
            revoked = time.monotonic()
            while {client.request(TEST, X_API_Key=key).status for client in clients} != {401}:
                assert time.monotonic() - revoked < 2

    def test_given_a_revoked_key_then_time_sockets_of_both_workers_close_with_1008(
        self, two: Server
    ) -> None:
        key = two.new_key()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(RawSocket(two.port)) for _ in range(12)]
            for client in clients:
                client.open(f"{TIME}?api_key={key}")
            two.flask("key", "revoke", key[8:16])
            revoked = time.monotonic()
            assert {close_code(client) for client in clients} == {1008}
            assert time.monotonic() - revoked < 2

    def test_given_another_tier_then_both_workers_know_it_within_two_seconds(
        self, two: Server
    ) -> None:
        key = two.new_key(tier="five")
        two.flask("key", "tier", key[8:16], "free")
        changed = time.monotonic()
        while {ask(two, TEST, key).headers["RateLimit-Policy"][:6] for _ in range(8)} != {'"free"'}:
            assert time.monotonic() - changed < 2

    def test_given_a_deleted_user_under_load_then_nobody_else_notices(self, two: Server) -> None:
        doomed = [two.new_key() for _ in range(3)]
        two.new_user("bystander")
        bystander = two.flask("key", "create", "bystander", "k", "--type", "production").strip()
        with Load(two.port, bystander, *doomed) as load:
            eventually(lambda: len(load.replies) > 100)
            two.flask("user", "delete", "user0")
            eventually(lambda: 401 in load.statuses(), 2)
            replies = load.stop()

        assert {reply.status for reply in replies if reply.key == bystander} == {200}
        assert {reply.status for reply in replies} <= {200, 401, 429}
        assert not two.log_lines("unavailable")

    def test_given_40_keys_created_at_once_then_25_are(self, two: Server) -> None:
        ada = Browser(two).sign_up("ada")

        def create(number: int) -> int:
            fields = {"name": f"key {number}", "type": "production"}
            return ada.post("/settings/security/keys", **fields)[0]

        with ThreadPoolExecutor(8) as threads:
            statuses = Counter(threads.map(create, range(40)))

        assert statuses == {200: 25, 422: 15}
        assert len(two.flask("key", "list", "ada").splitlines()) == 25

    def test_given_a_taken_name_with_email_in_it_then_the_name_is_blamed(self, two: Server) -> None:
        Browser(two).sign_up("email1")
        taken = {"username": "email1", "email": "other@example.com", "password": "x" * 10}
        status, page = Browser(two).post("/sign-up", **taken)

        assert status == 422
        assert (
            page.index('name="username"') < page.index("already taken") < page.index('name="email"')
        )

    def test_given_nul_in_a_name_then_it_is_a_bad_request(self, two: Server) -> None:
        status, _ = Browser(two).post("/log-in", username="a\0b", password="x" * 10)

        assert status == 400
        assert not two.log_lines("unavailable")

    def test_given_nul_in_a_key_then_it_is_a_bad_key(self, two: Server) -> None:
        answer = ask(two, TEST, "sk_live_\0")

        assert answer.status in (400, 401)
        assert ask(two, f"{STATUS}?api_key=%00").status == 200

    def test_given_requests_then_the_chart_shows_them_and_drops_old_hours(
        self, two: Server, database: str
    ) -> None:
        ada = Browser(two).sign_up("ada")
        key = two.flask("key", "create", "ada", "k", "--type", "production").strip()
        insert = "INSERT INTO hourly_usage VALUES (%s, %s, 40)"
        hour = int(time.time()) // 3600 * 3600
        Cluster.query(database, insert, hour - 22 * 3600, key[8:16])
        Cluster.query(database, insert, hour - 26 * 3600, key[8:16])
        assert [ask(two, TEST, key).status for _ in range(3)] == [200] * 3

        hours = "SELECT hour FROM hourly_usage"
        eventually(lambda: (hour - 26 * 3600,) not in Cluster.query(database, hours))
        assert "<strong>43</strong> requests" in ada.get("/settings/security")[1]


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
        with Load(server.port, key) as load:
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
        eventually(lambda: len(server.log_lines("database unavailable")) == 2)
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
        eventually(lambda: ask(two, TEST, key).status == 200, 2)

    def test_given_a_table_that_is_locked_then_few_server_processes_pile_up(
        self, two: Server, database: str
    ) -> None:
        key = two.new_key()
        processes = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        with connected(database) as other, Load(two.port, key) as load:
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
        self, cluster: Cluster, two: Server
    ) -> None:
        two.new_key()
        lines = b""
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has just ended
                lines += file.read_bytes()

        assert b"gunicorn" in lines
        assert cluster.password.encode() not in lines
