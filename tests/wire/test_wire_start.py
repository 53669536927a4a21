"""Every command that starts the service leads to the same server, or says in one line why not."""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import StartServer, in_ci
from helpers.documents import blocks
from helpers.paths import ECHO, SECURITY, STATUS, TEST, TIME
from helpers.rawsocket import RawSocket, form_bytes, handshake_bytes
from helpers.server import (
    REPOSITORY,
    Server,
    StartError,
    bash,
    clean_environment,
    eventually,
    listens,
    random_key,
    serve_command,
    start_refusal,
)
from storage import sqlite

PYTHON = sys.executable
OPERATING = (REPOSITORY / "docs/operating.md").read_text()
BIND = "--bind 127.0.0.1:$PORT --bind unix:/tmp/demo-$PORT.sock"  # which needs a short path
UNSUPPORTED = "is not supported; docs/deploying.md lists what is"


@pytest.mark.parametrize(
    ("command", "stop"),
    [
        pytest.param(
            ["sh", "-c", f'cd / && exec "{PYTHON}" "{REPOSITORY}/app.py"'],
            signal.SIGINT,
            id="python /path/app.py",
        ),
        in_ci([PYTHON, "-m", "gunicorn"], signal.SIGTERM, id="gunicorn"),
        in_ci([PYTHON, "-m", "gunicorn", "app:app"], signal.SIGTERM, id="gunicorn app:app"),
        pytest.param(
            [
                *("sh", "-c", f'cd / && exec "$@" --config "{REPOSITORY}/gunicorn.conf.py" {BIND}'),
                "sh",
                *serve_command(),
                "--preload",
            ],
            signal.SIGQUIT,
            id="gunicorn -k gevent app:app --preload --bind unix:PATH --config PATH",
        ),
    ],
)
def test_every_command_leads_to_the_same_server(
    tmp_path: Path, command: list[str], stop: signal.Signals
) -> None:
    """It makes no user beside others, not even as the demo."""
    (tmp_path / "psycopg.py").write_text("raise ImportError")  # SQLite needs no driver
    server = Server(
        tmp_path,
        *command,
        GUNICORN_CMD_ARGS="--access-logfile -",
        PYTHONPATH=str(tmp_path),
        PROXY_HOPS="1",
    )
    key = server.new_key()
    with server, RawSocket(server.start().port) as stream:
        stream.open(f"{TIME}?api_key={key}")
        for expected in ("auth_success", "time_update", "time_update"):
            assert stream.frame().json()["type"] == expected
        assert server.ask(TEST, X_API_Key=key, X_Forwarded_For="203.0.113.7").status == 200
        for path in Path("/tmp").glob(f"demo-{server.port}.sock"):
            bash(f"curl -sSfm 20 --unix-socket {path} http://a{STATUS} http://a/log-in", tmp_path)
        assert server.send(f"GET {TIME}?api_key={key}\r\n\r\n".encode()).status == 400  # no version
        server.stop(stop)

    assert server.execute("SELECT total FROM api_key") == [(2,)], f"see STOPS: {stop} loses a count"
    assert server.stored == {"service.db"}
    assert "sk_live_" not in server.log()
    assert bool(server.log_lines("user: .venv/bin/flask")) == ("app.py" in str(command)), (
        "what only the demo says, where nobody is named demo"
    )
    assert re.search(
        rf'\d\] \[INFO\] 203.0.113.7 "GET {TEST}" 200 [1-9]\d+ \d\.\d+s\n', server.log()
    ), "an access log, with the addresses of clients and not of proxies, sizes and seconds"
    quoted, logged = (
        {*re.sub(r"(?<= of key )\w+|/\S+\.db|[\d.]+", "#", text).splitlines()}
        for text in ("".join(blocks("text", OPERATING)), server.log())
    )
    assert quoted <= logged or BIND in str(command), (
        f"edit The log in docs/operating.md, or what is logged: {quoted - logged}"
    )
    assert re.search(
        rf"closed {TIME} of key {key[8:16]} after [1-9]\d*\.\d s: 1001\n", server.log()
    ), "the seconds that it was open, and its code: see OpenSockets.handle, and STOPS"


@pytest.mark.parametrize(
    ("command", "settings", "words"),
    [
        in_ci("app.py", {"WEB_CONCURRENCY": "auto"}, "WEB_CONCURRENCY"),
        in_ci("-m gunicorn", {"DATABASE_URL": "sqlite:////no/such/folder/x.db"}, "DATABASE_URL"),
        ("-m gunicorn", {"SECRET_KEY": ""}, "SECRET_KEY .* python3 -c"),
        in_ci("-m flask user list", {"PORT": "http"}, "PORT"),
        (
            "app.py 8001",
            {},
            r"usage: \[PORT=8000\] .*\napp.py: error: unrecognized arguments: 8001",
        ),
        ("-m gunicorn app:app --daem", {}, f"gunicorn: --daemon {UNSUPPORTED}"),
        in_ci(
            "-m gunicorn -k gevent app:app",
            {"GUNICORN_CMD_ARGS": "--graceful-timeout=1"},
            f"gunicorn: --graceful-timeout {UNSUPPORTED}",
        ),
        in_ci("app.py", {"GUNICORN_CMD_ARGS": "--reload"}, f"gunicorn: --reload {UNSUPPORTED}"),
        (
            "-m gunicorn",
            {"GUNICORN_CMD_ARGS": "--workers 3"},
            "gunicorn: --workers must be 1 with SQLite",
        ),
        in_ci("-m gunicorn --workers 0", {}, "gunicorn: --workers must be 1 with SQLite"),
        in_ci(
            "-m gunicorn --workers 0",
            {"DATABASE_URL": "postgresql://localhost/demo"},
            "gunicorn: --workers must be .* at least 1 with PostgreSQL",
        ),
        in_ci("-m gunicorn -k sync", {}, "gunicorn: --worker-class must be gevent"),
        ("-m gunicorn app:create_app", {}, "gunicorn: .* the application app:app"),
    ],
)
def test_refused_start_is_one_line(
    tmp_path: Path, command: str, settings: dict[str, str], words: str
) -> None:
    assert re.match(words, start_refusal(command, tmp_path, **settings)), (
        f"the refusal has to begin with {words!r}; the other text is what it says"
    )


@pytest.mark.parametrize(
    "command",
    [
        "flask run --port $PORT",
        "gunicorn --config=/dev/null app:app",
        in_ci("gunicorn --config=/dev/null --preload --worker-class=gevent app:app"),
        in_ci("gunicorn --config=/dev/null --threads=2 'app:create_app()'"),
    ],
)
def test_other_servers_answer_only_which_command_to_run(tmp_path: Path, command: str) -> None:
    with Server(tmp_path, "sh", "-c", f'exec "{PYTHON}" -m {command}') as server:
        server.start(status=503)
        for path in ("/", TEST, "/static/app.css", "/nowhere"):
            answer = server.ask(path)
            assert (answer.status, answer.headers["Content-Type"], answer.json()["code"]) == (
                *(503, "application/problem+json"),
                "unavailable",
            ), f"{path} is served without our worker: see wsgi_app in service/application.py"
            assert "`.venv/bin/gunicorn`" in answer.json()["detail"]
        assert server.send(handshake_bytes(ECHO)).status == 503
    assert len(server.log_lines("run `.venv/bin/gunicorn`")) == 1


def test_supported_options_work_together(start_server: StartServer, tmp_path: Path) -> None:
    """Log files that were renamed are opened again at a SIGUSR1, if they can be opened."""
    pid, log, access, other = (tmp_path / name for name in ("pid", "log", "access", "other"))
    server = start_server(
        *serve_command(),
        *("--pid", str(pid), "--name", "demo", "--worker-tmp-dir", str(tmp_path), "--workers=1"),
        *("--error-logfile", str(log), "--access-logfile", str(access), "--log-level=warning"),
        "--preload",
    )
    assert pid.read_text() == f"{server.pid}\n"
    access.rename(other)
    os.kill(server.pid, signal.SIGUSR1)
    eventually(lambda: server.ask(STATUS) and access.exists() and STATUS in access.read_text())
    assert STATUS in other.read_text()
    server.ask(f"/{random_key()}")
    eventually(lambda: "/sk_live_[redacted]" in access.read_text())
    assert [
        server.send(each).status for each in (handshake_bytes(ECHO), b"no request\r\n\r\n")
    ] == [101, 400]
    assert re.fullmatch(
        r"\[20[\d-]{8} [\d:]{8} \+\d{4}\] \[\d+\] \[WARNING\] Invalid request .*\n", log.read_text()
    ), "one line, because others are less than warnings: see setup in server/log.py"
    log.rename(kept := tmp_path / "kept")
    log.mkdir()  # so that it can't be opened
    os.kill(server.pid, signal.SIGUSR1)
    eventually(lambda: kept.read_text().count(f"again: [Errno 21] Is a directory: '{log}'") == 2)
    assert server.ask(STATUS).status == 200
    assert server.log() == ""
    server.stop()


def test_tests_without_their_packages_are_one_line(tmp_path: Path) -> None:
    """As where only requirements.txt is installed."""
    without = tmp_path / "without.py"
    without.write_text(
        "import sys, pytest; sys.modules |= {'psycopg': None, 'websockets': None}\n"
        "sys.exit(pytest.main(['-p', 'no:randomly', '-p', 'no:xdist']))"
    )
    assert start_refusal(str(without), tmp_path) == (
        "Packages are missing: run .venv/bin/pip install -r requirements-dev.txt"
    )


@pytest.mark.parametrize(
    ("limits", "lines"),
    [
        ("ulimit -n 127", ["the limit on open files is below 128: run `ulimit -n 1024` as root"]),
        ("ulimit -n 128", ["worker_connections = 64"]),
        (
            "ulimit -n 1024; ulimit -Sn 256",
            ["worker_connections = 512", "http_parser = python", "backlog = 1024"],
        ),
    ],
)
def test_half_of_the_files_that_may_be_open_are_connections(limits: str, lines: list[str]) -> None:
    """So there is room for as many sockets as are admitted, and for requests."""
    shown = bash(
        f'({limits}; exec "{PYTHON}" -m gunicorn --print-config) 2>&1 || true',
        REPOSITORY,
        clean_environment(SECRET_KEY="sixteen in words"),
    )
    assert {*lines} <= {*re.sub(" +", " ", shown).splitlines()}, (
        "edit gunicorn.conf.py: worker_connections after load_settings; the strictest http_parser; "
        "as many new connections wait as `backlog` says"
    )


@pytest.mark.one_process("only SQLite needs it")
def test_start_declines_more_workers(start_server: StartServer) -> None:
    server = start_server(WEB_CONCURRENCY="3", WEB_CONCURENCY="3")
    worker = server.worker_pid
    assert listens("127.0.0.2", server.port), "on all addresses"
    assert len(server.log_lines("did you mean WEB_CONCURRENCY?")) == 1
    assert len(server.log_lines(f"Database: {server.database}")) == 1
    for number in (signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR2):
        os.kill(server.pid, number)
    server.handle_signals()
    assert server.worker_pid == worker
    # gunicorn's control socket would be one for all services of a user, in the user's home.
    assert not [path for path in Path(server.env["HOME"]).rglob("*") if path.is_socket()]


@pytest.mark.one_process("only SQLite needs it")
def test_second_service_on_the_same_file_is_refused(start_patched: StartServer) -> None:
    """Until the last process of the first one has ended; a command is not."""
    impatient = "from storage import sqlite; sqlite.PAUSES[3:] = []"
    first = start_patched(impatient)
    orphan = first.worker_pid
    (link := first.directory / "link.db").symlink_to(first.database)
    (kept := first.directory / "kept").hardlink_to(f"{first.database}-lock")
    assert first.flask("user", "list") == ""
    os.kill(orphan, signal.SIGSTOP)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    with pytest.raises(StartError, match="another service uses this file; stop") as refused:
        start_patched(impatient, DATABASE_URL=f"sqlite:///{link}")
    assert re.match(r"(?s)exit status 1:.*\nDATABASE_URL: [^\n]*\n$", str(refused.value))
    os.kill(orphan, signal.SIGCONT)
    eventually(lambda: not listens("127.0.0.1", first.port))
    start_patched(impatient, DATABASE_URL=f"sqlite:///{link}")  # which waits for an answer
    assert kept.stat().st_nlink == 2, (
        "the lock file stays, or two services can lock two files of this name"
    )


# `python app.py` is the demo: it makes a user and a key, and prints what to do with them


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Server]:
    """What `python app.py` starts, on a new database; it does not run yet."""
    with Server(tmp_path, sys.executable, "app.py", SECRET_KEY="", WEB_CONCURRENCY="") as server:
        yield server


def test_first_start_prints_what_works_and_the_second_no_secret(demo: Server) -> None:
    """Under a path prefix, which everything has."""
    demo.env["SCRIPT_NAME"] = "/below"
    demo.start()
    assert {demo.ask(path).status for path in (TEST, "/", "/belowlog-in")} == {404}
    (key,) = set(re.findall(r"sk_live_\w+", demo.log()))
    tested = demo.ask(f"/below{TEST}", X_API_Key=key)
    assert tested.json()["api_key_name"] == "demo"
    assert tested.headers["RateLimit"], "give is_api the path without the prefix"
    pasted = re.findall(r"(?m)^ *((?:export|curl) .*)", demo.log())
    assert len(pasted) == 6
    assert bash("\n".join(pasted).replace("curl ", "curl -sSf "), demo.directory).count("{") == 5
    (path,) = re.findall(rf'"ws://127.0.0.1:{demo.port}(.*)"', demo.log())
    with RawSocket(demo.port) as client:
        client.open(path.replace("$KEY", key))

    (password,) = re.findall(r"with the password (\S{16})\n", demo.log())  # printed once
    answer = demo.send(form_bytes("/below/log-in", username="demo", password=password))
    assert (answer.status, answer.headers["Location"]) == (303, f"/below{SECURITY}")
    assert "; Path=/below" in answer.headers["Set-Cookie"]
    assert f"Listening at: {demo.url} " in demo.log(), (
        "the demo is for this machine only: see main in server/demo.py; if nothing says where it "
        "listens, see open_again in server/log.py"
    )
    demo.stop()

    first = demo.log()
    os.kill(demo.start().worker_pid, signal.SIGKILL)
    assert demo.ask(f"/below{TEST}", X_API_Key=key).status == 200, "by the worker that replaces it"
    second = demo.log().removeprefix(first)
    assert "sk_live_" not in second
    assert second.count(" .venv/bin/flask user password demo, .venv/bin/flask key") == 1, (
        "once, by the first worker"
    )


@pytest.mark.parametrize("output", [in_ci(">&-"), ">/dev/full"])
def test_secret_that_cannot_be_printed_makes_no_user(demo: Server, output: str) -> None:
    demo.command = ["sh", "-c", f'exec "$@" {output}', "sh", *demo.command]
    demo.start()
    assert demo.log_lines("skipped the demo user: ")
    assert "sk_live_" not in demo.log()
    demo.stop()
    assert demo.execute("SELECT username FROM user") == []


@pytest.mark.parametrize(
    ("number", "moment", "status"),
    [
        in_ci(signal.SIGINT, "Listening at", 0),
        (signal.SIGTERM, "sk_live_", 0),
        in_ci(signal.SIGINT, "service.db')", -signal.SIGINT),  # while it waits for another service
    ],
)
def test_signal_during_the_start_stops_the_demo_in_order(
    demo: Server, number: signal.Signals, moment: str, status: int
) -> None:
    if status:
        sqlite.lock(demo.database)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(demo.start)
        eventually(lambda: moment in f"{demo.log()} {[*demo.database.parent.iterdir()]}", 30)
        os.kill(demo.pid, number)
        signalled = time.monotonic()
    assert demo.wait() == status, f"the status of a stop in a start; {demo.log()[-1000:]}"
    # gunicorn kills a worker that was just forked, and so missed the signal, or that takes 5 s.
    is_killed = moment == "Listening at" or time.monotonic() - signalled > 5
    assert status or is_killed or demo.stored == {"service.db"}


def test_taken_port_is_one_line_and_spends_no_secret(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert start_refusal("app.py", tmp_path, PORT=str(port)) == (
            f"PORT: {port} on 127.0.0.1: Address already in use; "
            f"is the service running already? If not, try PORT={port + 1}"
        )
    assert not (tmp_path / "demo.db").exists(), "the port is looked at before a file is made"
