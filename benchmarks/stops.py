"""Stop the service again and again at random moments under mixed load, and count what is lost.

After each stop: exit status 0, one database file, and in the total of the key every request that
was answered. Prints what went wrong, and at the end how often.
"""

import random
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from hostile import attacked
from servers import RawSocket, Server, arguments, checkouts

from helpers.load import Load, accepted
from helpers.paths import ECHO

SOCKETS = 5
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


def total(server: Server) -> int:
    with closing(server.connect()) as database:
        return int(database.execute("SELECT total FROM api_key").fetchone()[0])


def stop_under_load(server: Server, key: str, how: signal.Signals, attackers: int) -> list[str]:
    """Start, load, stop; returns what went wrong."""
    before, wrong = total(server), []
    with server, attacked(server, attackers), ExitStack() as stack:
        load = stack.enter_context(Load(server.port, key, connections=4))
        for _ in range(SOCKETS):
            with suppress(OSError, AssertionError):  # refused, because others attack
                stack.enter_context(RawSocket(server.port)).open(ECHO)
        time.sleep(random.uniform(0, 2))
        try:
            if status := server.stop(how):
                wrong.append(f"exit status {status}")
        except subprocess.TimeoutExpired:
            wrong.append("it does not stop")
    counted, sent, answered = total(server) - before, len(load.replies), len(accepted(load.replies))
    files = {path.name for path in server.folder.glob("service.db*") if path.stat().st_size}
    if not answered <= counted <= sent:
        wrong.append(f"{sent} sent, {answered} answered, {counted} counted")
    if files != {"service.db"}:
        wrong.append(f"files {files}")
    return wrong


def stop_often(server: Server, stops: int, attackers: int) -> str:
    """Returns a summary; prints what goes wrong."""
    (key,), failed = server.make_keys(1), 0
    for number in range(stops):
        how = SIGNALS[number % len(SIGNALS)]
        wrong = stop_under_load(server, key, how, attackers)
        failed += bool(wrong)
        for line in wrong:
            print(f"stop {number}, {how.name}: {line}", flush=True)
    tracebacks = server.log.read_text().count("Traceback")
    return f"{failed} failed, {total(server)} requests counted, {tracebacks} tracebacks"


def main() -> None:
    options = arguments(__doc__, stops=200, attackers=1)
    for name, checkout in checkouts(options).items():
        with tempfile.TemporaryDirectory() as folder:
            server = Server(Path(folder), checkout=checkout)
            print(f"{name}: {stop_often(server, options.stops, options.attackers)}", flush=True)


if __name__ == "__main__":
    main()
