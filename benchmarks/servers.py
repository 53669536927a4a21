"""What the benchmarks share: servers with keys, and cases that are measured in turns.

Nothing of the service is imported, so any commit of it can be measured: with `--against DIR`,
another checkout is measured in the same turns.
"""

import argparse
import os
import random
import secrets
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))

from helpers.paths import TEST  # noqa: E402
from helpers.rawsocket import RawSocket, form_bytes  # noqa: E402

GUNICORN = (sys.executable, "-m", "gunicorn")
PASSWORD = "long enough"
START_SECONDS = 30


def arguments(doc: str, **numbers: int) -> argparse.Namespace:
    """What the command line says, where each of these numbers may be given."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left running
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def checkouts(options: argparse.Namespace) -> dict[str, Path]:
    """The services to measure, by name."""
    other = options.against
    return {"service": HERE.parent, **({f"service in {other.name}": other} if other else {})}


class Server:
    """A server with a database of its own; without a command, it is the service."""

    cores = "0"
    service: "Server | None" = None  # the one behind this proxy, whose time is added

    def __init__(self, folder: Path, *command: str, checkout: Path, **env: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log, self.checkout = folder, folder / "log", checkout
        self.port = random.randrange(10_000, 32_000)
        self._command = [part.format(port=self.port) for part in command or GUNICORN]
        self._env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PORT": str(self.port),
            "DATABASE_URL": f"sqlite:///{folder}/service.db",
            "SECRET_KEY": secrets.token_hex(),
            "RATE_LIMITS": "free=1000000000/day",
            **env,
        }

    def __enter__(self) -> "Server":
        """Start, and wait for the first answer."""
        started = time.monotonic()
        with self.log.open("a") as log:
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            how |= {"cwd": self.checkout, "env": self._env, "start_new_session": True}
            self._process = subprocess.Popen(["taskset", "-c", self.cores, *self._command], **how)
        while time.monotonic() < started + START_SECONDS and self._process.poll() is None:
            with suppress(OSError), RawSocket(self.port) as client:
                client.request(TEST)
                self.start_seconds = time.monotonic() - started
                return self
            time.sleep(0.005)
        self.__exit__()
        raise SystemExit(f"{self._command} did not start:\n{self.log.read_text()}")

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Returns the exit status. SIGHUP goes to the group, as from a terminal that is closed."""
        (os.killpg if how == signal.SIGHUP else os.kill)(self.pid, how)
        return self._process.wait(timeout=30)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """The server and its workers; the last one is a worker."""
        return with_children(self.pid)

    def processor_seconds(self) -> float:
        return processor_seconds(self.pid)

    def resident_mib(self) -> float:
        """Of the worker."""
        status = Path(f"/proc/{self.pids[-1]}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def memory_mib(self) -> float:
        """Of all its processes; what they share is counted once."""
        private, shared = 0, 0
        for pid in self.pids:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            sizes = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
            private += sizes["Private_Clean:"] + sizes["Private_Dirty:"]
            shared = max(shared, sizes["Shared_Clean:"] + sizes["Shared_Dirty:"])
        return (private + shared) / 1024

    def log_in(self) -> str:
        """The cookie of the user to whom the first key belongs."""
        with RawSocket(self.port) as client:
            client.send(form_bytes("/log-in", username="bench", password=PASSWORD))
            return client.answer().headers["Set-Cookie"].partition(";")[0]

    def flask(self, *args: str, input: str = "") -> str:
        """What `flask ...` of the service prints."""
        how: dict[str, Any] = {"cwd": self.checkout, "env": self._env, "text": True}
        command = [sys.executable, "-m", "flask", *args]
        return subprocess.check_output(command, input=input, **how).strip()

    def make_keys(self, count: int, users: int = 1) -> list[str]:
        """One is made by the commands, the others are copies of its row."""
        user = ["bench", "bench@example.com", "--password-stdin"]
        self.flask("user", "create", *user, input=PASSWORD)
        keys = [self.flask("key", "create", "bench", "bench")]
        assert keys[0] == with_checksum(keys[0][:-6]), "keys have another format now"
        keys += [random_key() for _ in range(count - 1)]
        names = ({"id": n, "username": f"u{n}", "email": f"{n}@a.b"} for n in range(2, users + 1))
        self.copy_first_row('"user"', names)
        digests = enumerate(sha256(key.encode()).hexdigest() for key in keys)
        rows = ({"digest": digest, "user_id": 1 + n * users // count} for n, digest in digests)
        self.copy_first_row(
            "api_key", ({"id": keys[n][8:16]} | row for n, row in enumerate(rows) if n)
        )
        return keys

    def use_for_a_day(self, keys: list[str]) -> None:
        """As if each of these keys had been used in each of the last 24 hours."""
        hours = [int(time.time()) // 3600 * 3600 - 3600 * ago for ago in range(24)]
        rows = (
            {"hour": hour, "key_id": key[8:16], "requests": 1} for hour in hours for key in keys
        )
        self.copy_first_row("hourly_usage", rows)

    def copy_first_row(self, table: str, changes: Iterable[Mapping[str, object]]) -> None:
        """Store copies of a table's first row, if it has one, with these changes."""
        with closing(self.connect()) as database:
            cursor = database.cursor()
            cursor.execute(f"SELECT * FROM {table} LIMIT 1")
            names = [column[0] for column in cursor.description]
            first = dict(zip(names, cursor.fetchone() or names, strict=True))
            place = "?" if isinstance(database, sqlite3.Connection) else "%s"
            places = ", ".join([place] * len(names))
            insert = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({places})"
            cursor.executemany(insert, (tuple((first | row).values()) for row in changes))
            database.commit()

    def connect(self) -> Any:
        url = self._env["DATABASE_URL"]
        if url.startswith("sqlite"):
            return sqlite3.connect(url.removeprefix("sqlite:///"))
        import psycopg  # only needed for PostgreSQL

        return psycopg.connect(url)


def with_children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def processor_seconds(pid: int) -> float:
    """Of this process and its children, also those that have ended."""
    stats = [Path(f"/proc/{n}/stat").read_text().rsplit(")", 1)[1] for n in with_children(pid)]
    ticks = sum(int(field) for stat in stats for field in stat.split()[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def random_key() -> str:
    """A well-formed key that nobody has; not quite uniform, but quick to make a million of."""
    text = secrets.token_urlsafe(30).replace("-", "x").replace("_", "y")
    return with_checksum(f"sk_live_{text[:8]}_{text[8:]}")


def with_checksum(text: str) -> str:
    return text + sha256(text.encode()).hexdigest()[:6]


@dataclass
class Case:
    """A server, asked by wrk over 32 connections, with the keys in turn."""

    name: str
    server: Server
    keys: list[str]
    of: "Case | None" = None  # what its processor time is compared with
    path: str = TEST
    origin: str = "http://127.0.0.1"
    is_refused: bool = False
    rounds: list[list[float]] = field(default_factory=list)

    def measure(self, seconds: float = 2) -> list[float]:
        """Processor time of a request in µs, requests a second, p50 and p99 in ms.

        If the server is a proxy, the last figure is the part of the service in the first one.
        """
        file = self.server.folder / "keys"
        file.write_text("\n".join(self.keys))
        command = ["taskset", "-c", "1", "wrk", "-t1", "-c32", f"-d{seconds:.0f}s", "-s"]
        command += [str(HERE / "wrk.lua"), f"{self.origin}:{self.server.port}{self.path}"]
        servers = [server for server in (self.server, self.server.service) if server]
        before = [server.processor_seconds() for server in servers]
        output = subprocess.check_output(command, env=os.environ | {"KEYS": str(file)}, text=True)
        after = [server.processor_seconds() for server in servers]
        rate, p50, p99, requests, errors = map(float, output.split("figures")[1].split())
        expected = requests if self.is_refused else 0
        assert errors == expected, f"{self.name}: {errors:.0f} of {requests:.0f} failed"
        spent = [1e6 * (end - begin) / requests for begin, end in zip(before, after, strict=True)]
        return [sum(spent), rate, p50, p99, *spent[1:]]


def in_turns(cases: list[Case], rounds: int) -> None:
    """Measure all cases, round after round, and print the round with the least processor time.

    Other programs only add to it. Of p99/p50, the least is printed, too.
    """
    for case in cases:
        case.measure()  # warms it up
    for _ in range(rounds):
        for case in cases:
            case.rounds.append(case.measure())
    print(f"{'':44}  CPU µs  ratio  requests/s  p50 ms  p99 ms  p99/p50")
    for case in cases:
        processor, rate, p50, p99, *service = min(case.rounds)
        ratio = processor / min((case.of or case).rounds)[0]
        spread = min(p99 / p50 for _, _, p50, p99, *_ in case.rounds)
        figures = f"{processor:7.0f} {ratio:6.2f} {rate:11.0f} {p50:7.1f} {p99:7.1f} {spread:8.1f}"
        part = "".join(f"  service {each:.0f}" for each in service)
        print(f"{case.name:44} {figures}{part}", flush=True)
