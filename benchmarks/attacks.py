"""A hostile client with eight connections, for ever: `attacks.py PORT [NAME ...]`.

Without names it makes all ATTACKS, in random order.
"""

import os
import random
import secrets
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from helpers.paths import ECHO, SECURITY, STATUS, TEST, TIME
from helpers.rawsocket import (
    CONTINUATION,
    PING,
    TEXT,
    RawSocket,
    frame,
    handshake_bytes,
    request_bytes,
)
from helpers.rawsocket import form_bytes as form

CONNECTIONS, SECONDS = 8, 2


def get(path: str = STATUS, headers: dict[str, str] | None = None, method: str = "GET") -> bytes:
    return request_bytes(path, {"Host": "a", **(headers or {})}, method)


STARTS = [f"sk_live_{secrets.token_hex(4)}_{secrets.token_hex(16)}" for _ in range(200)]
UNKNOWN = [{"X-API-Key": start + sha256(start.encode()).hexdigest()[:6]} for start in STARTS]
CHUNKED, LONG = {"Transfer-Encoding": "chunked"}, {"Content-Length": "10000000000"}
LENGTH = {"Content-Length": "16384"}
PATHS = [("GET", STATUS), ("POST", "/log-in"), ("GET", "/"), ("GET", "/openapi.json")]
HOSTILE = [  # values that some parsers read in quadratic time, or that are simply long
    *[("Cookie", f'a={" " * 8000}"x;'), ("Cookie", ";" * 8000)],
    *[
        ("Cookie", "demo_service=a; " * 500),
        ("If-None-Match", "a," * 4000),
        ("X-Forwarded-For", "1.2.3.4," * 1000),
    ],
    *[("X-Forwarded-For", '"' * 8000), ("Content-Type", f"multipart/x; boundary={'a' * 7900}")],
]
PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
USER = {"username": secrets.token_hex(8), "email": "a@b.example", "password": "long enough"}
COOKIE = {"Cookie": os.environ.get("COOKIE", "demo_service=a")}
# What each sends at first, and then without end; or nothing, and leaves.
FLOODS = {
    "endless_chunks": [(get(path, CHUNKED, how), b"1\r\nx\r\n" * 5000) for how, path in PATHS],
    "endless_bodies": [(get(path, LONG, how), bytes(1 << 18)) for how, path in PATHS],
    "large_headers": [(b"", get(headers={f"X-{n}": "y" * 8000 for n in range(98)}))],
    "small_headers": [(b"", get(headers={f"X-{n}": "y" for n in range(98)}) * 50)],
    "hostile_values": [(b"", get("/log-in", {name: value})) for name, value in HOSTILE],
    "long_hosts": [(b"", get("/", {"Host": "a" * 8000}) * 20)],
    "malformed_headers": [(get(headers={"X": "\1" * 8000, "Y": "\1" * 8000}), b"")],
    "one_byte_chunks": [(b"", get(headers=CHUNKED) + b"1\r\nx\r\n" * 2000 + b"0\r\n\r\n")],
    "small_chunks": [(get("/log-out", CHUNKED, "POST"), b"1\r\nx\r\n" * 5000)],
    "long_extensions": [(get("/log-out", CHUNKED, "POST"), b"1;x=" + b"x" * 8000 + b"\r\nx\r\n")],
    "small_packets": [(get()[:-2] + b"X: ", b"x"), (get("/log-out", LENGTH, "POST"), b"x")],
    "discarded_bodies": [(b"", get(headers=LENGTH) + bytes(16384))],
    "half_forms": [(form("/log-in", **USER)[:-9], b"")],
    "left_responses": [(get(), b"")],
    "garbage": [(os.urandom(1000), b""), (handshake_bytes(ECHO) + os.urandom(1000), b"")],
    "pipelined": [(b"", get() * 500)],
    "pipelined_pages": [(b"", get("/") * 50 + get("/openapi.json") * 50)],
    "preflights": [(b"", get(TEST, PREFLIGHT, "OPTIONS") * 500)],
    "log_ins": [(b"", form("/log-in", **USER))],
    "slow_passwords": [(b"", form("/log-in", **USER | {"password": "\u0f73" * 5000}))],
    "sign_ups": [(b"", form("/sign-up", **USER))],
    "own_pages": [(b"", get(SECURITY, COOKIE) * 20)],
    "many_fields": [(b"", form("/log-out", **dict.fromkeys(map(str, range(4000)), "")))],
    "long_queries": [(b"", handshake_bytes(f"{TIME}?{'%&' * 2000}"))],
    "left_pages": [(get("/"), b"")],
    "unknown_keys": [(b"", b"".join(get(TEST, key) for key in UNKNOWN))],
    "unknown_keys_at_status": [(b"", b"".join(get(STATUS, key) for key in UNKNOWN))],
    "unknown_keys_of_sockets": [(b"", b"".join(handshake_bytes(TIME, {**key}) for key in UNKNOWN))],
}
FRAMES = {  # the same, over an echo socket
    "echoes": [(b"", frame(kind, b"x") * 2000) for kind in (TEXT, PING)],
    "large_echoes": [(b"", frame(TEXT, b"x" * 65_000) * 4)],
    "fragments": [(frame(TEXT, fin=False), frame(CONTINUATION, fin=False) * 5000)],
    "half_messages": [(frame(TEXT, b"x" * 65_000, fin=False), b"")],
    "unread_echoes": [(frame(TEXT) * 20_000, b"")],
}
ATTACKS = {**FLOODS, **FRAMES}


def attack(port: int, name: str) -> None:
    """Send without end, and read what comes."""
    first, then = random.choice(ATTACKS[name])
    end = time.monotonic() + SECONDS
    with RawSocket(port) as client, ThreadPoolExecutor() as reader:
        if name in FRAMES:
            client.open(ECHO)
        client.send(first)
        if then:
            reader.submit(client.rest)
        try:
            while then and time.monotonic() < end:
                client.send(then)
        finally:
            client.sock.shutdown(socket.SHUT_RDWR)  # which ends the reader


def attack_for_ever(port: int, names: list[str]) -> None:
    while True:
        with suppress(OSError, AssertionError):  # refused; as an HTTP response, too
            attack(port, random.choice(names))


if __name__ == "__main__":
    os.nice(10)  # less right to the processor than the measuring client has
    port, names = int(sys.argv[1]), sys.argv[2:] or list(ATTACKS)
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        list(threads.map(attack_for_ever, [port] * CONNECTIONS, [names] * CONNECTIONS))
