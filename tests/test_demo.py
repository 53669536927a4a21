"""Every command that starts the service leads to the same server; `python app.py` is the demo."""

import ast
import contextlib
import os
import re
import runpy
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from conftest import StartServer
from rawsocket import RawSocket, form_bytes
from serving import (
    REPOSITORY,
    Server,
    StartError,
    clean_environment,
    eventually,
    free_port,
    patience,
    serve_command,
)
from settings import PLATFORM_HOPS

PYTHON = sys.executable
TEST, TIME = "/api/v1/protected/test", "/api/v1/ws/time"
Demo = Callable[[], Server]
KEY = re.compile(r"sk_live_\w+")
ELSEWHERE = ["sh", "-c", 'cd / && exec "$@"', "sh"]
in_ci = partial(pytest.param, marks=pytest.mark.ci)  # each of them starts a server, or tries to


@pytest.mark.parametrize(
    "command",
    [
        in_ci([*ELSEWHERE, PYTHON, str(REPOSITORY / "app.py")], id="python /path/app.py"),
        in_ci([PYTHON, "-m", "gunicorn"], id="gunicorn"),
        in_ci([PYTHON, "-m", "gunicorn", "app:app"], id="gunicorn app:app"),
        pytest.param([*serve_command(), "--preload"], id="gunicorn -k gevent app:app --preload"),
    ],
)
def test_every_command_leads_to_the_same_server(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "psycopg.py").write_text("raise ImportError")  # SQLite needs no driver
    settings = {"GUNICORN_CMD_ARGS": "--access-logfile -", "PYTHONPATH": str(tmp_path)}
    server = Server(tmp_path, *command, **settings)
    key = server.new_key()
    with contextlib.closing(server), RawSocket(server.start().port) as stream:
        stream.open(f"{TIME}?api_key={key}")
        assert [stream.frame().json()["type"] for _ in range(2)] == ["auth_success", "time_update"]
        assert server.ask(TEST, X_API_Key=key).status == 200
        without_version = f"GET {TIME}?api_key={key}\r\n\r\n".encode()
        assert server.send(without_version).status == 400
        status, seconds = server.stop()

    assert (status, seconds < patience(5)) == (0, True)
    assert server.execute("SELECT total FROM api_key") == [(2,)]
    assert [path.name for path in server.database.parent.iterdir()] == [server.database.name]
    assert "Traceback" not in server.log()
    assert key not in server.log()
    assert f'"GET {TEST}" 200' in server.log(), "an access log"
    assert "api_key=[redacted]" in server.log(), "gunicorn's quote of what it cannot parse"


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[[], Server]]:
    """Makes servers that `python app.py` starts, on the same new database."""
    with contextlib.ExitStack() as running:

        def make() -> Server:
            shared = {"DATABASE_URL": f"sqlite:///{tmp_path}/demo.db", "SECRET_KEY": ""}
            directory, settings = tmp_path / secrets.token_hex(4), {"WEB_CONCURRENCY": ""} | shared
            server = Server(directory, PYTHON, "app.py", **settings)
            running.callback(server.close)
            return server

        yield make


def test_first_start_prints_what_works_and_the_second_no_secret(demo: Demo) -> None:
    server = demo().start()
    lines = [line.strip() for line in server.log().splitlines()]
    (key,) = set(KEY.findall(server.log()))
    assert server.ask(TEST, X_API_Key=key).json()["api_key_name"] == "demo"
    pasted = [line for line in lines if line.startswith(("export ", "curl "))]
    assert len(pasted) == 6
    typed = "\n".join(pasted).replace("curl ", "curl -sSf ")
    done = subprocess.run(["sh", "-ec", typed], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.count("{")) == (0, "", 5)
    (socket,) = re.findall(rf'"ws://127.0.0.1:{server.port}(.*)"', server.log())
    with RawSocket(server.port) as client:
        client.open(socket.replace("$KEY", key))

    password = re.findall(r"user: demo    password: (\S{16})\n", server.log())[0]
    answer = server.send(form_bytes("/log-in", username="demo", password=password))
    assert (answer.status, answer.headers["Location"]) == (303, "/settings/security")
    assert f"Listening at: {server.url} " in server.log(), "for this machine only"
    assert server.stop()[0] == 0

    again = demo().start()
    assert "sk_live_" not in again.log()
    create, change = re.findall(r": \.venv/bin/flask (.*)", again.log())
    assert KEY.fullmatch(again.flask(*create.split()).rstrip())
    again.flask(*change.split(), "--password-stdin", input="a new password\n")
    answer = again.send(form_bytes("/log-in", username="demo", password="a new password"))
    assert answer.status == 303


def test_two_first_starts_at_once_print_one_key(demo: Demo) -> None:
    """Each serves on its own port, or says in one line why not."""
    servers, refused = [demo(), demo()], []
    with ThreadPoolExecutor(2) as threads:
        for starting in [threads.submit(server.start) for server in servers]:
            try:
                starting.result()
            except StartError as error:
                refused.append([line for line in error.output.splitlines() if "[INFO]" not in line])
    printed = [key for server in servers for key in set(KEY.findall(server.log()))]
    assert len(printed) == 1
    assert servers[0].execute("SELECT username FROM user") == [("demo",)]
    assert not [server.log() for server in servers if "Traceback" in server.log()]
    assert all(len(lines) == 1 for lines in refused)


@pytest.mark.parametrize("output", [in_ci(">&-"), ">/dev/full"])
def test_secret_that_cannot_be_printed_makes_no_user(demo: Demo, output: str) -> None:
    server = demo()
    server.command = ["sh", "-c", f'exec "$@" {output}', "sh", *server.command]
    server.start()
    assert server.log_lines("the demo's user and key were not created: ")
    assert "sk_live_" not in server.log()
    assert server.stop()[0] == 0
    assert server.execute("SELECT username FROM user") == []


@pytest.mark.parametrize("number", [in_ci(signal.SIGINT), signal.SIGTERM])
@pytest.mark.parametrize("moment", [in_ci("Listening at"), "sk_live_"])
def test_signal_during_the_start_stops_the_demo_in_order(
    demo: Demo, tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    server = demo()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(server.start)
        eventually(lambda: server.log_lines(moment), 30)
        os.kill(server.pid, number)
    assert server.wait() == 0
    assert "Traceback" not in server.log()
    # A worker that has only just been forked hears no signal, and is killed.
    assert moment == "Listening at" or len([*tmp_path.glob("demo.db*")]) == 1


def refusal(command: str, directory: Path, **settings: str) -> str:
    """The one line with which `python ...` fails; it prints nothing else."""
    defaults = {"DATABASE_URL": f"sqlite:///{directory}/demo.db", "PORT": str(free_port())}
    done = subprocess.run(
        [PYTHON, *command.split()],
        cwd=REPOSITORY,
        env=clean_environment(**defaults | settings),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode not in (0, None), done
    assert (done.stdout, done.stderr.count("\n")) == ("", 1), done
    return done.stderr.rstrip("\n")


def test_taken_port_is_one_line_and_spends_no_secret(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refusal("app.py", tmp_path, PORT=str(port))
    reason = f"PORT: {port} on 127.0.0.1: Address already in use"
    assert message == f"{reason}; try PORT={port + 1}"
    assert not (tmp_path / "demo.db").exists()


@pytest.mark.parametrize("variable", ["DYNO", *map(in_ci, PLATFORM_HOPS.keys() - {"DYNO"})])
def test_demo_on_a_platform_is_refused(tmp_path: Path, variable: str) -> None:
    message = refusal("app.py", tmp_path, **{variable: "anything"})
    assert message.startswith(f"{variable} is set: on a platform, start `gunicorn`")
    assert not (tmp_path / "demo.db").exists()


@pytest.mark.parametrize(
    ("command", "variable", "value"),
    [
        ("app.py", "WEB_CONCURRENCY", "auto"),
        ("-m gunicorn", "DATABASE_URL", "sqlite:////no/such/directory/x.db"),
        ("-m gunicorn", "SECRET_KEY", ""),
        ("-m flask user list", "PORT", "http"),
    ],
)
def test_wrong_setting_is_one_line(tmp_path: Path, command: str, variable: str, value: str) -> None:
    settings = {"SECRET_KEY": secrets.token_hex()} | {variable: value}
    message = refusal(command, tmp_path, **settings)
    assert message.startswith(variable)
    assert variable != "SECRET_KEY" or value or "python3 -c" in message


def test_packages_that_are_not_installed_are_one_line(tmp_path: Path) -> None:
    """-S leaves out what pip has installed."""
    message = refusal("-S app.py", tmp_path)
    assert message == "Packages are missing: run the command of README's Quickstart."


def test_older_python_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ast.parse((REPOSITORY / "app.py").read_text(), feature_version=(3, 8))
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=r"^Python 3.10 or later is needed; this is 3.9\.$"):
        runpy.run_path(str(REPOSITORY / "app.py"))


def test_few_open_files_are_one_line(start_server: StartServer) -> None:
    line = "127 open files are too few: run `ulimit -n 1024` as root"
    with pytest.raises(StartError, match=f"^exit status 1:\n{line}\n$"):
        start_server("sh", "-c", 'ulimit -n 127; exec "$@"', "sh", *serve_command())


def test_flask_run_is_one_line_that_says_what_to_run(tmp_path: Path) -> None:
    assert "python app.py" in refusal("-m flask run", tmp_path)
