"""Compare pages on a large database with those on an empty one, and see what a save holds up.

The large database has a day of usage of the keys that are used. A page's figure is the time of the
thread that serves all connections; a save's is the longest wait of a client while 2,000 keys are
saved at once, because the database was locked while they were used.
"""

import math
import os
import re
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

from servers import RawSocket, Server, arguments, checkouts

from helpers.paths import KEYS, ME, PROFILE, SECURITY, STATUS, TEST
from helpers.rawsocket import request_bytes

SAVED = 2000
FORM = {"Host": "a", "Content-Type": "application/x-www-form-urlencoded"}
PAGES = ("/", "/log-in", "/sign-up", PROFILE, SECURITY, f"{KEYS}/ID/rotate", ME)


def ask(server: Server, path: str, form: str | None = None, **headers: str) -> tuple[float, str]:
    """The milliseconds of the worker's main thread, and the body of the response."""
    thread = Path(f"/proc/{server.pids[-1]}/schedstat")  # begins with its nanoseconds
    before = int(thread.read_text().split()[0])
    with RawSocket(server.port) as client:
        named = FORM | {"Content-Length": str(len(form or ""))} | headers
        method = "GET" if form is None else "POST"
        client.send(request_bytes(path, named, method) + (form or "").encode())
        answer = client.answer()
        time.sleep(0.01)  # until the kernel has added it up
        assert answer.status in (200, 201, 303), (path, answer.status)
    return (int(thread.read_text().split()[0]) - before) / 1e6, answer.body.decode()


def pages(server: Server, key: str, cookie: str) -> dict[str, float]:
    """The milliseconds of each page of a user, and of making and revoking a key."""
    asked = {"Cookie": cookie, "X-API-Key": key}
    took = {path: ask(server, path.replace("ID", key[8:16]), **asked)[0] for path in PAGES}
    took["a new key"], page = ask(server, KEYS, "name=a&type=production", **asked)
    made = re.findall(r"sk_live_(\w{8})_\w{38}", page)[0]
    took["a revocation"], _ = ask(server, f"{KEYS}/{made}/revoke", "", **asked)
    return took


def save(server: Server, keys: list[str]) -> float:
    """The longest wait in milliseconds."""
    with closing(server.connect()) as database, RawSocket(server.port) as client:
        database.execute("BEGIN IMMEDIATE")
        for key in keys:
            assert client.request(TEST, X_API_Key=key).status == 200
        database.rollback()
        moments = [time.perf_counter()]
        while moments[-1] < moments[0] + 1:
            client.request(STATUS)
            moments.append(time.perf_counter())
    return 1000 * max(after - before for before, after in pairwise(moments))


def main() -> None:
    options = arguments(__doc__, rounds=10, stored=1_000_000, users=100_000, used=80_000)
    os.sched_setaffinity(0, {1})
    services: dict[str, tuple[Server, list[str], str]] = {}
    least: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(lambda: math.inf))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name, checkout in checkouts(options).items():
            for size, count, users in (("empty", 1, 1), ("large", options.stored, options.users)):
                server = Server(Path(folder, name, size), checkout=checkout)
                keys = server.make_keys(count, users)
                server.use_for_a_day(keys[: options.used])
                stack.enter_context(server)
                services[f"{name}, {size}"] = server, keys[:SAVED], server.log_in()
        for _ in range(options.rounds):
            for name, (server, keys, cookie) in services.items():
                waits = {"a save": save(server, keys)}
                for page, milliseconds in (pages(server, keys[0], cookie) | waits).items():
                    least[page][name] = min(least[page][name], milliseconds)
    print(f"{'ms':34}", *(f"{name:>22}" for name in services))
    for page, figures in least.items():
        print(f"{page:34}", *(f"{figures[name]:22.1f}" for name in services))


if __name__ == "__main__":
    main()
