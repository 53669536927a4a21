"""The real server, started as on a platform: the Procfile's command and an environment."""

import contextlib
import inspect
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import socketserver
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest

from accounts import api_keys
from accounts.users import UNMATCHABLE_HASH
from helpers.paths import STATS, STATUS
from helpers.rawsocket import Answer, RawSocket, form_bytes
from models import PREFIXES
from settings import PLATFORM_HOPS, VARIABLES, load
from storage.database import prepare_database

TcpServer = TypeVar("TcpServer", bound=socketserver.TCPServer)

REPOSITORY = Path(__file__).parents[2]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # also with what pip has installed
POSTGRESQL = Path("/usr/lib/postgresql")  # of Debian, with a folder for each version
SETTINGS = {*VARIABLES, *PLATFORM_HOPS, "GUNICORN_CMD_ARGS", "FORWARDED_ALLOW_IPS"}
USER_ID = 1000  # the next one is twice this: those between are given by the service


def sources() -> list[Path]:
    """The Python files of the service."""
    return [
        file
        for file in (*REPOSITORY.glob("[a-z]*.py"), *REPOSITORY.glob("[a-z]*/*.py"))
        if file.parent.name not in ("tests", "benchmarks", "docs")
    ]


def clean_environment(**settings: str) -> dict[str, str]:
    """This process's environment with none of the service's settings but the given ones."""
    inherited = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return {**inherited, "PYTHONUNBUFFERED": "1", **settings}


def find_program(*names: str) -> str:
    """The path of the first one that is installed; skips the test if none is."""
    folders = (PATH, "/usr/sbin", *map(str, sorted(POSTGRESQL.glob("*/bin"), reverse=True)))
    found = filter(None, (shutil.which(name, path=":".join(folders)) for name in names))
    return next(found, None) or pytest.skip(f"{' or '.join(names)} is not installed")


def free_port() -> int:
    """A port below those that the kernel gives to clients, so that none of them takes it first."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def listens(address: str, port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((address, port)) == 0


def serve_command() -> list[str]:
    """The Procfile's command; unlike `python -m`, the program does not import from this folder."""
    return shlex.split(
        (REPOSITORY / "Procfile").read_text().replace("web: ", f"'{Path(sys.executable).parent}'/")
    )


def eventually(condition: Callable[[], Any], seconds: float = 20, what: object = "") -> Any:
    """Wait until the condition holds, and return what it says; fails when it does not in time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, (
            f"not within {seconds} s: {what or inspect.getsource(condition).strip()}; "
            f"at last {found!r}"
        )
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def writing(database: str, sql: str) -> Iterator[None]:
    """Meanwhile, another process is in a transaction that has done this."""
    connect: Any = psycopg.connect if database.startswith("postgres") else sqlite3.connect
    with contextlib.closing(connect(database.removeprefix("sqlite:///"))) as other:
        other.execute(sql)
        yield
        other.commit()


@contextlib.contextmanager
def serving(server: TcpServer) -> Iterator[TcpServer]:
    """Meanwhile, a thread of this process serves."""
    threading.Thread(target=server.serve_forever, args=(0.05,)).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.socket.close()  # `server_close` would wait for clients


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """What is done here takes no longer, on a machine that is not busy."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < patience(seconds), (
        f"it took {took:.1f} s, and {seconds} s are promised (here {patience(seconds):.1f} s, "
        "because other programs run)"
    )


def patience(seconds: float) -> float:
    """How long something may take here that is promised within these seconds.

    A machine with more to do than it has processors takes up to so many times longer. What is in
    the average has been there for a minute, so what runs at this moment counts as well.
    """
    loads = [os.getloadavg()[0]]
    with contextlib.suppress(FileNotFoundError):
        loads.append(float(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
    return seconds * min(4, max(2, max(loads) / (os.cpu_count() or 1)))


def bash(script: str, cwd: Path, env: dict[str, str] | None = None, seconds: float = 120) -> str:
    """What these lines print; each command must succeed."""
    done = subprocess.run(
        ["bash", "-ec", script], cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


def random_key(type: str = "production") -> str:
    """A well-formed key that nobody has."""
    random = "".join(secrets.choice(api_keys.BASE62) for _ in range(40))
    key = f"{PREFIXES[type]}{random[:8]}_{random[8:]}"
    return key + api_keys.checksum(key)


def start_refusal(command: str, directory: Path, **settings: str) -> str:
    """The one line with which `python ...` fails; it prints nothing else, but perhaps its usage."""
    try:
        done = subprocess.run(
            [sys.executable, *command.split()],
            cwd=REPOSITORY,
            env=clean_environment(
                **{
                    "PORT": str(free_port()),
                    "DATABASE_URL": f"sqlite:///{directory}/demo.db",
                    "SECRET_KEY": secrets.token_hex(),
                    **settings,
                }
            ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(
            f"python {command} with {settings} serves, but has to be refused: {late.stderr!r}"
        )
    assert done.returncode, f"python {command} with {settings} must not succeed: {done}"
    assert (done.stdout, done.stderr.count("\n")) == ("", 1 + done.stderr.count("usage: ")), (
        f"a refusal is one line on stderr, and nothing else: {done.stdout}{done.stderr}"
    )
    return done.stderr.rstrip("\n")


class StartError(Exception):
    """The server ended by itself; the text has its exit status and what it printed."""


class Server(contextlib.AbstractContextManager["Server"]):
    """A running server with a directory of its own for the database and the log.

    `command` may start it in another way than the Procfile's.
    """

    may_log_a_traceback = False
    _process: Any = None  # once it was started

    def __init__(self, directory: Path, *command: str, **settings: str) -> None:
        self.directory = directory
        self.command = list(command) or serve_command()
        self._database = directory / "data" / "service.db"
        self._database.parent.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ws_url = f"ws://127.0.0.1:{self.port}"
        self.env = clean_environment(
            **{
                "PORT": str(self.port),
                "DATABASE_URL": f"sqlite:///{self._database}",
                "SECRET_KEY": secrets.token_hex(),
                **dict.fromkeys(["HOME", "XDG_RUNTIME_DIR"], str(directory)),
                **settings,
            }
        )
        self._log = directory / "server.log"
        self._log.touch()
        self.stdin = subprocess.DEVNULL
        self._keys = 0

    def __str__(self) -> str:
        return f"the server answers; its log ends with {self.log()[-3000:]}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def worker_pids(self) -> list[int]:
        return [*map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())]

    @property
    def worker_pid(self) -> int:
        """Of the only worker; skips a test that needs it where there are more."""
        if self.env.get("WEB_CONCURRENCY", "1") != "1" and self.postgres:
            pytest.skip("it watches the only worker")
        children = self.worker_pids
        assert len(children) == 1, f"one worker, not {children}"
        return children[0]

    @property
    def resident_kib(self) -> int:
        """Of all workers."""
        return sum(
            int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])
            for pid in self.worker_pids
        )

    @property
    def postgres(self) -> bool:
        return self.env["DATABASE_URL"].startswith("postgres")

    @property
    def database(self) -> Path:
        """The SQLite file; skips a test that needs it where there is none."""
        if self.postgres:
            pytest.skip("it opens the SQLite file")
        return self._database

    @property
    def stored(self) -> set[str]:
        """The names of the files that make up the database; the empty one is not a part of it."""
        return {path.name for path in self.database.parent.iterdir() if path.stat().st_size}

    def start(self, status: int = 200) -> "Server":
        """Start, also after a stop, and wait for an answer; raises StartError."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=REPOSITORY,
                env=self.env,
                start_new_session=True,
                stdin=self.stdin,
                stdout=log,
                stderr=log,
            )
        eventually(partial(self._answers, status), 30, self)
        return self

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal; unless it is SIGKILL, the server ends in good order and in time."""
        if how == signal.SIGKILL:  # as a power cut: nobody is left to tidy up
            os.killpg(self.pid, how)
            self.wait()
        else:
            with within(5):
                # A terminal sends any other to all processes.
                (os.kill if how == signal.SIGTERM else os.killpg)(self.pid, how)
                assert self.wait() == 0, (
                    f"exit status after a {how.name}; its log ends with {self.log()[-1000:]}"
                )

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Meanwhile, the worker does nothing; the kernel goes on accepting connections and data."""
        worker = self.worker_pid
        os.kill(worker, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(worker, signal.SIGCONT)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> int:
        eventually(self.has_ended, 40, "the server ends after its signal: see server/lifecycle.py")
        return self._process.returncode

    def handle_signals(self) -> None:
        """Wait until gunicorn has handled all signals so far, also those that it ignores."""
        os.kill(self.pid, signal.SIGWINCH)
        eventually(lambda: self.log_lines("winch"), what="gunicorn logs its SIGWINCH")

    def __exit__(self, *error: object) -> None:
        """Leave nothing running, whatever the test did. The log must have no traceback."""
        if self._process and not self.has_ended():
            self.stop(signal.SIGKILL)
        before, traceback, after = self.log().partition("Traceback")
        assert self.may_log_a_traceback or not traceback, (
            f"the server has a bug: {[line for line in after.splitlines() if line[:1].isalpha()]}; "
            "if several tests share this server, an earlier one may have met it: "
            f"{before[-500:]}{traceback}{after[:5000]}"
        )

    def log(self) -> str:
        return self._log.read_text()

    def log_lines(self, word: str) -> list[str]:
        return [line for line in self.log().splitlines() if word in line]

    @contextlib.contextmanager
    def connections(self, count: int, receive_buffer: int = 0) -> Iterator[list[RawSocket]]:
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(RawSocket(self.port, receive_buffer)) for _ in range(count)]

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Make a request over a new connection, for example `ask(TEST, X_API_Key=key)`."""
        with RawSocket(self.port) as connection:
            return connection.request(path, method, **headers)

    def send(self, data: bytes) -> Answer:
        with RawSocket(self.port) as connection:
            connection.send(data)
            return connection.answer(has_body=not data.startswith(b"HEAD "))

    def total(self, key: str) -> int:
        """The requests that were counted for the key before this question."""
        return self.ask(STATS, X_API_Key=key).json()["total_requests"] - 1

    def flask(self, *args: str, input: str = "", cwd: Path = REPOSITORY) -> str:
        """What `flask ...` prints in this server's environment; it must succeed."""
        with self.start_flask(*args, cwd=cwd) as process:
            printed, errors = process.communicate(input)
        assert process.returncode == 0, f"flask {' '.join(args)} must succeed: {errors}"
        return printed

    def start_flask(self, *args: str, cwd: Path = REPOSITORY) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "flask", *args],
            cwd=cwd,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def new_key(self, name: str = "test key", tier: str = "free", type: str = "production") -> str:
        """A new key of a new user, written by hand: commands would take a second for them."""
        if not (self.postgres or self._database.exists()):
            prepare_database(load(self.env))
        key = random_key(type)
        now = int(time.time())
        owner = f"user{self._keys}"
        self._keys += 1
        user = {"id": USER_ID * self._keys, "username": owner, "email": f"{owner}@example.com"}
        row = {"id": key[8:16], "user_id": user["id"], "name": name, "type": type, "tier": tier}
        try:
            self.insert("user", **user, password_hash=UNMATCHABLE_HASH, created_at=now - 9)
            self.insert("api_key", **row, digest=api_keys.digest(key), created_at=now)
        except (sqlite3.IntegrityError, psycopg.IntegrityError) as error:
            pytest.fail(
                f"the previous version can store no key: {error}: in models.py, null=True or "
                "constraints=[SQL(\"DEFAULT ''\")]: see Columns"
            )
        return key

    def insert(self, table: str, **row: object) -> None:
        self.execute(
            f'INSERT INTO "{table}" ({", ".join(row)}) VALUES ({", ".join("?" * len(row))})',
            *row.values(),
        )

    def sign_up(self, name: str) -> Answer:
        return self.send(
            form_bytes(
                "/sign-up", username=name, email=f"{name}@example.com", password="long enough"
            )
        )

    def execute(self, sql: str, *values: object) -> list[Any]:
        """Do something to the database by hand, whichever it is, or ask it."""
        if self.postgres:
            with psycopg.connect(self.env["DATABASE_URL"]) as connection:
                done = connection.execute(sql.replace("?", "%s").encode(), values)
                return done.fetchall() if done.description else []
        file = self.env["DATABASE_URL"].removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            return database.execute(sql, values).fetchall()

    def _answers(self, status: int) -> bool:
        if self.has_ended():
            raise StartError(f"exit status {self._process.returncode}:\n{self.log()}")
        with contextlib.suppress(OSError):
            return self.ask(f"{self.env.get('SCRIPT_NAME', '')}{STATUS}").status == status
        return False
