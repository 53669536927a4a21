"""Both WebSockets over real connections, with exact close codes."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import time

import pytest
from websockets.sync.client import connect

from conftest import StartServer
from helpers.paths import ECHO, TIME
from helpers.rawsocket import (
    BINARY,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    RawSocket,
    closing,
    frame,
    handshake_bytes,
)
from helpers.server import (
    REPOSITORY,
    USER_ID,
    Server,
    bash,
    eventually,
    find_program,
    patience,
    serve_command,
)
from ws.connection import REASONS

MAX_BYTES = 65_536
HALF = b"x" * (MAX_BYTES // 2)


def test_a_thousand_mixed_messages_come_back_in_order(server: Server) -> None:
    sizes = [
        *(0, 1, 125, 126, 127, MAX_BYTES - 1, MAX_BYTES),
        *(random.randrange(20_000) for _ in range(1000)),
    ]
    sent = [f"{number:04}".ljust(size, "x")[:size] for number, size in enumerate(sizes)]
    sent += ["\0", " a\r\n", "\n ", '"\\/\u2028', "🜂" * 10, "é" * (MAX_BYTES // 2)]
    random.shuffle(sent)
    with connect(server.ws_url + ECHO) as ws:
        # This client reads nothing while a send of it waits, so it sends what the kernel takes.
        for part in (sent[start : start + 50] for start in range(0, len(sent), 50)):
            for message in part:
                ws.send(message)
            assert [json.loads(ws.recv(timeout=30))["message"] for _ in part] == part, (
                "messages come back whole and in order: see `messages` and `_flush`"
            )


@pytest.mark.parametrize("sent", [frame(TEXT, b"x" * MAX_BYTES), frame(PING, b"x" * 125)])
def test_client_that_never_reads(start_patched: StartServer, sent: bytes) -> None:
    server = start_patched("from ws import connection; connection.STALLED_SECONDS = 1")
    with RawSocket(server.port, receive_buffer=4096).open(ECHO) as client:
        before = server.resident_kib
        client.fill(sent * (MAX_BYTES // len(sent) + 1), 0.5, limit=100_000_000)
        assert server.resident_kib - before < 4096, "while it is still connected"
        client.sock.settimeout(15)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.send(bytes(50_000_000))
    eventually(
        lambda: server.log_lines(": 1006"), what="the close of a client that is lost is logged"
    )


def test_kernel_keeps_128_kib_of_a_connection_in_each_direction(
    server: Server, server_key: str
) -> None:
    """However fast the client is, or was before it stopped to read."""
    before = server.resident_kib
    with RawSocket(server.port).open(f"{TIME}?api_key={server_key}") as client:
        client.send(frame(TEXT, b"x" * MAX_BYTES) * 300)
        shown = bash(f"{find_program('ss')} -Htnm sport = :{server.port}", REPOSITORY)
    assert {*re.findall(r"[rt]b(\d+)", shown)} == {"131072"}, (
        "see SO_RCVBUF and SO_SNDBUF in lifecycle.serving"
    )
    assert server.resident_kib - before < 8192, "a handler keeps the messages that it ignores"


def test_client_that_answers_no_ping_is_lost(start_patched: StartServer) -> None:
    server = start_patched(
        "from ws import connection\nconnection.PING_SECONDS, connection.STALLED_SECONDS = 0.05, 2"
    )
    with RawSocket(server.port).open(ECHO) as client:
        started = time.monotonic()
        for _ in range(5):
            assert client.frame() == (PING, b""), "see `ping` and PING_SECONDS"
            client.send(frame(PONG))
        answered = time.monotonic()
        assert answered - started < patience(1.5), "a pong puts the next ping off by PING_SECONDS"
        client.send(frame(TEXT, b"not a pong"))
        assert [client.frame().opcode for _ in range(2)] == [TEXT, PING]
        assert client.ended(), "a client that is lost gets no close frame"
        assert time.monotonic() - answered > 2, "it has STALLED_SECONDS for its pong"


# Framing: RFC 6455 parts 5 to 8


@pytest.mark.parametrize(
    ("sent", "code", "reason"),
    [
        pytest.param(sent, code, REASONS[code], id=name)
        for name, sent, code in (
            ("unmasked", frame(TEXT, b"hi", masked=False), 1002),
            ("not UTF-8", frame(TEXT, b"\xff"), 1007),
            ("binary", frame(BINARY, b"hi"), 1003),
            ("first part of a binary", frame(BINARY, b"hi", fin=False), 1003),
            ("too big", frame(TEXT, b"x" * (MAX_BYTES + 1)), 1009),
            ("much too big", frame(TEXT, b"x" * 4_000_000), 1009),
            (
                "big pieces",
                frame(TEXT, b"x" * MAX_BYTES, fin=False) + frame(CONTINUATION, b"y", fin=False),
                1009,
            ),
            ("too many bytes", frame(TEXT, "é".encode() * 32_769), 1009),
        )
    ]
    # The answer to a close of the client has its code, and no reason.
    + [
        pytest.param(frame(*closing(code)), code, "", id=f"closed with {code}")
        for code in (None, 1000, 1008, 4999)
    ],
)
def test_close_has_its_code_and_its_reason(
    server: Server, sent: bytes, code: int | None, reason: str
) -> None:
    with RawSocket(server.port).open(ECHO) as client:
        client.send(sent + frame(PING))  # which an open socket answers
        assert client.frame() == closing(code, reason), (
            "close it at once, in `messages` or `_events` of ws/connection.py"
        )
        assert client.ended(), "something follows the close frame: see _events in ws/connection.py"


@pytest.mark.parametrize(
    ("pieces", "answers"),
    [
        ([frame(TEXT, b"\xc3", fin=False), frame(CONTINUATION, b"\xa9")], ["é"]),
        ([frame(TEXT, "é".encode(), fin=False), frame(CONTINUATION)], ["é"]),
        ([frame(PONG, b"unasked"), frame(TEXT, "é".encode())], ["é"]),
        ([bytes([byte]) for byte in frame(TEXT, "é".encode())], ["é"]),
        (
            [frame(TEXT, HALF, fin=False), frame(PING, b"?"), frame(CONTINUATION, HALF)],
            [b"?", str(HALF * 2, "ascii")],
        ),
    ],
    ids=["bytes of a letter", "nothing at the end", "pong", "packets", "ping inside"],
)
def test_a_text_in_any_pieces_is_whole(
    server: Server, pieces: list[bytes], answers: list[str | bytes]
) -> None:
    """And so is the next one, which may be as large. A ping inside is answered first."""
    with RawSocket(server.port).open(ECHO) as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces * 2:
            client.send(piece)
        frames = [client.frame() for _ in answers * 2]
    said = [each.payload if each.opcode == PONG else each.json()["message"] for each in frames]
    assert said == answers * 2, "see `messages` and `_events` in ws/connection.py"


@pytest.mark.parametrize("path", [ECHO, TIME])
@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"Sec-WebSocket-Key": None}, 400, "bad_handshake"),
        ({"Sec-WebSocket-Key": "\xe9" * 24}, 400, "bad_handshake"),
        ({"Sec-WebSocket-Key": "A" * 21 + "=="}, 400, "bad_handshake"),
        ({"Sec-WebSocket-Version": None}, 400, "bad_handshake"),
        ({"Sec-WebSocket-Version": "8"}, 426, "upgrade_required"),
        ({"Sec-WebSocket-Version": "13, 8"}, 426, "upgrade_required"),
        ({"Host": None}, 400, "bad_handshake"),
        ({"Host": "\xe9"}, 400, "bad_handshake"),
        ({"Host": "a" * 256}, 400, "bad_handshake"),
        ({"Connection": "keep-alive"}, 400, "bad_handshake"),
        ({"Content-Length": "1"}, 400, "bad_handshake"),
        ({"Transfer-Encoding": "chunked"}, 400, "bad_handshake"),
        ({"Upgrade": "h2c"}, 426, "upgrade_required"),
        ({"Upgrade": None, "Connection": None}, 426, "upgrade_required"),
    ],
)
def test_broken_handshake_is_refused(
    server: Server, path: str, changes: dict[str, str | None], status: int, code: str
) -> None:
    """Before the key is looked for, so it is not counted."""
    answer = server.send(handshake_bytes(path, changes))
    assert (answer.status, f'"{code}"' in str(answer.body)) == (status, True), (
        f"{answer}: see `check_handshake`"
    )
    if status == 426:
        assert (
            answer.headers.items()
            >= {
                "Upgrade": "websocket",
                "Sec-WebSocket-Version": "13",
                "Connection": "upgrade",
            }.items()
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits"},
        {"Sec-WebSocket-Extensions": ";;==,\xff"},
        {"Sec-WebSocket-Protocol": "no token"},
        {"Connection": "Upgrade, \xff"},
        {"Origin": "https://elsewhere.example"},
        {"Connection": "keep-alive, UPGRADE", "Upgrade": "WebSocket"},
        {"Upgrade": "h2c, websocket"},
        {"X-Odd": "\xff"},
        {"Host": "a" * 255, "Content-Length": "0"},
        {"Host": "my_host:8000"},
        {"Host": "[::1]:8000"},
    ],
)
def test_odd_handshake_and_the_frames_in_its_packet_are_answered(
    server: Server, changes: dict[str, str | None]
) -> None:
    texts = ["first", "x" * 60_000, "last"]
    frames = b"".join(frame(TEXT, text.encode()) for text in texts) + frame(*closing(1000))
    with RawSocket(server.port) as client:
        client.send(handshake_bytes(ECHO, changes) + frames)
        answer = client.answer()
        assert answer.status == 101, f"{changes} is refused: see tokens, HANDSHAKE: {answer}"
        assert not {"Sec-WebSocket-Extensions", "Sec-WebSocket-Protocol"} & answer.headers.keys(), (
            "it agrees to a compression, or a protocol: see plain_handshake"
        )
        assert [client.frame().json()["message"] for _ in texts] == texts
        assert client.frame() == closing(1000)


@pytest.mark.one_process("each process caps its own sockets")
def test_too_many_of_one_caller_and_of_all(start_server: StartServer) -> None:
    """An echo socket's caller is its address, a time socket's is its key."""
    server = start_server(MAX_SOCKETS="5", MAX_SOCKETS_PER_CALLER="2", PROXY_HOPS="1")
    first, second, third = (f"{TIME}?api_key={server.new_key()}" for _ in range(3))
    server.execute("UPDATE api_key SET user_id = ?", USER_ID)  # all are keys of one user
    asked = [
        (ECHO, "2001:db8::1", 101),
        (ECHO, "2001:db8::2", 101),
        (ECHO, "2001:db8::3", 429),
        (first, "192.0.2.1", 101),
        (first, "192.0.2.1", 101),
        (first, "192.0.2.2", 429),
        (second, "192.0.2.2", 101),
        (third, "192.0.2.2", 503),
    ]
    with server.connections(len(asked)) as clients:
        for client, (path, address, expected) in zip(clients, asked, strict=True):
            answer = client.handshake(path, {"X-Forwarded-For": address})
            assert answer.status == expected, (
                f"{path} of {address}: {answer.body!r}: see `admit`, `reserve` and `release`"
            )
            assert expected == 101 or 1 <= int(answer.headers["Retry-After"]) <= 10
        clients[3].send(frame(*closing(1000)))
        eventually(lambda: clients[5].handshake(first).status == 101)
        assert clients[7].handshake(first).status == 503, (
            "one that closes makes room for one; its caller keeps the others: see `release`"
        )


@pytest.mark.one_process("each process caps its own sockets")
def test_1024_open_files_are_enough_for_384_sockets(start_server: StartServer) -> None:
    server = start_server(
        *("sh", "-c", 'ulimit -n 1024; exec "$@"', "sh", *serve_command()),
        MAX_SOCKETS_PER_CALLER="1000",
    )
    with contextlib.ExitStack() as clients:  # each asks as soon as it is connected
        assert [
            clients.enter_context(RawSocket(server.port)).handshake(ECHO).status for _ in range(385)
        ] == [101] * 384 + [503], "with 1,024 files, 384 sockets are open: see max_websockets"


def test_frame_is_finished_before_1001(start_server: StartServer) -> None:
    """SIGTERM while two echoes are blocked in the middle of a frame."""
    server = start_server()
    with RawSocket(server.port, 4096) as reading, RawSocket(server.port, 4096) as deaf:
        for client in (reading, deaf):
            client.open(ECHO).fill(frame(TEXT, b"x" * MAX_BYTES), seconds=0.5)
        os.kill(server.pid, signal.SIGTERM)
        while (found := reading.frame()).opcode == TEXT:
            assert len(found.json()["message"]) == MAX_BYTES, "a frame is cut by a stop"
        assert found == closing(1001, REASONS[1001]), "see wait_closed in ws/connection.py"
        assert server.wait() == 0, f"the status of a stop; {server.log()[-1000:]}"
    logged = re.findall(rf"\] (open|closed) {ECHO}(?: after \d+\.\d s: (\d+))?\n", server.log())
    assert [*logged[:2], *sorted(logged[2:])] == [
        *[("open", "")] * 2,
        *[("closed", "1001"), ("closed", "1006")],
    ], (
        "who reads gets the whole frame and a close frame: see wait_closed and _disconnect; both "
        "are logged when they open, and when they close: see OpenSockets.handle"
    )
