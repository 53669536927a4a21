"""Hostile clients. Each function attacks 127.0.0.1:port for a moment; it is called repeatedly.

They end with OSError when the server closes the connection, as it should do with most of them.

    python benchmarks/attacks.py PORT [NAME ...]     attack with some of them, or with all, for ever
"""

import os
import random
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from hashlib import sha256

RESET = (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
UPGRADE = (
    b"GET /api/v1/ws/echo HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
TEXT, PING, HALF = 0x81, 0x89, 0x01


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def open_echo(port: int) -> socket.socket:
    sock = connect(port)
    sock.sendall(UPGRADE)
    if b" 101 " not in sock.recv(4096):
        sock.close()
        raise OSError("refused")
    return sock


def frame(kind: int, payload: bytes) -> bytes:
    """A masked frame; the mask is zero."""
    size = len(payload)
    head = bytes([kind, 128 + size]) if size < 126 else struct.pack("!BBH", kind, 254, size)
    return head + bytes(4) + payload


def head(*headers: str, target: str = "POST /api/v1/status") -> bytes:
    return "\r\n".join([f"{target} HTTP/1.1", "Host: a", *headers, "", ""]).encode()


def pump(port: int, first: bytes, then: bytes, seconds: float = 2) -> None:
    """Send without end, and read what comes."""
    with connect(port) as sock:
        _flood(sock, first, then, seconds)


def _flood(sock: socket.socket, first: bytes, then: bytes, seconds: float = 2) -> None:
    deadline = time.monotonic() + seconds
    sock.sendall(first)
    sock.setblocking(False)
    unsent = b""
    while time.monotonic() < deadline:
        progress = 0
        with suppress(BlockingIOError):
            unsent = unsent or then
            progress = sock.send(unsent)
            unsent = unsent[progress:]
        with suppress(BlockingIOError):
            received = sock.recv(1 << 20)
            progress += len(received)
            if not received:
                raise ConnectionError("closed")
        if not progress:
            time.sleep(0.001)


def endless_chunks(port: int) -> None:
    target = random.choice(["POST /api/v1/status", "POST /log-in", "GET /", "GET /openapi.json"])
    pump(port, head("Transfer-Encoding: chunked", target=target), b"1\r\nx\r\n" * 5000)


def huge_body(port: int) -> None:
    target = random.choice(["POST /api/v1/status", "POST /log-in", "GET /"])
    pump(port, head("Content-Length: 10000000000", target=target), bytes(1 << 18))


def large_headers(port: int) -> None:
    pump(port, b"", head(*["X: " + "y" * 8000] * 98, target="GET /api/v1/status"))


def small_headers(port: int) -> None:
    pump(port, b"", head(*["X: y"] * 98, target="GET /api/v1/status") * 50)


def one_byte_chunks(port: int) -> None:
    target = random.choice(["GET /", "GET /api/v1/status"])
    chunked = head("Transfer-Encoding: chunked", target=target)
    pump(port, b"", chunked + b"1\r\nx\r\n" * 2000 + b"0\r\n\r\n")


def hostile_headers(port: int) -> None:
    """Headers that some parsers read in quadratic time, or that are simply long."""
    lines = [
        f'Cookie: a={" " * 8000}"x;',
        f"Cookie: {';' * 8000}",
        f"Cookie: {'session=a; ' * 700}",
        f"If-None-Match: {'a,' * 4000}",
        f"X-Forwarded-For: {'1.2.3.4,' * 1000}",
        f"X-Forwarded-For: {chr(34) * 8000}",
    ]
    pump(port, b"", head(*[random.choice(lines)] * 3, target="GET /log-in") * 4)


def long_hosts(port: int) -> None:
    pump(port, b"", f"GET / HTTP/1.1\r\nHost: {'a' * 8000}\r\n\r\n".encode() * 20)


def malformed_headers(port: int) -> None:
    for _ in range(50):
        with connect(port) as sock:
            sock.sendall(head("X: " + "\1" * 8000, "Y: " + "\1" * 8000))
            while sock.recv(4096):
                pass


def discarded_bodies(port: int) -> None:
    pump(port, b"", head("Content-Length: 16384", target="GET /api/v1/status") + bytes(16384))


def pipelined(port: int) -> None:
    pump(port, b"", head(target="GET /api/v1/status") * 500)


def pipelined_pages(port: int) -> None:
    pump(port, b"", head(target="GET /") * 50 + head(target="GET /openapi.json") * 50)


def echo_flood(port: int) -> None:
    with open_echo(port) as sock:
        _flood(sock, b"", frame(random.choice([TEXT, PING]), b"x") * 2000)


def large_echo_flood(port: int) -> None:
    with open_echo(port) as sock:
        _flood(sock, b"", frame(TEXT, b"x" * 65_000) * 4)


def fragment_flood(port: int) -> None:
    with open_echo(port) as sock:
        _flood(sock, frame(HALF, b""), frame(0, b"") * 5000)


def half_messages(port: int) -> None:
    for _ in range(50):
        with open_echo(port) as sock:
            sock.sendall(frame(HALF, b"x" * 65_000))
            if random.random() < 0.5:
                sock.sendall(frame(0x88, b"\x03\xe8"))
                sock.recv(4096)


def frames_and_reset(port: int) -> None:
    with ExitStack() as stack, suppress(OSError):
        for _ in range(50):
            sock = stack.enter_context(open_echo(port))
            sock.setsockopt(*RESET)
            sock.settimeout(0.05)
            with suppress(TimeoutError):
                sock.sendall(frame(TEXT, b"") * 20_000)


def unread_responses(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", port))
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.send(head(target="GET /openapi.json") * 500)
        time.sleep(3)


def slow_headers(port: int) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(port)) for _ in range(100)]
        for byte in head(target="GET /api/v1/status")[:30]:
            for sock in socks:
                sock.send(bytes([byte]))
            time.sleep(0.1)


def idle_connections(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(connect(port))
            time.sleep(0.002)
        time.sleep(0.5)


def reconnects(port: int) -> None:
    for _ in range(200):
        with connect(port) as sock:
            sock.setsockopt(*RESET)
            sock.sendall(head(target="GET /api/v1/status"))
            if random.random() < 0.5:
                sock.recv(4096)


def unheard_responses(port: int) -> None:
    """Asks and leaves, as fast as it can."""
    for _ in range(3000):
        with connect(port) as sock:
            sock.sendall(head(target="GET /api/v1/status"))


def half_open(port: int) -> None:
    """Ends its own side at once, in the middle of a request or behind one."""
    whole = head("Content-Length: 8", target="POST /log-in") + b"name=ada"
    for _ in range(50):
        with connect(port) as sock:
            sock.sendall(whole[: random.randrange(len(whole) + 1)])
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass


def garbage(port: int) -> None:
    for _ in range(50):
        with connect(port) as sock, suppress(OSError):
            if random.random() < 0.5:
                sock.sendall(UPGRADE)
            sock.sendall(os.urandom(random.randrange(1, 10_000)))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass


def log_ins(port: int) -> None:
    form = b"username=ada&password=wrong+password"
    kind = "Content-Type: application/x-www-form-urlencoded"
    pump(port, b"", head(kind, f"Content-Length: {len(form)}", target="POST /log-in") + form)


def hostile_forms(port: int) -> None:
    """Passwords that take long to normalize, and boundaries that take long to compile."""
    form = f"username=ada&password={chr(0x0F73) * 5000}".encode()
    urlencoded = "application/x-www-form-urlencoded"
    multipart = f"multipart/form-data; boundary={random.random()}{'a' * 8000}"
    for kind in (urlencoded, multipart):
        length = f"Content-Length: {len(form)}"
        pump(port, b"", head(f"Content-Type: {kind}", length, target="POST /log-in") + form, 1)


def sign_ups(port: int) -> None:
    kind = "Content-Type: application/x-www-form-urlencoded"
    name = secrets.token_hex(8).encode()
    form = b"username=%b&email=%b@example.com&password=long+enough" % (name, name)
    pump(port, b"", head(kind, f"Content-Length: {len(form)}", target="POST /sign-up") + form)


def own_pages(port: int) -> None:
    """The page of a user with all the keys that one can have: hostile.py makes them.

    Three attackers have 18 connections for it.
    """
    cookie = f"Cookie: {os.environ.get('COOKIE', '')}"
    asked = head(cookie, target="GET /settings/security") * 20
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda _: pump(port, b"", asked), range(6)))


def preflights(port: int) -> None:
    asked = ["Origin: https://a.example", "Access-Control-Request-Method: GET"]
    pump(port, b"", head(*asked, target="OPTIONS /api/v1/protected/test") * 500)


def unknown_key() -> str:
    """A well-formed key that nobody has."""
    key = f"sk_live_{secrets.token_hex(4)}_{secrets.token_hex(16)}"
    return key + sha256(key.encode()).hexdigest()[:6]


def unknown_keys(port: int, *headers: str, path: str = "protected/test") -> None:
    """Over many connections, so that the database is asked all the time."""

    def ask(_: int) -> None:
        targets = [f"GET /api/v1/{path}" for _ in range(200)]
        asked = [head(f"X-API-Key: {unknown_key()}", *headers, target=t) for t in targets]
        pump(port, b"", b"".join(asked))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))


def unknown_keys_at_status(port: int) -> None:
    unknown_keys(port, path="status")


def unknown_keys_at_the_time_socket(port: int) -> None:
    upgrade = UPGRADE.decode().split("\r\n")[2:-2]
    unknown_keys(port, *upgrade, path="ws/time")


ATTACKS: list[Callable[[int], None]] = [
    endless_chunks,
    huge_body,
    large_headers,
    small_headers,
    hostile_headers,
    long_hosts,
    malformed_headers,
    one_byte_chunks,
    discarded_bodies,
    pipelined,
    pipelined_pages,
    echo_flood,
    large_echo_flood,
    fragment_flood,
    half_messages,
    frames_and_reset,
    unread_responses,
    slow_headers,
    idle_connections,
    reconnects,
    unheard_responses,
    half_open,
    garbage,
    log_ins,
    hostile_forms,
    sign_ups,
    own_pages,
    preflights,
    unknown_keys,
    unknown_keys_at_status,
    unknown_keys_at_the_time_socket,
]


def attack_with(attacks: list[Callable[[int], None]], port: int, seed: float) -> None:
    """Attack for ever, with less right to the processor than the measuring client has."""
    os.nice(10)
    choice = random.Random(seed)
    while True:
        with suppress(OSError):
            choice.choice(attacks)(port)
        time.sleep(0.01)


if __name__ == "__main__":
    chosen = [attack for attack in ATTACKS if attack.__name__ in (sys.argv[2:] or str(ATTACKS))]
    attack_with(chosen, int(sys.argv[1]), time.time())
