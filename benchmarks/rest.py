"""Compare GET /api/v1/protected/test with three rivals, and with itself when keys are many.

    python benchmarks/rest.py [--rounds 15] [--seconds 2] [--stored 1000000] [--used 100000]
                              [--plot benchmarks/rest.svg]

Needs benchmarks/requirements.txt, wrk, taskset and two cores: servers run on core 0, the load on
core 1. All servers stay up and are measured in turn, round after round. The least processor time of
all rounds counts, because other programs on the machine only add to it.
"""

import argparse
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

BENCHMARKS = Path(__file__).parent
SERVICE = BENCHMARKS.parent
sys.path.insert(0, str(SERVICE))

import accounts  # noqa: E402
import auth  # noqa: E402
import settings  # noqa: E402
from storage.database import command_connection, create_tables  # noqa: E402

OURS = "this service, one key"
MANY = "this service, many keys"
GUNICORN = [sys.executable, "-m", "gunicorn"]
GEVENT = [*GUNICORN, "-k", "gevent"]
UVICORN = [sys.executable, "-m", "uvicorn", "--no-access-log", "--log-level", "warning"]
BARE = ["--http", "h11", "--loop", "asyncio", "fastapi_slowapi:app"]
CONNECTIONS = 32
INSERT = """INSERT INTO api_key
    (id, user_id, name, type, tier, digest, created_at, total, reset, used) VALUES """


class Server:
    """A server on core 0 of which the load asks with the keys in a file."""

    def __init__(self, name: str, port: int, keys: Path, *command: str, folder: Path = BENCHMARKS):
        self.address = f"127.0.0.1:{port}"
        bind = ["--port", str(port)] if "uvicorn" in command else ["-b", self.address]
        database = keys.with_suffix(".db")
        environ = {
            "PATH": os.environ["PATH"],
            "DATABASE": str(database),
            "DATABASE_URL": f"sqlite:///{database}",
            "RATE_LIMITS": "free=1000000000/day",
            "SECRET_KEY": secrets.token_hex(),
            "HOME": str(keys.parent),
        }
        self.name, self.keys, self.rounds = name, keys, list[list[float]]()
        self.process = subprocess.Popen(
            ["taskset", "-c", "0", *command, *bind],
            cwd=folder,
            env=environ,
            stderr=keys.with_suffix(f".{name.split()[0]}.log").open("w"),
            start_new_session=True,
        )

    def measure(self, seconds: float) -> list[float]:
        """Requests a second, p50 and p99 in ms, processor time of a request in µs."""
        load = ["taskset", "-c", "1", "wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds:.0f}s"]
        url = f"http://{self.address}/api/v1/protected/test"
        environ = {**os.environ, "KEYS": str(self.keys)}
        script = ["-s", str(BENCHMARKS / "wrk.lua"), url]
        before = self.processor_seconds()
        output = subprocess.run([*load, *script], env=environ, check=True, capture_output=True)
        line = output.stdout.decode().split("figures")[1]
        rate, p50, p99, requests, errors = map(float, line.split())
        assert not errors, f"{self.name}: {errors:.0f} errors"
        return [rate, p50, p99, 1e6 * (self.processor_seconds() - before) / requests]

    def processor_seconds(self) -> float:
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in self._ps("pid")]
        return sum(sum(map(int, stat.rsplit(")")[1].split()[11:13])) for stat in stats) / 100

    def resident_mib(self) -> float:
        """Of all its processes; what they share counts in each."""
        return sum(self._ps("rss")) / 1024

    def _ps(self, column: str) -> list[int]:
        command = ["ps", "-o", f"{column}=", "-g", str(self.process.pid)]
        return list(map(int, subprocess.check_output(command).split()))

    @property
    def best(self) -> list[float]:
        """The figures of the round with the least processor time."""
        return min(self.rounds, key=lambda figures: figures[3])

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(timeout=10)


def make_keys(file: Path, stored: int, used: int) -> None:
    """Store keys in a new database, without the service; the file gets those to be used."""
    url = f"sqlite:///{file.with_suffix('.db')}"
    create_tables(loaded := settings.load({"DATABASE_URL": url}))
    with command_connection(loaded):
        user = accounts.create("bench", "bench@example.com", secrets.token_urlsafe())
    unfinished = (f"sk_live_{base62(6)}_{base62(24)}" for _ in range(stored))
    keys = (key + auth.checksum(key) for key in unfinished)
    row = f"(?, {user.id}, 'bench', 'production', 'free', ?, {int(time.time())}, 0, 0, 0)"
    database = sqlite3.connect(file.with_suffix(".db"))
    with database, file.open("w") as out:
        for part in (list(islice(keys, used)), keys):
            database.executemany(INSERT + row, ((key[8:16], auth.digest(key)) for key in part))
            out.writelines(f"{key}\n" for key in part)  # the generator is empty by then
    database.close()


def base62(random_bytes: int) -> str:
    """Random letters and digits; not quite uniform, but quick to make a million of."""
    return secrets.token_urlsafe(random_bytes).replace("-", "x").replace("_", "y")


def report(servers: list[Server]) -> None:
    print(f"{'':40} CPU µs   ours is   requests/s   p50 ms   p99 ms   RSS MiB")
    for server in servers:
        rate, p50, p99, processor = server.best
        ratio = processor / servers[0].best[3]
        figures = f"{rate:12.0f} {p50:8.1f} {p99:8.1f} {server.resident_mib():9.0f}"
        print(f"{server.name:40} {processor:6.0f} {ratio:8.2f}x {figures}")


def plot(servers: list[Server], file: str) -> None:
    """Draw the processor time of a request to each server."""
    import matplotlib.pyplot as plt  # only needed here

    plt.rcParams |= {"svg.fonttype": "none", "font.size": 11}
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    times = [server.best[3] for server in servers]
    colors = ["#0f766e" if server.name.startswith("this") else "#a8b0b3" for server in servers]
    bars = axes.barh([server.name for server in servers], times, color=colors)
    axes.bar_label(bars, [f"{time:.0f} µs, {time / times[0]:.2f}x" for time in times], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlabel("processor time of a request to /protected/test")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=int, default=2, help="of each round and server")
    parser.add_argument("--stored", type=int, default=1_000_000)
    parser.add_argument("--used", type=int, default=100_000)
    parser.add_argument("--port", type=int, default=8210, help="the first of six")
    parser.add_argument("--plot", metavar="FILE", help="draw the processor times")
    options = parser.parse_args()
    port = options.port
    with tempfile.TemporaryDirectory() as folder:
        one, many = Path(folder, "one"), Path(folder, "many")
        make_keys(one, 1, 1)
        one.write_text(one.read_text() * options.used)  # as much work for the load as many keys
        make_keys(many, options.stored, options.used)
        servers = [
            Server(OURS, port, one, *GUNICORN, folder=SERVICE),
            Server(MANY, port + 1, many, *GUNICORN, folder=SERVICE),
            Server("one-line Flask view", port + 2, one, *GEVENT, "plain:app"),
            Server("FastAPI + slowapi + sqlite3", port + 3, one, *UVICORN, "fastapi_slowapi:app"),
            Server("the same on uvicorn without extras", port + 4, one, *UVICORN, *BARE),
            Server("Flask-Limiter + peewee", port + 5, one, *GEVENT, "flask_limiter_peewee:app"),
        ]
        try:
            time.sleep(10)  # until all have started
            for server in servers:
                server.measure(2)
            rate = servers[1].measure(2)[0]
            servers[1].measure(1 + 1.2 * options.used / rate)  # until all used keys have been seen
            for _ in range(options.rounds):
                for server in servers:
                    server.rounds.append(server.measure(options.seconds))
            report(servers)
            if options.plot:
                plot(servers, options.plot)
        finally:
            for server in servers:
                server.stop()


if __name__ == "__main__":
    main()
