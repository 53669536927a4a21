"""Stop the service again and again at random moments under mixed load, and count what is lost.

    python benchmarks/stops.py [--stops 200] [--attackers 1]

After each stop: exit status 0, one database file, and in the totals of the database every request
that was answered. Prints what went wrong, and at the end how often.
"""

import argparse
import contextlib
import http.client
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from attacks import open_echo
from hostile import attacked

from serving import Server

CLIENTS = 4
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


class Client(threading.Thread):
    """Asks until the service is gone, on connections old and new; counts the answers."""

    def __init__(self, server: Server, key: str) -> None:
        super().__init__(daemon=True)
        self._server, self._key = server, key
        self.sent = self.answered = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=10)
            gone = contextlib.suppress(OSError, http.client.HTTPException)
            with contextlib.closing(connection), gone:
                for _ in range(random.randrange(1, 200)):
                    self.ask(connection)

    def ask(self, connection: http.client.HTTPConnection) -> None:
        self.sent += 1
        connection.request("GET", "/api/v1/protected/test", headers={"X-API-Key": self._key})
        response = connection.getresponse()
        if response.read().startswith(b'{"success":true'):
            self.answered += response.status == 200


def totals(server: Server) -> int:
    with contextlib.closing(sqlite3.connect(server.database)) as database:
        ((total,),) = database.execute("SELECT total FROM api_key").fetchall()
    return int(total)


def stop(server: Server, how: signal.Signals) -> int:
    """Returns the exit status. SIGHUP goes to the group, as from a terminal that is closed."""
    try:
        if how != signal.SIGHUP:
            return server.stop(how)[0]
        os.killpg(server.pid, how)
        return server.wait()
    except subprocess.TimeoutExpired:
        print("still running:", server.log()[-2000:], server.worker_pids, flush=True)
        server.close()
        return -1


def stop_under_load(server: Server, key: str, how: signal.Signals, attackers: int) -> list[str]:
    """Start, load, stop; returns what went wrong."""
    server.start()
    before = totals(server)
    clients = [Client(server, key) for _ in range(CLIENTS)]
    with attacked(server.port, attackers), contextlib.ExitStack() as sockets:
        for client in clients:
            client.start()
        for _ in range(5):
            with contextlib.suppress(OSError):
                sockets.enter_context(open_echo(server.port))
        time.sleep(random.uniform(0, 2))
        status = stop(server, how)
        for client in clients:
            client.stopping.set()
            client.join()
    counted = totals(server) - before
    answered = sum(client.answered for client in clients)
    sent = sum(client.sent for client in clients)
    return [
        *([f"exit status {status}"] if status else []),
        *([f"{answered} answered, {counted} counted"] if counted < answered else []),
        *([f"{sent} sent, {counted} counted"] if counted > sent else []),
        *([f"files {server.stored}"] if server.stored != {server.database.name} else []),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stops", type=int, default=200)
    parser.add_argument("--attackers", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), RATE_LIMITS="free=1000000000/day")
        key = server.new_key()
        wrong = 0
        try:
            for number in range(options.stops):
                how = SIGNALS[number % len(SIGNALS)]
                found = stop_under_load(server, key, how, options.attackers)
                wrong += bool(found)
                for line in found:
                    print(f"stop {number}, {how.name}: {line}", flush=True)
            print(f"{options.stops} stops, {wrong} with losses, {totals(server)} requests counted")
            print("lines with Traceback:", len(server.log_lines("Traceback")))
        finally:
            server.close()


if __name__ == "__main__":
    main()
