"""Serve an honest client among hostile ones, and see what the service looks like afterwards.

Each attack of attacks.py in turn, and then all of them for ten times as long. SECURITY.md
promises a p99 beside 20 connections; an attacker has eight. Memory and open files are the worker's,
20 s after the attacks, which is longer than any connection may be held.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attacks import ATTACKS
from servers import HERE, Server, arguments, checkouts

from helpers.load import waits

CALM_SECONDS = 20


@contextmanager
def attacked(server: Server, attackers: int, *attacks: str, cookie: str = "") -> Iterator[None]:
    """So many processes attack, each with one attack after another, or with one of all."""
    command = ["taskset", "-c", "1", sys.executable, str(HERE / "attacks.py"), str(server.port)]
    env = os.environ | {"COOKIE": cookie}
    processes = [subprocess.Popen([*command, *attacks], env=env) for _ in range(attackers)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def honest(server: Server, key: str, seconds: float) -> str:
    """What a client with a key waits for."""
    times = [1000 * each for each in waits(server.port, key, int(100 * seconds))]
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    return f"p50 {p50:6.1f} ms, p99 {p99:6.1f} ms, longest {times[-1]:6.1f} ms"


def state(server: Server) -> str:
    files = len(list(Path(f"/proc/{server.pids[-1]}/fd").iterdir()))
    tracebacks = server.log.read_text().count("Traceback")
    return f"{server.resident_mib():.1f} MiB, {files} open files, {tracebacks} tracebacks"


def main() -> None:
    options = arguments(__doc__, seconds=10, attackers=1)
    os.sched_setaffinity(0, {1})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        services: dict[str, tuple[Server, str, str]] = {}
        for name, checkout in checkouts(options).items():
            server = Server(Path(folder, name), checkout=checkout)
            keys = server.make_keys(50)
            server.use_for_a_day(keys)
            stack.enter_context(server)
            services[name] = server, keys[0], server.log_in()
            print(f"{name}: {honest(server, keys[0], options.seconds)} without attacks")
            print(f"{name}: {state(server)}", flush=True)
        for attack in (*ATTACKS, "all"):
            for name, (server, key, cookie) in services.items():
                names, seconds = ([attack], 1) if attack in ATTACKS else ([], 10)
                with attacked(server, options.attackers, *names, cookie=cookie):
                    time.sleep(1)  # until it is under way
                    waited = honest(server, key, seconds * options.seconds)
                print(f"{name}: {waited} beside {attack}", flush=True)
        time.sleep(CALM_SECONDS)
        for name, (server, *_) in services.items():
            print(f"{name}: {state(server)}; exit status of its stop: {server.stop()}")


if __name__ == "__main__":
    main()
