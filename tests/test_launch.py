"""Every command that starts the service leads to the same server; `python app.py` is the demo."""

import contextlib
import re
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from rawsocket import RawSocket
from serving import (
    REPOSITORY,
    Server,
    StartError,
    clean_environment,
    eventually,
    free_port,
    listens,
)
from settings import PLATFORM_HOPS

PYTHON = sys.executable
APP = str(REPOSITORY / "app.py")
TEST, TIME = "/api/v1/protected/test", "/api/v1/ws/time"
KEY = re.compile(r"sk_live_\w+")


class Launched(Server):
    """A server that is started by some command, from some folder."""

    def __init__(self, directory: Path, *command: str, **settings: str) -> None:
        super().__init__(directory, **settings)
        self.command = [word.replace("PORT", str(self.port)) for word in command]
        self.cwd = directory if APP in command else REPOSITORY

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()

    def _spawn(self, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        with (self.directory / "output").open("wb") as output:
            return subprocess.Popen(
                self.command,
                cwd=self.cwd,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                start_new_session=True,
            )


def refusal(*command: str, **settings: str) -> str:
    """The one line with which a command fails; it prints nothing else."""
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=clean_environment(**settings),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode not in (0, None), done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.rstrip("\n")


def users(file: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return [name for (name,) in connection.execute("SELECT username FROM user")]


# One server, whatever is typed

FLASK = [PYTHON, "-m", "flask"]
COMMANDS: dict[str, list[str]] = {  # PORT stands for the server's port
    "python /path/app.py": [PYTHON, APP],
    "flask run": [*FLASK, "run"],
    "flask --app app run": [*FLASK, "--app", "app", "run", "--host=127.0.0.1", "--port=PORT"],
    "flask --app /path/app.py run": [*FLASK, "--app", APP, "run", "-h", "localhost", "-p", "PORT"],
    "gunicorn": [PYTHON, "-m", "gunicorn"],
    "gunicorn app:app": [PYTHON, "-m", "gunicorn", "app:app"],
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A database with a user, and the key of this user."""
    server = Server(tmp_path_factory.mktemp("prepared"))
    return server.database, server.new_key()


class Run(NamedTuple):
    """What was seen of a server from its start to its stop."""

    key: str
    messages: list[str]  # types of the first two of a time socket
    status: int
    seconds: float
    log: str
    files: dict[str, int]  # the database's, with their modes
    database: Path


@pytest.fixture(scope="module", params=COMMANDS.values(), ids=list(COMMANDS))
def run(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    prepared: tuple[Path, str],
) -> Iterator[Run]:
    command, (database, key) = request.param, prepared
    directory = tmp_path_factory.mktemp("launch")
    settings = {"GUNICORN_CMD_ARGS": "--access-logfile -"}
    if command[-1].endswith("PORT"):
        settings["PORT"] = "1"  # the option wins
    server = Launched(directory, *command, **settings)
    shutil.copy(database, server.database)
    with contextlib.closing(server):
        server.start()
        with RawSocket(server.port) as stream:
            stream.open(f"{TIME}?api_key={key}")
            messages = [stream.frame().json()["type"] for _ in range(2)]
            with RawSocket(server.port) as client:
                assert client.request(TEST, X_API_Key=key).status == 200
                assert client.request(f"{TIME}?api_key={key}").status == 426
            with RawSocket(server.port) as client:
                client.send(f"GET {TIME}?api_key={key}\r\n\r\n".encode())  # no version
                assert client.answer().status == 400
            status, seconds = server.stop(signal.SIGTERM)
        folder = server.database.parent
        files = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        log = server.log() + server.output
        yield Run(key, messages, status, seconds, log, files, server.database)


def test_every_command_leads_to_our_worker(run: Run) -> None:
    assert "Using worker: Worker" in run.log
    assert "Traceback" not in run.log


def test_no_command_prints_a_key_where_there_are_users(run: Run) -> None:
    assert "sk_live_" not in run.log.replace("sk_live_[redacted]", "")
    assert "password" not in run.log


def test_every_command_streams_the_time(run: Run) -> None:
    assert run.messages == ["auth_success", "time_update"]


def test_every_command_saves_the_counts(run: Run) -> None:
    """One for the time socket, one for the request."""
    with contextlib.closing(sqlite3.connect(run.database)) as connection:
        query = "SELECT total FROM api_key WHERE id = ?"
        assert connection.execute(query, (run.key[8:16],)).fetchall() == [(2,)]


def test_every_command_logs_no_key(run: Run) -> None:
    assert run.key not in run.log
    assert f'"GET {TIME}" 426' in run.log, "an access log without queries"
    assert "api_key=[redacted]" in run.log, "gunicorn's quote of what it cannot parse"


def test_every_command_stops_in_order(run: Run) -> None:
    assert run.status == 0
    assert run.seconds < 5


def test_every_command_leaves_one_complete_database(run: Run) -> None:
    assert run.files == {run.database.name: 0o600}
    with contextlib.closing(sqlite3.connect(run.database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# The demo


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts servers with `python app.py` on the same new database."""
    with contextlib.ExitStack() as running:

        def make(start: bool = True) -> Launched:
            directory = tmp_path / secrets.token_hex(4)
            shared = {"DATABASE_URL": f"sqlite:///{tmp_path}/demo.db", "SECRET_KEY": ""}
            server = Launched(directory, PYTHON, "app.py", **shared)
            running.callback(server.close)
            if start:
                server.start()
            return server

        yield make


def test_first_start_prints_a_key_that_works(demo: Callable[..., Launched]) -> None:
    server = demo()
    (key,) = set(KEY.findall(server.output))
    with RawSocket(server.port) as client:
        assert client.request(TEST, X_API_Key=key).json()["api_key_name"] == "demo"
    assert f"curl {server.url}/api/v1/demo/year\n" in server.output


def test_first_start_prints_the_password_of_the_demo_user(
    demo: Callable[..., Launched], tmp_path: Path
) -> None:
    server = demo()
    password = re.findall(r"user: demo    password: (\S{16})\n", server.output)[0]
    connection = server.connection()
    connection.request(
        "POST",
        "/log-in",
        body=f"username=demo&password={password}",
        headers={"Content-Type": "application/x-www-form-urlencoded"},
    )
    answer = connection.getresponse()
    connection.close()
    assert (answer.status, answer.headers["Location"]) == (303, "/settings/security")


def test_second_start_prints_no_secret(demo: Callable[..., Launched], tmp_path: Path) -> None:
    server = demo()
    server.stop()
    again = demo()
    assert again.output == ""
    assert users(tmp_path / "demo.db") == ["demo"]


def test_demo_is_for_this_machine_only(demo: Callable[..., Launched]) -> None:
    server = demo()
    assert f"Listening at: {server.url} " in server.log()


def test_two_first_starts_at_once_print_one_key(
    demo: Callable[..., Launched], tmp_path: Path
) -> None:
    """Each serves on its own port, or says in one line why not."""
    servers, refused = [demo(start=False), demo(start=False)], []
    with ThreadPoolExecutor(2) as threads:
        for starting in [threads.submit(server.start) for server in servers]:
            try:
                starting.result()
            except StartError as error:
                refused.append(error.output)
    printed = [key for server in servers for key in set(KEY.findall(server.output))]
    assert (len(printed), users(tmp_path / "demo.db")) == (1, ["demo"])
    assert not [server.log() for server in servers if "Traceback" in server.log()]
    assert all(output.count("\n") == 1 for output in refused)


def test_second_process_on_the_same_file_is_warned_about(
    demo: Callable[..., Launched], tmp_path: Path
) -> None:
    first = demo()
    second = demo()
    warning = f"another process serves {tmp_path}/demo.db, too"
    eventually(lambda: warning in second.log())
    assert warning not in first.log()
    first.stop()
    third = demo()
    eventually(lambda: warning in third.log(), what="the second still serves")


def test_process_that_does_not_serve_is_not_warned_about(demo: Callable[..., Launched]) -> None:
    """The command line makes an app, too."""
    server = demo(start=False)
    script = "import app; made = app.create_app(); print('made', flush=True); input()"
    with subprocess.Popen(
        [PYTHON, "-c", script],
        cwd=REPOSITORY,
        env=server.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == b"made\n"
        server.start()
        other.communicate(b"\n")
    server.stop()
    assert "another process" not in server.log()


@pytest.mark.parametrize("command", [["app.py"], ["-m", "flask", "run"]], ids=["app.py", "flask"])
def test_taken_port_is_one_line_and_spends_no_secret(tmp_path: Path, command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        url = f"sqlite:///{tmp_path}/demo.db"
        message = refusal(PYTHON, *command, PORT=str(port), DATABASE_URL=url)
    reason = f"PORT: {port} on 127.0.0.1: Address already in use"
    assert message == f"{reason}; try PORT={port + 1}"
    assert not (tmp_path / "demo.db").exists() or users(tmp_path / "demo.db") == []


@pytest.mark.parametrize("variable", PLATFORM_HOPS)
def test_demo_on_a_platform_is_refused(tmp_path: Path, variable: str) -> None:
    settings = {variable: "anything", "DATABASE_URL": f"sqlite:///{tmp_path}/demo.db"}
    message = refusal(PYTHON, "app.py", **settings)
    assert message.startswith(f"{variable} is set: on a platform, start `gunicorn`")
    assert not (tmp_path / "demo.db").exists()


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--port=8001", 2)])
def test_help_of_the_demo_says_what_it_does(tmp_path: Path, argument: str, status: int) -> None:
    done = subprocess.run(
        [PYTHON, "app.py", argument],
        cwd=REPOSITORY,
        env=clean_environment(DATABASE_URL=f"sqlite:///{tmp_path}/demo.db"),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.startswith("usage: python app.py\n")
    assert not (tmp_path / "demo.db").exists()


@pytest.mark.parametrize("output", [">&-", ">/dev/full"])
def test_secret_that_cannot_be_printed_is_one_line_and_makes_no_user(
    tmp_path: Path, output: str
) -> None:
    done = first_start(tmp_path, output, PYTHONUNBUFFERED="")
    message = "the key cannot be printed, so it was not created\n"
    assert (done.returncode, done.stderr) == (1, message)
    assert users(tmp_path / "demo.db") == []


def first_start(
    directory: Path, output: str = "", **settings: str
) -> "subprocess.CompletedProcess[str]":
    """`python app.py` on a new database; it is expected to end by itself."""
    environment = {"DATABASE_URL": f"sqlite:///{directory}/demo.db", "PORT": str(free_port())}
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {output}', "sh", PYTHON, "app.py"],
        cwd=REPOSITORY,
        env=clean_environment(**environment | settings),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
@pytest.mark.parametrize("moment", ["port", "key"])
def test_signal_during_the_start_stops_the_demo_in_order(
    tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    """Once the port is bound, or the key is printed; gunicorn has not been started yet."""
    port = free_port()
    environment = {"DATABASE_URL": f"sqlite:///{tmp_path}/demo.db", "PORT": str(port)}
    with subprocess.Popen(
        [PYTHON, "-u", "app.py"],
        cwd=REPOSITORY,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        if moment == "port":
            eventually(lambda: listens("127.0.0.1", port))
        while moment == "key" and "sk_live_" not in process.stdout.readline():
            pass
        process.send_signal(number)
        errors = process.communicate(timeout=10)[1]
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["demo.db"]
    assert users(tmp_path / "demo.db") == ["demo"]


# What is refused

DEBUG = "Error: only --host and --port work here: it is not Flask's server"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --debug", DEBUG),
        ("--debug run", DEBUG),
        ("run --reload", DEBUG),
        ("run --port 70000", "PORT: must be a whole number from 1 to 65535, not '70000'"),
    ],
)
def test_other_options_of_flask_run_are_refused(
    tmp_path: Path, arguments: str, message: str
) -> None:
    command = [PYTHON, "-m", "flask", *arguments.split()]
    assert refusal(*command, DATABASE_URL=f"sqlite:///{tmp_path}/demo.db").startswith(message)


@pytest.mark.parametrize(
    ("command", "variable", "value"),
    [
        ("app.py", "DATABASE_URL", f"sqlite:////tmp/{'a' * 300}"),
        ("app.py", "SECRET_KEY", "\udcff"),
        ("-m flask run", "SECRET_KEY", "\udcff"),
        ("-m flask user list", "PORT", "http"),
        ("-m gunicorn", "DATABASE_URL", f"sqlite:////tmp/{'a' * 300}"),
        ("-m gunicorn", "SECRET_KEY", "\udcff"),
    ],
)
def test_wrong_setting_is_one_line_of_every_command(
    tmp_path: Path, command: str, variable: str, value: str
) -> None:
    settings = {"DATABASE_URL": f"sqlite:///{tmp_path}/demo.db", variable: value}
    assert refusal(PYTHON, *command.split(), **settings).startswith(variable)


@pytest.mark.parametrize("command", ["app.py", "-m flask run", "-m gunicorn"])
def test_too_few_open_files_are_one_line(tmp_path: Path, command: str) -> None:
    message = refusal(
        *["sh", "-c", 'ulimit -n 100 && exec "$@"', "sh", PYTHON, *command.split()],
        DATABASE_URL=f"sqlite:///{tmp_path}/demo.db",
        SECRET_KEY=secrets.token_hex(),
        PORT=str(free_port()),
    )
    assert message == "ulimit -n is 100; at least 128 files are needed"
