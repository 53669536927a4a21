"""Open many time sockets: does each get its update every second, and what do they cost?

Clients offer compression, as browsers do, and answer pings. The share of a core is that of the
sockets alone; requests are timed beside them afterwards. It needs a limit on open files that is
above the number of sockets.
"""

import os
import resource
import selectors
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from servers import RawSocket, Server, arguments, checkouts

from helpers.load import waits
from helpers.paths import TIME
from helpers.rawsocket import PING, PONG, frame

COMPRESSED = {"Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits"}


def updates(selector: selectors.BaseSelector, seconds: float) -> list[int]:
    """How many each client gets in this time."""
    counts = dict.fromkeys((key.data for key in selector.get_map().values()), 0)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            received = key.data.frame()
            counts[key.data] += b"time_update" in received.payload
            if received.opcode == PING:
                key.data.send(frame(PONG, received.payload))
    return list(counts.values())


def measure(server: Server, count: int, seconds: float) -> str:
    """The clients run on one core; if there are several workers, they share the sockets."""
    os.sched_setaffinity(0, {1})
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    (key,) = server.make_keys(1)
    with server, selectors.DefaultSelector() as selector, ExitStack() as stack:
        mib = server.memory_mib()
        for number in range(1, count + 1):
            client = stack.enter_context(RawSocket(server.port))
            assert client.handshake(f"{TIME}?api_key={key}", COMPRESSED).status == 101
            selector.register(client.sock, selectors.EVENT_READ, client)
            if number % 100 == 0 or number == count:
                updates(selector, 0.2)  # also answers pings
        spent = server.processor_seconds()
        got = updates(selector, seconds)
        spent = server.processor_seconds() - spent
        kib = 1024 * (server.memory_mib() - mib) / count
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(waits, server.port, key, int(100 * seconds))
            got += updates(selector, seconds)
            times = asked.result()
            p99 = 1000 * times[len(times) * 99 // 100]
    return (
        f"{count:,} in {100 * spent / seconds:.0f} % of a core, {kib:.1f} KiB each; "
        f"{min(got)} to {max(got)} updates in {seconds:.0f} s; a request: p99 {p99:.0f} ms"
    )


def main() -> None:
    options = arguments(__doc__, sockets=9000, seconds=60, rounds=1)
    limits = dict.fromkeys(["MAX_SOCKETS", "MAX_SOCKETS_PER_CALLER"], str(options.sockets))
    for _ in range(options.rounds):
        for name, checkout in checkouts(options).items():
            with tempfile.TemporaryDirectory() as folder:
                server = Server(Path(folder), checkout=checkout, **limits)
                print(f"{name}: {measure(server, options.sockets, options.seconds)}", flush=True)


if __name__ == "__main__":
    main()
