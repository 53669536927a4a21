"""How the real server starts, refuses to start, stops and is killed."""

import contextlib
import fcntl
import http.client
import os
import pty
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest

import models
from conftest import StartPatched, StartServer
from load import Load, accepted
from rawsocket import RawSocket, handshake_bytes
from serving import (
    REPOSITORY,
    Server,
    StartError,
    clean_environment,
    eventually,
    free_port,
    serve_command,
)

ECHO, TIME = "/api/v1/ws/echo", "/api/v1/ws/time"
TEST, STATS = "/api/v1/protected/test", "/api/v1/usage/stats"


def ask(server: Server, path: str, key: str) -> int:
    """Make a request; returns its status."""
    with RawSocket(server.port) as connection:
        return connection.request(path, X_API_Key=key).status


def total_requests(server: Server, key: str) -> int:
    """What was counted for the key before this question."""
    with RawSocket(server.port) as connection:
        answer = connection.request(STATS, X_API_Key=key)
    total: int = answer.json()["total_requests"]
    return total - 1


class TestStop:
    @pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
    def test_everybody_is_told_and_nothing_is_lost(
        self, start_server: StartServer, how: signal.Signals
    ) -> None:
        server = start_server()
        key = server.new_key()
        stopping = threading.Thread(target=lambda: stopped.append(server.stop(how)))
        stopped: list[tuple[int, float]] = []
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(RawSocket(server.port)) for _ in range(50)]
            for number, client in enumerate(sockets):
                client.open(f"{TIME}?api_key={key}" if number % 2 else ECHO)
            idle, under_way, slow = (stack.enter_context(RawSocket(server.port)) for _ in range(3))
            assert idle.request(TEST, X_API_Key=key).status == 200
            slow.send(b"POST /log-in HTTP/1.1\r\nHost: a\r\nContent-Length: 8\r\n\r\nname")
            under_way.send(f"GET {TEST} HTTP/1.1\r\nHost: a\r\nX-API-Key: {key}\r\n".encode())

            started = time.monotonic()
            stopping.start()
            codes = [close_code(client) for client in sockets]
            told = time.monotonic() - started
            under_way.send(b"\r\n")
            answer = under_way.answer()
            time.sleep(max(0.0, started + 2.5 - time.monotonic()))  # a body may take its time
            slow.send(b"=ada")
            assert slow.answer().status < 500
            assert idle.ended()
            stopping.join()

        assert codes == [1001] * 50
        assert told < 1
        assert answer.status == 200
        assert answer.json()["success"] is True
        status, seconds = stopped[0]
        assert status == 0
        assert seconds < 5
        assert "Traceback" not in server.log()
        assert total_requests(server.restart(), key) == 25 + 2

    def test_counts_go_on_where_they_were(self, start_server: StartServer) -> None:
        server = start_server(RATE_LIMITS="free=5/day")
        key = server.new_key()
        assert [ask(server, TEST, key) for _ in range(3)] == [200] * 3

        server.stop()
        server.restart()

        assert [ask(server, TEST, key) for _ in range(3)] == [200, 200, 429]

    def test_nobody_is_let_in_while_leaving(self, start_server: StartServer) -> None:
        server = start_server()
        with RawSocket(server.port) as client, RawSocket(server.port) as late:
            client.open(ECHO)
            assert late.request("/api/v1/status").status == 200
            request = handshake_bytes(ECHO)
            late.send(request[:20])
            os.kill(server.pid, signal.SIGTERM)
            assert close_code(client) == 1001

            late.send(request[20:])
            answer = late.answer()

        assert (answer.status, answer.json()["code"]) == (503, "too_many_sockets")
        assert int(answer.headers["Retry-After"]) >= 1

    def test_who_waits_at_the_door_is_still_served(self, start_server: StartServer) -> None:
        server = start_server()
        worker = server.worker_pid
        os.kill(worker, signal.SIGSTOP)
        with contextlib.ExitStack() as stack:
            waiting = [stack.enter_context(RawSocket(server.port)) for _ in range(20)]
            for client in waiting:
                client.send(b"GET /api/v1/status HTTP/1.1\r\nHost: a\r\n\r\n")
            os.kill(server.pid, signal.SIGTERM)
            eventually(lambda: server.log_lines("Handling signal: term"))
            time.sleep(1)  # so that the worker is woken by its own timer, too
            os.kill(worker, signal.SIGCONT)
            assert {client.answer().status for client in waiting} == {200}

    def test_an_idle_connection_is_closed_in_good_order(self, start_server: StartServer) -> None:
        server = start_server()
        with RawSocket(server.port) as idle:
            assert idle.request("/api/v1/status").status == 200
            status, seconds = server.stop()
            assert idle.ended()

        assert status == 0
        assert seconds < 4  # at 4 gunicorn would have lost its patience

    def test_a_client_that_answers_no_close_delays_nothing(self, start_server: StartServer) -> None:
        server = start_server()
        with RawSocket(server.port, receive_buffer=4096) as deaf:
            deaf.open(ECHO)
            status, seconds = server.stop()

        assert status == 0
        assert seconds < 5

    def test_counts_are_saved_though_the_database_is_locked(
        self, start_server: StartServer
    ) -> None:
        server = start_server()
        key = server.new_key()
        another = sqlite3.connect(server.database, isolation_level=None, check_same_thread=False)
        with contextlib.closing(another):
            another.execute("BEGIN IMMEDIATE")
            assert [ask(server, TEST, key) for _ in range(3)] == [200] * 3
            unlocking = threading.Timer(1, another.execute, ["ROLLBACK"])
            unlocking.start()
            assert server.stop()[0] == 0
            unlocking.join()
        server.restart()

        assert total_requests(server, key) == 3

    def test_a_worker_that_boots_hears_the_signal_too(self, start_server: StartServer) -> None:
        server = start_server()
        os.kill(server.worker_pid, signal.SIGKILL)
        eventually(lambda: len(server.log_lines("Booting worker")) == 2)
        os.kill(server.worker_pid, signal.SIGTERM)
        eventually(lambda: len(server.log_lines("Booting worker")) == 3)

    def test_kill_under_load_loses_a_second_at_most(self, start_server: StartServer) -> None:
        server = start_server(RATE_LIMITS="free=1000000/day")
        key = server.new_key()
        answered: list[float] = []
        load = threading.Thread(target=ask_until_gone, args=(server, key, answered))
        load.start()
        eventually(lambda: len(answered) > 100 and answered[-1] - answered[0] > 1.5, 10)
        server.stop(signal.SIGKILL)
        load.join()

        with contextlib.closing(sqlite3.connect(server.database)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        server.restart()
        assert len(server.flask("user", "list").splitlines()) == 1
        counted = total_requests(server, key)
        saved_at_least = sum(moment < answered[-1] - 1 for moment in answered)
        assert saved_at_least <= counted <= len(answered) + 1


def close_code(client: RawSocket) -> int:
    """The code with which the server closes, after whatever else it still says."""
    while True:
        found = client.frame()
        if found.opcode == 8:
            return found.close_code


def ask_until_gone(server: Server, key: str, answered: list[float]) -> None:
    connection = server.connection()
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        while True:
            connection.request("GET", TEST, headers={"X-API-Key": key})
            assert connection.getresponse().read()
            answered.append(time.monotonic())


class TestOneFile:
    @pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
    def test_after_a_stop_everything_is_in_one_file(
        self, start_server: StartServer, tmp_path: Path, how: signal.Signals
    ) -> None:
        server = start_server()
        key = server.new_key()
        assert [ask(server, TEST, key) for _ in range(3)] == [200] * 3
        with RawSocket(server.port) as client:
            client.open(f"{TIME}?api_key={key}")
            assert server.stop(how)[0] == 0

        assert [file.name for file in server.database.parent.iterdir()] == [server.database.name]
        copy = shutil.copy(server.database, tmp_path / "copy.db")
        with contextlib.closing(sqlite3.connect(copy)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert database.execute("SELECT id, total FROM api_key").fetchall() == [(key[8:16], 4)]
            assert database.execute('SELECT count(*) FROM "user"').fetchall() == [(1,)]
            assert database.execute("SELECT sum(requests) FROM hourly_usage").fetchall() == [(4,)]

    @pytest.mark.parametrize("put_back", [shutil.move, shutil.copyfile])
    def test_a_file_put_back_while_keys_are_used_counts_within_two_seconds(
        self, start_server: StartServer, tmp_path: Path, put_back: Callable[[Path, Path], object]
    ) -> None:
        server = start_server()
        old, backup = server.new_key(), tmp_path / "backup.db"
        with (
            contextlib.closing(sqlite3.connect(server.database)) as source,
            contextlib.closing(sqlite3.connect(backup)) as target,
        ):
            source.backup(target)
        new = server.new_key()
        journal = Path(f"{server.database}-wal")
        eventually(lambda: not journal.exists() or journal.stat().st_size == 0)
        assert [ask(server, TEST, key) for key in (old, new)] == [200] * 2

        put_back(backup, server.database)
        eventually(lambda: ask(server, TEST, new) == 401, 2)
        eventually(lambda: ask(server, TEST, old) == 200, 1)
        assert server.stop()[0] == 0
        assert ask(server.restart(), TEST, old) == 200


class TestHangUp:
    """SIGHUP comes from a terminal that is closed, to the group, or from `kill`, to the master."""

    def test_signal_to_the_group_saves_and_stops(self, start_server: StartServer) -> None:
        server = start_server()
        key = server.new_key()
        assert [ask(server, TEST, key) for _ in range(5)] == [200] * 5
        with RawSocket(server.port) as client:
            client.open(ECHO)
            os.killpg(server.pid, signal.SIGHUP)
            assert close_code(client) == 1001
        assert server.wait() == 0

        assert [file.name for file in server.database.parent.iterdir()] == [server.database.name]
        assert total_requests(server.restart(), key) == 5

    @pytest.mark.parametrize("command", ["exec {python} app.py", "{python} app.py; exit $?"])
    def test_closed_terminal_saves_stops_and_frees_the_port(
        self, tmp_path: Path, command: str
    ) -> None:
        """The service alone on its terminal, as with `ssh -t`, or as the job of a shell."""
        port, database = free_port(), tmp_path / "demo.db"
        environment = clean_environment(PORT=str(port), DATABASE_URL=f"sqlite:///{database}")
        with on_terminal(command.format(python=sys.executable), environment) as terminal:
            output = b""
            while b"Booting worker" not in output:
                output += os.read(terminal, 10_000)
            key = re.findall(rb"sk_live_\w+", output)[0].decode()
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as c:
                for _ in range(7):
                    c.request("GET", TEST, headers={"X-API-Key": key})
                    assert c.getresponse().read().startswith(b'{"success":true')
                os.close(terminal)
                eventually(lambda: is_free(port))

            def is_saved_in_one_file() -> bool:
                with contextlib.closing(sqlite3.connect(database)) as rows:
                    total = rows.execute("SELECT total FROM api_key").fetchall()
                return (total, [*tmp_path.glob("demo.db*")]) == ([(7,)], [database])

            eventually(is_saved_in_one_file)

    def test_service_started_with_nohup_stays(
        self, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command = ["nohup", *serve_command()]
        monkeypatch.setattr("serving.serve_command", lambda: command)
        server = start_server()
        worker = server.worker_pid
        os.killpg(server.pid, signal.SIGHUP)
        time.sleep(0.5)  # a signal that is ignored leaves no trace
        assert ask(server, TEST, "") == 401
        assert server.worker_pid == worker
        assert server.stop()[0] == 0

    def test_signal_to_the_master_reloads_with_exact_totals(
        self, start_server: StartServer
    ) -> None:
        server = start_server(RATE_LIMITS="free=1000000/day")
        key = server.new_key()
        with Load(server.port, key, connections=4) as load:
            for _ in range(3):
                reload(server)
                wait_for_more(load)

        answered = len(list(accepted(load.replies)))
        assert total_requests(server, key) == answered
        assert server.stop()[0] == 0
        assert total_requests(server.restart(), key) == answered + 1
        assert "Traceback" not in server.log()


def take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def on_terminal(command: str, environment: dict[str, str]) -> Iterator[int]:
    """Run a shell on a terminal of its own; yields the end where its output is read."""
    terminal, its_end = pty.openpty()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=REPOSITORY,
        env=environment,
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(its_end)
    try:
        yield terminal
        process.wait(timeout=10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def is_free(port: int) -> bool:
    with socket.socket() as sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        return True
    return False


def reload(server: Server) -> None:
    """Reload, and wait until only the new worker is left."""
    before = server.worker_pid
    os.kill(server.pid, signal.SIGHUP)
    eventually(lambda: server.worker_pids and before not in server.worker_pids, 10)


def wait_for_more(load: Load) -> None:
    before = len(load.replies)
    eventually(lambda: len(load.replies) > before + 50)


@pytest.mark.one_process("only SQLite has a thread for saving")
class TestThreads:
    def test_thread_that_cannot_start_ends_no_saving_and_counts_nothing_twice(
        self, start_patched: StartPatched, tmp_path: Path
    ) -> None:
        flag = tmp_path / "no-threads"
        flag.touch()
        server = start_patched(NO_THREADS.format(flag=str(flag)))
        key = server.new_key()
        assert [ask(server, TEST, key) for _ in range(3)] == [200] * 3
        eventually(lambda: server.log_lines("can't start new thread"))
        flag.unlink()
        eventually(lambda: server.log_lines("available again"))
        server.flask("key", "revoke", key[8:16])
        eventually(lambda: ask(server, TEST, key) == 401, 2)
        server.stop()

        with contextlib.closing(sqlite3.connect(server.database)) as database:
            assert database.execute("SELECT total FROM api_key").fetchall() == [(3,)]
            assert database.execute("SELECT sum(requests) FROM hourly_usage").fetchall() == [(3,)]
        assert "Traceback" not in server.log()


NO_THREADS = """
import os
from gevent import threadpool

def start_new_thread(*args, start=threadpool.start_new_thread):
    if os.path.exists({flag!r}):
        raise RuntimeError("can't start new thread")
    return start(*args)

threadpool.start_new_thread = start_new_thread
"""


@pytest.mark.one_process("only SQLite needs it")
class TestOneWorker:
    def test_a_platforms_wish_for_more_is_declined_in_one_line(
        self, start_server: StartServer
    ) -> None:
        server = start_server(WEB_CONCURRENCY="3")

        assert server.worker_pid
        assert len(server.log_lines("WEB_CONCURRENCY")) == 1

    @pytest.mark.parametrize("wish", ["--workers 3", "--worker-class sync", "-k gevent"])
    def test_a_command_line_that_wants_others_stops_the_start(
        self, start_server: StartServer, wish: str
    ) -> None:
        with pytest.raises(StartError) as refused:
            start_server(GUNICORN_CMD_ARGS=wish)

        assert refused.value.status != 0
        assert refused.value.output.splitlines()[-1].startswith("--worker-class cannot be set")
        assert "Traceback" not in refused.value.output

    def test_a_reload_gives_nobody_a_second_allowance(self, start_server: StartServer) -> None:
        server = start_server(RATE_LIMITS="free=2000/day")
        key, before = server.new_key(), server.worker_pid
        assert ask(server, TEST, key) == 200
        with ThreadPoolExecutor(4) as threads:
            spending = [threads.submit(spend, server, key) for _ in range(4)]
            os.kill(server.pid, signal.SIGHUP)
            accepted = 1 + sum(spent.result() for spent in spending)

        assert accepted == 2000
        assert server.worker_pid != before

    def test_two_services_of_one_user_share_nothing(self, server: Server) -> None:
        """gunicorn's control socket would be one for both, in the user's home."""
        assert not [path for path in Path(server.env["HOME"]).rglob("*") if path.is_socket()]

    def test_the_start_says_what_is_served(self, start_server: StartServer) -> None:
        server = start_server(RATE_LIMITS="free=7/hour,pro=70/day", DYNO="web.1")

        (line,) = server.log_lines("serving ")
        assert f":{server.port}" in line
        assert str(server.database) in line
        assert "free 7" in line
        assert "pro 70" in line
        assert len(server.log_lines("platforms lose ")) == 1


def spend(server: Server, key: str) -> int:
    """Ask until the allowance is used up, whatever happens meanwhile; returns how often it was."""
    accepted = 0
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            status = ask(server, TEST, key)
            if status == 429:
                return accepted
            accepted += status == 200


class TestMistakes:
    @pytest.mark.parametrize(
        ("variable", "wrong"),
        [
            ("PORT", "eighty"),
            ("DATABASE_URL", "oracle://db"),
            ("DATABASE_URL", "sqlite:////no/such/directory/x.db"),
            ("DATABASE_URL", "sqlite:////etc"),
            ("SECRET_KEY", ""),
            ("RATE_LIMITS", "free=lots"),
            ("MAX_SOCKETS", "-1"),
            ("MAX_SOCKETS_PER_CALLER", "many"),
            ("SIGNUPS", "maybe"),
            ("PROXY_HOPS", "x"),
            ("WEB_CONCURRENCY", "0"),
        ],
    )
    def test_a_wrong_value_stops_the_start_with_one_line(
        self, start_server: StartServer, variable: str, wrong: str
    ) -> None:
        with pytest.raises(StartError) as refused:
            start_server(**{variable: wrong})

        assert refused.value.status != 0
        assert variable in one_line(refused.value.output)

    def test_a_database_that_is_none_stops_the_start(
        self, start_server: StartServer, tmp_path: Path
    ) -> None:
        (tmp_path / "letter.txt").write_text("Dear reader, " * 100)
        with pytest.raises(StartError) as refused:
            start_server(DATABASE_URL=f"sqlite:///{tmp_path}/letter.txt")

        assert refused.value.status != 0
        assert "Traceback" not in refused.value.output
        assert refused.value.output.count("DATABASE_URL") == 1

    def test_a_missing_secret_says_how_to_make_one(self, start_server: StartServer) -> None:
        with pytest.raises(StartError) as refused:
            start_server(SECRET_KEY="")

        assert "python3 -c" in one_line(refused.value.output)

    def test_the_command_line_tool_says_it_in_one_line_too(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "flask", "user", "list"]
        environment = clean_environment(DATABASE_URL=f"sqlite:///{tmp_path}/x.db", PORT="eighty")
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True
        )

        assert done.returncode != 0
        assert "PORT" in one_line(done.stderr)


def one_line(output: str) -> str:
    (line,) = output.strip().splitlines()
    return line


class TestDemo:
    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        """The service in a directory of its own, where it may make its database."""
        copy = tmp_path / "copy"
        unwanted = shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks", "*.db*")
        return Path(shutil.copytree(REPOSITORY, copy, ignore=unwanted))

    @pytest.fixture
    def environment(self) -> dict[str, str]:
        return clean_environment(PORT=str(free_port()))

    def test_the_first_start_prints_a_key_that_works_and_the_second_none(
        self, copy: Path, environment: dict[str, str]
    ) -> None:
        with demo(copy, environment) as output:
            (key,) = set(re.findall(r"sk_live_\w+", output.read_text()))
            assert curl_lines_answer(output.read_text())
        assert "Traceback" not in output.read_text()

        with demo(copy, environment) as output:
            assert not any(prefix in output.read_text() for prefix in models.PREFIXES.values())
            connection = http.client.HTTPConnection("127.0.0.1", int(environment["PORT"]))
            with contextlib.closing(connection):
                connection.request("GET", TEST, headers={"X-API-Key": key})
                assert connection.getresponse().status == 200

    def test_it_is_reachable_from_this_machine_only(
        self, copy: Path, environment: dict[str, str]
    ) -> None:
        with demo(copy, environment) as output:
            (line,) = [line for line in output.read_text().splitlines() if "serving " in line]

        assert f"http://127.0.0.1:{environment['PORT']}," in line

    def test_an_empty_variable_is_not_set(self, copy: Path, environment: dict[str, str]) -> None:
        """gunicorn itself reads WEB_CONCURRENCY, and fails if it is empty."""
        with demo(copy, {**environment, "WEB_CONCURRENCY": ""}):
            pass

    @pytest.mark.parametrize("variable", ["MAX_SOCKETS", "WEB_CONCURRENCY"])
    def test_a_wrong_setting_is_one_line(
        self, copy: Path, environment: dict[str, str], variable: str
    ) -> None:
        done = subprocess.run(
            [sys.executable, "app.py"],
            cwd=copy,
            env={**environment, variable: "auto"},
            capture_output=True,
            text=True,
        )

        assert done.returncode != 0
        assert variable in one_line(done.stdout + done.stderr)


@contextlib.contextmanager
def demo(copy: Path, environment: dict[str, str]) -> Iterator[Path]:
    """`python app.py`, until it serves and then to the end of the block."""
    output = copy / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "app.py"], cwd=copy, env=environment, stdout=file, stderr=file
        )
    try:
        eventually(lambda: "Booting worker" in output.read_text(), 15)
        yield output
    finally:
        process.terminate()
        assert process.wait(timeout=20) == 0


def curl_lines_answer(welcome: str) -> bool:
    """Run every plain `curl` line of the welcome, as somebody would who pastes it."""
    lines = [line.strip() for line in welcome.splitlines() if line.strip().startswith("curl ")]
    plain = [line for line in lines if not line.endswith("\\")]
    assert len(plain) == 5
    for line in plain:
        done = subprocess.run(
            ["bash", "-c", line.replace("curl ", "curl -sSf --retry 5 --retry-connrefused ", 1)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout.startswith("{")
    return True


class TestSecrecy:
    def test_nobody_can_forge_a_line_of_the_log(self, start_server: StartServer) -> None:
        server = start_server(GUNICORN_CMD_ARGS="--access-logfile -")
        ask(server, "/api/v1/%0d%0a%1b[2K%0b%c2%85%e2%80%a8forged", "")
        eventually(lambda: server.log_lines("forged"))

        (line,) = server.log_lines("forged")
        assert "GET /api/v1/" in line
        assert line.isprintable()

    def test_a_key_is_in_no_log_and_no_file(self, start_server: StartServer) -> None:
        server = start_server(GUNICORN_CMD_ARGS="--access-logfile -", RATE_LIMITS="free=4/day")
        key, revoked = server.new_key(), server.new_key()
        server.flask("key", "revoke", revoked[8:16])
        escaped = "".join(f"%{ord(character):02X}" for character in key)
        half = "".join(c if random.random() < 0.5 else f"%{ord(c):02x}" for c in key)
        for text in (key, revoked, escaped, half, quote(key)):
            for raw in everywhere(text):
                with RawSocket(server.port) as client, contextlib.suppress(OSError):
                    client.send(raw)
                    client.answer()
        server.stop()

        files = [path for path in server.directory.rglob("*") if path.is_file()]
        assert server.database in files
        assert '"GET /api/v1/protected/test" 429' in server.log()
        for path in files:
            content = path.read_bytes()
            for text in (key, revoked, escaped, half):
                assert text.encode() not in content, (path, text)
                assert text[17:].encode() not in content, (path, text)
        assert key[17:-6] not in server.log()


def everywhere(key: str) -> Iterator[bytes]:
    """Requests with the key in every place where a client might put it, right or wrong."""
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    upgrade += "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    for request in (
        f"GET {TEST} HTTP/1.1\r\nHost: a\r\nX-API-Key: {key}\r\n\r\n",
        f"GET {TEST} HTTP/1.1\r\nHost: a\r\nX-API-Key: {key}x\r\n\r\n",
        f"GET {TEST}?api_key={key} HTTP/1.1\r\nHost: a\r\n\r\n",
        f"GET {TEST}?api_key={key} HTTP/1.1\r\nHost: a\r\nReferer: http://a/?api_key={key}\r\n\r\n",
        f"GET {TEST} HTTP/1.1\r\nHost: a\r\nUser-Agent: {key}\r\n\r\n",
        f"GET /api/v1/nothing?api_key={key} HTTP/1.1\r\nHost: a\r\n\r\n",
        f"GET {TIME}?api_key={key} HTTP/1.1\r\nHost: a\r\n\r\n",
        f"GET {TIME}?api_key={key} HTTP/1.1\r\nHost: a\r\n{upgrade}\r\n",
        f"GET {TIME}?api_key={key}x HTTP/1.1\r\nHost: a\r\n{upgrade}\r\n",
        f"GET {TIME}?api_key={key} HTTP/1.0\r\nHost: a\r\n{upgrade}\r\n",
        f"GET {TIME}?api_key={key} nonsense\r\n\r\n",
        f"G@T {TIME}?api_key={key} HTTP/1.1\r\n\r\n",
        f"GET {TIME}?api_key={key}&a=b HTTP/9.9\r\n\r\n",
        f"GET {TEST} HTTP/1.1\r\nHost: a\r\nX-API-Key {key}\r\n\r\n",
        f"GET {TEST} HTTP/1.1\r\nHost: a\r\nX-API-Key : {key}\r\n\r\n",
        f"GET {TEST} HTTP/1.1\r\nHost: a\r\n{key}: x\r\n\r\n",
        f"GET {TEST} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: {key}\r\n\r\n",
        f"GET {TEST} HTTP/1.1\r\nHost: a\r\nContent-Length: {key}\r\n\r\n",
        f"{key}\r\n\r\n",
        f"{key} {TEST} HTTP/1.1\r\n\r\n",
        f"GET /{key} HTTP/1.1\r\nHost: a\r\n\r\n",
        f"GET /api/v1/{key} HTTP/1.1\r\nHost: a\r\n\r\n",
        f"GET {TEST} {key}\r\nHost: a\r\n\r\n",
        f"GET {TIME}?x=1&API_KEY={key} HTTP/1.1\r\nHost: {key}\r\n\r\n",
        f"GET {TIME}?api%5Fkey={key} x y\r\nHost: a\r\n\r\n",
    ):
        yield request.encode()
