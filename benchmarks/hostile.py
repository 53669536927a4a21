"""Serve an honest client among hostile ones, and see what the service looks like afterwards.

    python benchmarks/hostile.py [--minutes 30] [--attackers 3] [--attacks NAME ...]

The server runs on core 0, all clients on core 1. The figures are taken after a minute and at the
end, each time 20 s after the last attack.
"""

import argparse
import http.client
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Process
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from attacks import ATTACKS, attack_with

from serving import REPOSITORY, Server

PROMISED_MILLISECONDS = 50  # for the p99, in SECURITY.md
CALM_SECONDS = 20  # longer than any connection may be held
# 30 keys an hour for a day, of which 25 are live and 25 have expired, used in each hour; and as
# many rows of others.
NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 719)"
HOURS = "h(ago) AS (SELECT 0 UNION ALL SELECT ago + 1 FROM h WHERE ago < 23)"
NOW = "unixepoch()"
MANY_KEYS = [
    f"""INSERT INTO api_key (id, user_id, name, type, tier, digest, created_at, expires_at,
        revoked_at, last_used_at, total, reset, used) {NUMBERS}
    SELECT 'a' || (1000000 + i), 1, 'k', 'production', 'free', '', {NOW},
        iif(i BETWEEN 25 AND 49, {NOW} - 9, NULL), iif(i < 50, NULL, {NOW} - 9), {NOW}, 1, 0, 0
    FROM n""",
    f"""INSERT INTO hourly_usage {NUMBERS}, {HOURS}
    SELECT {NOW} / 3600 * 3600 - 3600 * ago, mine || (1000000 + i), 1
    FROM n, h, (SELECT 'a' AS mine UNION SELECT 'b')""",
]
COUNT_GREENLETS = """
import gc, gevent, pathlib
def post_worker_init(worker):
    def count():
        greenlets = [one for one in gc.get_objects() if isinstance(one, gevent.Greenlet) and one]
        pathlib.Path({file!r}).write_text(str(len(greenlets)))
        gevent.spawn_later(5, count)
    gevent.spawn_later(5, count)
"""


class Honest(threading.Thread):
    """A client with a key: a request every 10 ms. Keeps what they took, and what went wrong."""

    def __init__(self, server: Server, key: str) -> None:
        super().__init__(daemon=True)
        self._server, self._key = server, key
        self.milliseconds: list[float] = []
        self.errors: Counter[str] = Counter()
        self.stopping = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=10)
        while not self.stopping.wait(0.01):
            started = time.perf_counter()
            try:
                connection.request(
                    "GET", "/api/v1/protected/test", headers={"X-API-Key": self._key}
                )
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    self.errors[str(response.status)] += 1
            except (OSError, http.client.HTTPException) as error:
                self.errors[repr(error)] += 1
                connection.close()
            self.milliseconds.append(1000 * (time.perf_counter() - started))


@contextmanager
def attacked(port: int, attackers: int, attacks: list[str]) -> Iterator[None]:
    """Meanwhile so many processes attack, each with one attack after another."""
    chosen = [attack for attack in ATTACKS if attack.__name__ in (attacks or str(ATTACKS))]
    processes = [
        Process(target=attack_with, args=(chosen, port, random.random()), daemon=True)
        for _ in range(attackers)
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def figures(server: Server) -> str:
    process = Path(f"/proc/{server.worker_pid}")
    memory = int((process / "status").read_text().split("VmRSS:")[1].split()[0]) / 1024
    files = [str(file.readlink()) for file in (process / "fd").iterdir() if file.is_symlink()]
    connections = sum(file.startswith("socket:") for file in files)
    greenlets = greenlets_file(server.directory).read_text()
    return (
        f"{memory:.1f} MiB, {len(files)} open files, {connections} of them sockets, "
        f"{greenlets} greenlets"
    )


def greenlets_file(folder: Path) -> Path:
    return folder / "greenlets"


def count_greenlets(folder: Path) -> str:
    """Write a configuration that lets the worker count its greenlets; returns the arguments."""
    file = folder / "counting.conf.py"
    counting = COUNT_GREENLETS.format(file=str(greenlets_file(folder)))
    original = f"__file__ = {str(REPOSITORY / 'gunicorn.conf.py')!r}\nexec(open(__file__).read())\n"
    file.write_text(original + counting)
    return f"--config {file}"


def make_user(server: Server) -> str:
    """A user with many keys; returns the cookie."""
    cookie = server.sign_up("ada").headers["Set-Cookie"].partition(";")[0]
    for statement in MANY_KEYS:
        server.execute(statement)
    return cookie


def measure(server: Server, key: str, seconds: float, attackers: int, attacks: list[str]) -> str:
    """Let clients attack for a while; returns a line about an honest client meanwhile."""
    honest = Honest(server, key)
    with attacked(server.port, attackers, attacks):
        honest.start()
        time.sleep(seconds)
        honest.stopping.set()
        honest.join()
    quantiles = statistics.quantiles(honest.milliseconds, n=100)
    verdict = " (MORE THAN PROMISED)" if quantiles[98] > PROMISED_MILLISECONDS else ""
    return (
        f"{len(honest.milliseconds)} honest requests, p50 {quantiles[49]:.1f} ms, "
        f"p99 {quantiles[98]:.1f} ms{verdict}, errors: {dict(honest.errors) or 'none'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--attackers", type=int, default=3)
    parser.add_argument("--attacks", nargs="*", default=[])
    options = parser.parse_args()
    attacks = options.attacks
    with tempfile.TemporaryDirectory() as folder:
        limits = {"RATE_LIMITS": "free=1000000000/day"}
        limits["GUNICORN_CMD_ARGS"] = count_greenlets(Path(folder))
        server = Server(Path(folder), **limits)
        os.sched_setaffinity(0, {0})
        server.start()
        os.sched_setaffinity(0, {1})
        try:
            os.environ["COOKIE"], key = make_user(server), server.new_key()
            print("without attacks:", measure(server, key, 10, 0, attacks), flush=True)
            for seconds in (60, max(0.0, 60 * (options.minutes - 1))):
                figure = measure(server, key, seconds, options.attackers, attacks)
                print(f"{seconds:.0f} s:", figure)
                time.sleep(CALM_SECONDS)
                print("    afterwards:", figures(server), flush=True)
            print("exit status and seconds of the stop:", server.stop())
            print("lines with Traceback:", len(server.log_lines("Traceback")))
        finally:
            server.close()


if __name__ == "__main__":
    main()
