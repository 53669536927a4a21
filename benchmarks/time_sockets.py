r"""Open many time sockets and see whether each gets its update every second, and at what cost.

    RATE_LIMITS=free=100000/hour MAX_SOCKETS=9500 MAX_SOCKETS_PER_CALLER=9500 \
        taskset -c 0 .venv/bin/python app.py
    taskset -c 1 .venv/bin/python benchmarks/time_sockets.py URL KEY SERVER_PID [SOCKETS] [SECONDS]

SERVER_PID is the worker's, from the line `Booting worker with pid`. Both processes need a limit on
open files above SOCKETS. Clients offer compression, as browsers do.
"""

from __future__ import annotations

import http.client
import resource
import selectors
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

HANDSHAKE = (
    "GET /api/v1/ws/time?api_key={key} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\n"
    "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n\r\n"
)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def measure_requests(
    host: str, port: int, key: str, stop: threading.Event, out: list[float]
) -> None:
    connection = http.client.HTTPConnection(host, port)
    while not stop.wait(0.01):
        started = time.perf_counter()
        connection.request("GET", "/api/v1/protected/test", headers={"X-API-Key": key})
        connection.getresponse().read()
        out.append(time.perf_counter() - started)


def main(url: str, key: str, pid: int, count: int = 9000, seconds: int = 20) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
    before = resident_kib(pid)
    selector = selectors.DefaultSelector()
    updates: dict[socket.socket, int] = {}
    for _ in range(count):
        sock = socket.create_connection((host, port))
        sock.sendall(HANDSHAKE.format(key=key, host=host).encode())
        assert b" 101 " in sock.recv(4096)
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
        updates[sock] = 0

    def read_for(duration: float) -> None:
        end = time.monotonic() + duration
        while (left := end - time.monotonic()) > 0:
            for ready, _ in selector.select(left):
                sock = ready.fileobj
                assert isinstance(sock, socket.socket)
                updates[sock] += sock.recv(65536).count(b"time_update")

    read_for(3)
    updates = dict.fromkeys(updates, 0)
    latencies: list[float] = []
    stop = threading.Event()
    requests = threading.Thread(target=measure_requests, args=(host, port, key, stop, latencies))
    requests.start()
    cpu = cpu_seconds(pid)
    read_for(seconds)
    cpu = cpu_seconds(pid) - cpu
    grown = resident_kib(pid) - before
    stop.set()
    requests.join()
    print(
        f"{count} sockets, {seconds} s: {min(updates.values())} to {max(updates.values())} updates"
    )
    print(f"{100 * cpu / seconds:.0f} % of a core, {grown / count:.1f} KiB a socket")
    p50, p99 = (1000 * statistics.quantiles(latencies, n=100)[i] for i in (49, 98))
    print(f"/protected/test meanwhile: p50 {p50:.1f} ms, p99 {p99:.1f} ms")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *map(int, sys.argv[4:]))
