"""The real server beside a database that is locked, slow or away."""

import fcntl
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import pytest

from conftest import StartServer
from load import Load, accepted, refused
from paths import ME, PROFILE, STATUS, TEST, TIME
from postgresql import Cluster, Network, connected
from rawsocket import RawSocket
from serving import REPOSITORY, eventually, patience, writing


class TestSqlite:
    def test_lock_by_another_process_loses_nothing(self, start_server: StartServer) -> None:
        """A page waits for it, and nobody else; what was revoked by hand, or its socket, ends."""
        server = start_server(RATE_LIMITS="free=1000000/day")
        key, revoked = server.new_key(), server.new_key()
        with RawSocket(server.port) as stream, ThreadPoolExecutor(1) as thread:
            stream.open(f"{TIME}?api_key={revoked}")
            server.execute("UPDATE api_key SET revoked_at = 1 WHERE id = ?", revoked[8:16])
            with writing(str(server.database), "BEGIN IMMEDIATE"):
                with Load(server.port, key, connections=1) as load:
                    assert server.sign_up("early").status == 503
                    page = thread.submit(server.sign_up, "late")
                    eventually(lambda: len(load.replies) > 100)
                assert server.ask(TEST, X_API_Key=revoked).status == 401
                assert stream.close_code() == 1008
            assert page.result().status == 303
        assert load.statuses() == {200}
        total = [(len(load.replies),)]
        query = "SELECT total FROM api_key WHERE revoked_at IS NULL"
        eventually(lambda: server.execute(query) == total, patience(2))
        # A wait for the lock would come back at each sync; a pause of the machine hits one or two.
        assert sorted(reply.seconds for reply in load.replies)[-3] < patience(0.1)
        assert len(server.log_lines("database unavailable")) == 1

    def test_moved_file_loses_nothing(self, start_server: StartServer, tmp_path: Path) -> None:
        """Before the first request, and later; its name has what a URI would take apart."""
        file, away = tmp_path / "50%20 of a?b=c#d.db", tmp_path / "away"
        server, key = start_server(DATABASE_URL=f"sqlite:///{file}", WEB_CONCURRENCY="1"), ""
        for name in ("ada", "bob"):
            file.rename(away)
            if key:
                assert server.ask(TEST, X_API_Key=key).status == 200
            assert server.ask(f"/log-in?as={name}").status == 200
            assert server.sign_up(f"{name}-away").status in (303, 503)
            command = server.start_flask("key", "list")
            error = command.communicate(timeout=20)[1]
            assert (command.returncode, error.count("\n"), file.exists()) == (1, 1, False)
            assert f"{file}: the file is missing, but {file.name}-wal is there: put" in error
            eventually(lambda: server.log_lines("database unavailable"))
            away.rename(file)
            assert server.sign_up(name).status == 303
            key = key or server.flask("key", "create", name, "test").strip()
            assert server.ask(TEST, X_API_Key=key).status == 200
        assert server.stop()[0] == 0
        assert {path.name for path in tmp_path.glob("*.db*")} == {file.name, f"{file.name}-lock"}
        with closing(sqlite3.connect(file)) as whole:
            assert whole.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert whole.execute("SELECT total FROM api_key").fetchall() == [(3,)]
            names = {name for (name,) in whole.execute("SELECT username FROM user")}
            assert names >= {"ada", "bob"}

    @pytest.mark.parametrize("ends", [True, False])
    def test_stop_waits_for_a_lock(self, start_server: StartServer, ends: bool) -> None:
        server = start_server()
        keys = [server.new_key() for _ in range(2)]
        with ThreadPoolExecutor(1) as thread:
            with writing(str(server.database), "BEGIN IMMEDIATE"):
                answers = [server.ask(TEST, X_API_Key=key).status for key in keys * 2]
                stopping = thread.submit(server.stop)
                wait([stopping], timeout=0.5 if ends else None)
            status, seconds = stopping.result()
        assert (answers, status, seconds < patience(5)) == ([200] * 4, 0, True)
        lost = server.log_lines("the last 4 requests of 2 keys could not be saved")
        assert len(lost) == (0 if ends else 1)
        assert server.start().total(keys[0]) == (2 if ends else 0)


class TestEither:
    """With SQLite, and with PostgreSQL under --postgres."""

    def test_limit_is_exact_over_64_connections(self, start_server: StartServer) -> None:
        """Over two processes with PostgreSQL; each number of requests left is told once."""
        server = start_server(RATE_LIMITS="free=5000/day")
        replies = Load(server.port, server.new_key(), connections=64, requests=6000).join()
        assert {reply.status for reply in replies} == {200, 429}
        assert sorted(reply.remaining for reply in accepted(replies)) == list(range(5000))

    def test_missing_table_is_503_until_it_is_back(self, start_server: StartServer) -> None:
        server = start_server()
        key = server.new_key()
        server.execute("ALTER TABLE api_key RENAME TO gone")
        answer = server.ask(TEST, X_API_Key=key)
        assert (answer.status, answer.json()["code"]) == (503, "unavailable")
        assert server.ask(STATUS).status == 200
        server.execute("ALTER TABLE gone RENAME TO api_key")
        eventually(lambda: server.ask(TEST, X_API_Key=key).status == 200)
        eventually(lambda: server.log_lines("database available again"))

    def test_key_that_nobody_reads_is_revoked(self, start_server: StartServer) -> None:
        server = start_server()
        key = server.new_key()
        reader, writer = os.pipe()
        os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)))  # it takes nothing more
        process = server.start_flask("key", "rotate", key[8:16], stdout=writer)
        os.close(writer)
        eventually(lambda: server.execute("SELECT 1 FROM api_key WHERE rotated_at IS NULL"), 15)
        assert server.ask(TEST, X_API_Key=key).status == 200
        server.flask("key", "tier", key[8:16], "pro")
        os.close(reader)
        _, error = process.communicate(timeout=15)
        assert (process.returncode, error.count("\n")) == (1, 1)
        assert "the key cannot be printed, so it was revoked" in error
        successor = "SELECT revoked_at > 0 FROM api_key WHERE rotated_at IS NULL"
        assert server.execute(successor) == [(True,)]

    def test_new_column_is_one_line(self, start_server: StartServer, tmp_path: Path) -> None:
        """Beside an open write: the new version waits, but nobody waits for it."""
        server, newer = start_server(), tmp_path / "newer"
        last = 'used = BigIntegerField(default=0, constraints=[SQL("DEFAULT 0")])'
        held, key = [server.new_key(tier="pro") for _ in range(2)]
        shutil.copytree(REPOSITORY, newer, ignore=shutil.ignore_patterns(".*", "tests", "*.db*"))
        lines = (
            "colour = CharField(default='0', constraints=[SQL('DEFAULT 0')])",
            "place = BigIntegerField(null=True, index=True)",
        )
        models = (newer / "models.py").read_text().replace(last, "\n    ".join([last, *lines]))
        (newer / "models.py").write_text(models)
        change = f"UPDATE api_key SET name = 'new' WHERE id = '{held[8:16]}'"
        with writing(server.env["DATABASE_URL"], change):
            command = server.start_flask("user", "list", cwd=newer)
            with Load(server.port, key, connections=1, requests=9000) as load:
                server.flask("user", "list")  # by then the other command waits, too
                eventually(lambda: command.poll() is None and len(load.replies) > 300, 30)
        assert (command.communicate(timeout=20)[1], load.statuses()) == ("", {200})
        new = server.flask("key", "create", "user0", "by the version before")
        assert server.ask(TEST, X_API_Key=new.strip()).status == 200
        assert set(server.execute("SELECT colour, place FROM api_key")) == {("0", None)}
        assert not server.log_lines("Traceback")


@pytest.mark.postgres
class TestPostgres:
    @pytest.fixture
    def own(self) -> Iterator[Cluster]:
        """A server that the test may stop."""
        with closing(Cluster()) as cluster:
            yield cluster.start()

    @pytest.mark.parametrize("outage", ["stop", "kill", "freeze"])
    def test_outage_under_load_is_503_within_a_second_and_no_count_is_wrong(
        self, own: Cluster, start_server: StartServer, outage: str
    ) -> None:
        server = start_server(DATABASE_URL=own.new_database(), RATE_LIMITS="free=1000000/day")
        key = server.new_key()
        with Load(server.port, key, rest=0.02) as load:
            eventually(lambda: len(load.replies) > 200)
            began = time.monotonic()
            getattr(own, outage)()
            eventually(lambda: refused(load.replies) > 100)
            own.thaw() if outage == "freeze" else own.start()
            back = time.monotonic()
            eventually(lambda: load.statuses(max(back, time.monotonic() - 0.5)) == {200}, 5)
            replies = load.stop()

        assert {reply.status for reply in replies} == {200, 503}
        # Not all of them: a pause of the machine hits whoever is waiting.
        assert median(reply.seconds for reply in replies if reply.status == 503) < patience(1)
        counted, total = len(accepted(replies)), server.total(key)
        if outage == "kill":  # a commit does not wait for the disk: its last second may be lost
            lost = [r for r in accepted(replies) if began - 1.2 < r.started < back]
            assert counted - len(lost) <= total <= counted
        else:  # what was given up may have been counted
            assert counted <= total <= counted + (64 if outage == "freeze" else 0)
        assert 1 <= len(server.log_lines("database unavailable")) <= 2
        eventually(lambda: server.log_lines("database available again"))
        assert own.password not in server.log()
        assert "Traceback" not in server.log()

    def test_pages_wait_for_a_connection_while_others_get_answers(
        self, own: Cluster, start_server: StartServer
    ) -> None:
        """A user who asks for more at once than can be answered in time makes no page a 503."""
        server = start_server(DATABASE_URL=own.new_database(), WEB_CONCURRENCY="1")
        cookie, key = server.sign_up("flood").headers["Set-Cookie"], server.new_key()
        server.execute('ALTER TABLE "user" RENAME TO stored')
        slow = "pg_sleep(0.15) IS NOT NULL"
        server.execute(f'CREATE VIEW "user" AS SELECT * FROM stored WHERE {slow}')

        def timed(path: str) -> tuple[int, float]:
            started = time.monotonic()
            status = server.ask(path, Cookie=cookie, X_API_Key=key).status
            return status, time.monotonic() - started

        pages, me = [PROFILE] * 32, ME
        with ThreadPoolExecutor(len(pages) + 1) as threads:
            assert {status for status, _ in threads.map(timed, [*pages, me])} == {200}
            assert not server.log_lines("database unavailable")
            own.freeze()
            (_, seconds), *_ = answers = list(threads.map(timed, [me, *pages]))
            assert {status for status, _ in answers} == {503}
            assert seconds < patience(1)
        own.thaw()
        eventually(lambda: timed(pages[0])[0] == timed(me)[0] == 200)

    def test_workers_start_without_a_server(self, own: Cluster, start_server: StartServer) -> None:
        server = start_server(DATABASE_URL=own.new_database())
        key, before = server.new_key(), server.worker_pids
        own.stop()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(set(server.worker_pids) - set(before)) == 2)
        assert server.ask(STATUS).status == 200
        assert server.ask(TEST, X_API_Key=key).status == 503
        own.start()
        eventually(lambda: server.ask(TEST, X_API_Key=key).status == 200)
        own.freeze()
        eventually(lambda: len(server.log_lines("database unavailable")) >= 2, 15)
        status, seconds = server.stop()
        assert (status, seconds < patience(5)) == (0, True)
        assert len(server.log_lines("could not be saved")) <= 1, "at most that of the chart"

    @pytest.mark.parametrize("old_primary", ["is read-only", "is silent"])
    def test_after_a_failover_all_use_the_new_primary(
        self, own: Cluster, start_server: StartServer, old_primary: str
    ) -> None:
        url = own.new_database()
        with closing(Cluster(primary=own)) as standby, ExitStack() as stack:
            standby.start()
            both = url.replace(f":{own.port}/", f":{own.port},127.0.0.1:{standby.port}/")
            server = start_server(DATABASE_URL=both)
            key, other = server.new_key(), server.new_key()
            client = stack.enter_context(RawSocket(server.port))
            client.open(f"{TIME}?api_key={other}")
            assert server.sign_up("before").status == 303
            copy, users = standby.url(url.rpartition("/")[2]), 'SELECT count(*) FROM "user"'
            eventually(lambda: Cluster.query(copy, users) == [(2,)])
            if old_primary == "is silent":
                own.freeze()
            else:  # also for those who are connected
                own.query(own.url(), "ALTER SYSTEM SET default_transaction_read_only = on")
                own.query(own.url(), "SELECT pg_reload_conf()")
            standby.query(standby.url(), "SELECT pg_promote()")
            began = time.monotonic()
            eventually(lambda: server.ask(TEST, X_API_Key=key).status == 200)
            eventually(lambda: server.sign_up(f"a{time.monotonic_ns()}").status == 303)
            assert time.monotonic() - began < patience(5)
            began = time.monotonic()
            server.flask("key", "revoke", other[8:16])
            assert time.monotonic() - began < patience(15)
            began = time.monotonic()
            assert client.close_code() == 1008
            assert time.monotonic() - began < patience(2)
            if old_primary == "is silent":
                own.thaw()
        assert "Traceback" not in server.log()

    def test_command_on_a_dead_network(self, cluster: Cluster, start_server: StartServer) -> None:
        server = start_server(DATABASE_URL=cluster.new_database())
        server.new_key()
        with ExitStack() as stack:
            commands = []
            for word in (b"", b"BEGIN", b"COMMIT"):
                network = stack.enter_context(closing(Network(cluster)))
                network.die(word)
                url = network.url(server.env["DATABASE_URL"])
                env = server.env | {"DATABASE_URL": url}
                commands.append(server.start_flask("key", "create", "user0", "ci", env=env))
            for command in commands:
                printed, error = command.communicate(timeout=30)
                assert (command.returncode, printed, error.count("\n")) == (1, "", 1), error
                assert "DATABASE_URL" in error
            assert "COMMIT was not answered, so the change may have been stored" in error

    def test_pages_on_a_dead_network_are_503(
        self, cluster: Cluster, start_server: StartServer
    ) -> None:
        direct, network = cluster.new_database(), Network(cluster)
        with ExitStack() as stack:
            stack.enter_context(closing(network))
            server = start_server(DATABASE_URL=network.url(direct))
            client = stack.enter_context(RawSocket(server.port))
            threads = stack.enter_context(ThreadPoolExecutor(6))
            client.open(f"{TIME}?api_key={server.new_key()}")
            assert server.sign_up("before").status == 303
            for word in (b"BEGIN", b"INSERT", b"COMMIT"):
                network.die(word)
                names = [f"{word.decode().lower()}{number}" for number in range(2)]
                began = time.monotonic()
                assert [page.status for page in threads.map(server.sign_up, names)] == [503, 503]
                assert time.monotonic() - began < patience(2.5), word
                network.heal()
            Cluster.query(direct, "UPDATE api_key SET revoked_at = 1")
            ended = time.monotonic()
            assert client.close_code() == 1008
            assert time.monotonic() - ended < patience(2)
            assert server.sign_up("after").status == 303
        assert "Traceback" not in server.log()

    def test_locked_keys_fail_alone(self, cluster: Cluster, start_server: StartServer) -> None:
        """25 of them, all asked for, as while a user is being deleted at psql."""
        url = cluster.new_database()
        server = start_server(DATABASE_URL=url, RATE_LIMITS="free=1000000/day")
        free, *held = [server.new_key() for _ in range(26)]
        with connected(url) as other, Load(server.port, *held, free, rest=0.02) as load:
            eventually(lambda: len(load.replies) > 500)
            other.execute("BEGIN")
            other.execute(f"SELECT * FROM api_key WHERE id <> '{free[8:16]}' FOR UPDATE")
            locked = time.monotonic()
            eventually(lambda: refused(load.replies) > 3000, 30)
            unlocked = time.monotonic()
            other.execute("ROLLBACK")
            eventually(lambda: load.statuses(max(unlocked, time.monotonic() - 0.5)) == {200})
            replies = load.stop()
        assert {reply.status for reply in replies if reply.key == free} == {200}
        during = [reply for reply in replies if locked < reply.started < unlocked - 1]
        waits = sorted(reply.seconds for reply in during if reply.key == free)
        assert waits[len(waits) * 99 // 100] < patience(0.3)
        assert {reply.status for reply in during if reply.key != free} == {503}
        assert max(reply.seconds for reply in replies) < patience(1)
