"""Both WebSockets over real connections, with exact close codes."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import websockets.asyncio.client
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from conftest import StartServer
from rawsocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Answer,
    RawSocket,
    close_frame,
    frame,
    handshake_bytes,
    request_bytes,
)
from serving import Server, eventually

ECHO, TIME = "/api/v1/ws/echo", "/api/v1/ws/time"
MAX_BYTES = 65_536
MILLISECONDS = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
DISPLAY = "%Y-%m-%d %H:%M:%S UTC"


def next_message(ws: ClientConnection) -> Any:
    return json.loads(ws.recv(timeout=5))


def rest_of(ws: ClientConnection) -> Iterator[str]:
    """The messages until the server closes; fails when it lets ten go by."""
    with contextlib.suppress(ConnectionClosed):
        for _ in range(10):
            yield ws.recv(timeout=5, decode=True)
        pytest.fail("the server does not close")


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


@contextlib.contextmanager
def flooding(server: Server, data: bytes) -> Iterator[None]:
    """Meanwhile an echo socket sends without a pause, and takes all answers."""

    def pump(step: Callable[[], object]) -> None:
        with contextlib.suppress(OSError):
            while step() != b"":
                pass

    with RawSocket(server.port) as client:
        sock = client.open(ECHO).sock
        steps = (lambda: sock.sendall(data), lambda: sock.recv(1 << 20))
        threads = [threading.Thread(target=pump, args=(step,)) for step in steps]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


class TestEcho:
    def test_a_message_comes_back_with_the_time(self, server: Server) -> None:
        with connect(server.ws_url + ECHO) as ws:
            ws.send("hello, wörld")
            reply = next_message(ws)

        assert list(reply) == ["type", "message", "timestamp", "server_time"]
        assert (reply["type"], reply["message"]) == ("echo", "hello, wörld")
        assert MILLISECONDS.fullmatch(reply["timestamp"])
        assert datetime.strptime(reply["server_time"], DISPLAY)

    @pytest.mark.parametrize(
        "text", ["", "\0", '"\\/\u2028', "🜂" * 10, "a" * MAX_BYTES, "é" * (MAX_BYTES // 2)]
    )
    def test_any_text_comes_back_as_sent(self, server: Server, text: str) -> None:
        with connect(server.ws_url + ECHO) as ws:
            ws.send(text)
            assert next_message(ws)["message"] == text

    def test_a_thousand_mixed_messages_come_back_in_order(self, server: Server) -> None:
        sizes = [0, 1, 125, 126, 127, MAX_BYTES - 1, MAX_BYTES]
        sizes += [random.randrange(20_000) for _ in range(1000 - len(sizes))]
        random.shuffle(sizes)
        sent = [f"{number:04}".ljust(size, "x")[:size] for number, size in enumerate(sizes)]

        async def talk() -> list[str]:
            url = server.ws_url + ECHO
            async with websockets.asyncio.client.connect(url, max_size=1 << 20) as ws:

                async def send_all() -> None:
                    for text in sent:
                        await ws.send(text)

                sending = asyncio.create_task(send_all())
                replies = [json.loads(await ws.recv())["message"] for _ in sent]
                await sending
                return replies

        assert asyncio.run(talk()) == sent

    def test_many_unread_messages_come_back_whole(self, server: Server) -> None:
        """Far more than the kernel buffers: the server waits for the reader, and for nobody."""
        with RawSocket(server.port, receive_buffer=4096) as client:
            client.open(ECHO)
            payload = b"x" * MAX_BYTES
            client.sock.settimeout(0.5)
            waiting = b""
            sent = 0
            try:
                while sent < 200:
                    waiting = frame(TEXT, payload)
                    while waiting:
                        waiting = waiting[client.sock.send(waiting) :]
                    sent += 1
            except TimeoutError:
                pass  # back-pressure: the server takes no more before this client reads
            client.sock.settimeout(10)
            assert sent < 200

            assert all(len(client.frame().json()["message"]) == MAX_BYTES for _ in range(sent))

    def test_a_client_that_never_reads_is_cut_off_and_costs_little(self, server: Server) -> None:
        memory, gone = resident_kib(server.worker_pid), len(server.log_lines(": 1006"))
        with RawSocket(server.port, receive_buffer=4096) as client:
            client.open(ECHO)
            client.sock.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.send(frame(TEXT, b"x" * MAX_BYTES) * 1000)
            full = time.monotonic()
            client.sock.settimeout(15)
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                client.send(bytes(50_000_000))
            assert 5 < time.monotonic() - full < 12

        assert resident_kib(server.worker_pid) - memory < 4096
        eventually(lambda: len(server.log_lines(": 1006")) > gone)

    def test_a_client_that_floods_lets_others_have_their_turn(self, server: Server) -> None:
        latencies, deadline = [], time.monotonic() + 1
        with flooding(server, frame(TEXT, b"x" * 100) * 1000), RawSocket(server.port) as other:
            while time.monotonic() < deadline:
                started = time.monotonic()
                assert other.request("/api/v1/status").status == 200
                latencies.append(time.monotonic() - started)

        assert sorted(latencies)[len(latencies) // 2] < 0.1

    @pytest.mark.parametrize("opcode", [TEXT, PING])
    def test_a_client_that_floods_lets_other_sockets_talk(
        self, server: Server, opcode: int
    ) -> None:
        latencies = []
        with flooding(server, frame(opcode, b"x") * 500), RawSocket(server.port) as other:
            other.open(ECHO)
            for _ in range(20):
                started = time.monotonic()
                other.send(frame(TEXT, b"hi"))
                assert other.frame().opcode == TEXT
                latencies.append(time.monotonic() - started)
            other.send(close_frame(1000))
            assert other.frame().payload == struct.pack("!H", 1000)

        assert sorted(latencies)[10] < 0.1, "typical"
        assert max(latencies) < 1


class TestFraming:
    """RFC 6455 parts 5 to 8, with the close code each violation has."""

    @pytest.mark.parametrize(
        ("sent", "code"),
        [
            pytest.param(frame(TEXT, b"hi", masked=False), 1002, id="unmasked"),
            pytest.param(frame(TEXT, b"hi", reserved=4), 1002, id="reserved bit 1"),
            pytest.param(frame(TEXT, b"hi", reserved=2), 1002, id="reserved bit 2"),
            pytest.param(frame(TEXT, b"hi", reserved=1), 1002, id="reserved bit 3"),
            pytest.param(frame(PING, b"hi", reserved=4), 1002, id="reserved bit on a ping"),
            *(pytest.param(frame(op), 1002, id=f"opcode {op}") for op in (3, 7, 11, 15)),
            pytest.param(frame(CONTINUATION, b"x"), 1002, id="nothing to continue"),
            pytest.param(
                frame(TEXT, b"a", fin=False) + frame(TEXT, b"b"), 1002, id="text inside a text"
            ),
            pytest.param(frame(PING, b"x", fin=False), 1002, id="ping in pieces"),
            pytest.param(frame(PING, b"x" * 126), 1002, id="oversized ping"),
            pytest.param(frame(PONG, b"x" * 126), 1002, id="oversized pong"),
            pytest.param(frame(CLOSE, b"\x03\xe8" + b"x" * 124), 1002, id="oversized close"),
            pytest.param(frame(CLOSE, b"\x03"), 1002, id="half a close code"),
            pytest.param(close_frame(1000, b"\xff"), 1007, id="close reason not UTF-8"),
            *(
                pytest.param(close_frame(code), 1002, id=f"close code {code}")
                for code in (0, 999, 1004, 1005, 1006, 1015, 2999, 5000)
            ),
            *(
                pytest.param(close_frame(code), code, id=f"close code {code}")
                for code in (1000, 1001, 1011, 3000, 4999)
            ),
            pytest.param(frame(TEXT, b"\xff"), 1007, id="not UTF-8"),
            pytest.param(frame(TEXT, b"\xed\xa0\x80"), 1007, id="a surrogate"),
            pytest.param(frame(TEXT, b"\xc3"), 1007, id="half a character"),
            pytest.param(frame(BINARY, b"hi"), 1003, id="binary"),
            pytest.param(frame(BINARY), 1003, id="empty binary"),
            pytest.param(frame(TEXT, b"x" * (MAX_BYTES + 1)), 1009, id="too big"),
            pytest.param(frame(TEXT, b"x" * 20_000_000), 1009, id="much too big"),
            pytest.param(
                frame(TEXT, b"x" * MAX_BYTES, fin=False) + frame(CONTINUATION, b"y"),
                1009,
                id="too big in pieces",
            ),
            pytest.param(frame(TEXT, "é".encode() * 32_769), 1009, id="too many bytes"),
        ],
    )
    def test_the_server_closes(self, server: Server, sent: bytes, code: int) -> None:
        with RawSocket(server.port) as client:
            client.open(ECHO)
            client.send(sent)

            assert client.frame().close_code == code
            assert client.ended()

    def test_a_close_without_a_code_is_answered_without(self, server: Server) -> None:
        with RawSocket(server.port) as client:
            client.open(ECHO).send(close_frame())

            assert client.frame() == (CLOSE, b"")
            assert client.ended()

    @pytest.mark.parametrize(
        "frames",
        [
            [frame(TEXT, b"whole")],
            [frame(TEXT, b"who", fin=False), frame(CONTINUATION, b"le")],
            [frame(TEXT, b"", fin=False), frame(CONTINUATION, b"whole")],
            [frame(TEXT, b"whole", fin=False), frame(CONTINUATION, b"")],
            [frame(PONG, b"unasked"), frame(TEXT, b"whole")],
            [bytes([byte]) for byte in frame(TEXT, b"whole")],
        ],
        ids=["one", "two", "empty first", "empty last", "after a pong", "byte by byte"],
    )
    def test_a_text_in_any_pieces_is_whole(self, server: Server, frames: list[bytes]) -> None:
        with RawSocket(server.port) as client:
            client.open(ECHO)
            client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in frames:
                client.send(piece)

            assert client.frame().json()["message"] == "whole"

    def test_a_character_may_be_cut_in_two(self, server: Server) -> None:
        first, second = "é".encode()[:1], "é".encode()[1:]
        with RawSocket(server.port) as client:
            client.open(ECHO)
            client.send(frame(TEXT, first, fin=False) + frame(CONTINUATION, second))

            assert client.frame().json()["message"] == "é"

    def test_a_ping_inside_a_message_is_answered_at_once(self, server: Server) -> None:
        with RawSocket(server.port) as client:
            client.open(ECHO)
            client.send(frame(TEXT, b"a", fin=False) + frame(PING, b"?"))
            assert client.frame() == (PONG, b"?")

            client.send(frame(CONTINUATION, b"b"))
            assert client.frame().json()["message"] == "ab"

    def test_each_message_may_be_as_big_as_the_last(self, server: Server) -> None:
        half = b"x" * (MAX_BYTES // 2)
        with RawSocket(server.port) as client:
            client.open(ECHO)
            for _ in range(3):
                client.send(frame(TEXT, half, fin=False) + frame(CONTINUATION, half))
                assert len(client.frame().json()["message"]) == MAX_BYTES

    def test_open_and_close_are_logged(self, server: Server) -> None:
        with RawSocket(server.port) as client:
            client.open(ECHO).send(close_frame(4321))
            assert client.frame().close_code == 4321

        eventually(lambda: server.log_lines(": 4321"))
        assert re.search(rf"closed {ECHO} after \d+\.\d s: 4321\n", server.log())
        assert server.log_lines(f"open {ECHO}")

    def test_a_client_that_vanishes_is_logged_as_gone(self, server: Server) -> None:
        before = len(server.log_lines(": 1006"))
        with RawSocket(server.port) as client:
            client.open(ECHO)

        eventually(lambda: len(server.log_lines(": 1006")) > before)


class TestHandshake:
    @pytest.mark.parametrize(
        ("changes", "status", "code"),
        [
            ({"Sec-WebSocket-Key": None}, 400, "bad_handshake"),
            ({"Sec-WebSocket-Key": "short"}, 400, "bad_handshake"),
            ({"Sec-WebSocket-Key": "AAAA"}, 400, "bad_handshake"),
            ({"Sec-WebSocket-Key": "\xe9" * 24}, 400, "bad_handshake"),
            ({"Sec-WebSocket-Version": None}, 400, "bad_handshake"),
            ({"Sec-WebSocket-Version": "8"}, 426, "upgrade_required"),
            ({"Sec-WebSocket-Version": "13, 8"}, 426, "upgrade_required"),
            ({"Host": None}, 400, "bad_handshake"),
            ({"Host": ""}, 400, "bad_handshake"),
            ({"Host": "\xe9"}, 400, "bad_handshake"),
            ({"Connection": "keep-alive"}, 400, "bad_handshake"),
            ({"Content-Length": "1"}, 400, "bad_handshake"),
            ({"Sec-WebSocket-Protocol": "chat, \xff"}, 400, "bad_handshake"),
            ({"Upgrade": "h2c"}, 426, "upgrade_required"),
        ],
    )
    @pytest.mark.parametrize("path", [ECHO, TIME])
    def test_broken_is_refused(
        self,
        server: Server,
        server_key: str,
        path: str,
        changes: dict[str, str | None],
        status: int,
        code: str,
    ) -> None:
        with RawSocket(server.port) as client:
            answer = client.handshake(path, {"X-API-Key": server_key, **changes})

        assert (answer.status, answer.json()["code"]) == (status, code)
        assert answer.headers["Content-Type"] == "application/problem+json"
        if status == 426:
            assert answer.headers["Upgrade"] == "websocket"

    def test_another_version_is_told_the_right_one(self, server: Server) -> None:
        with RawSocket(server.port) as client:
            answer = client.handshake(ECHO, {"Sec-WebSocket-Version": "8"})

        assert (answer.status, answer.headers["Sec-WebSocket-Version"]) == (426, "13")

    def test_a_client_that_vanishes_meanwhile_is_no_bug(self, start_server: StartServer) -> None:
        server = start_server()
        reset = struct.pack("ii", 1, 0)
        for _ in range(20):
            with RawSocket(server.port) as client:
                client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                client.send(handshake_bytes(ECHO))
        with RawSocket(server.port) as client:
            assert client.request("/api/v1/status").status == 200

        assert "bug" not in server.log()
        assert "Traceback" not in server.log()

    def test_http_1_0_is_refused(self, server: Server) -> None:
        with RawSocket(server.port) as client:
            answer = client.handshake(ECHO, version="HTTP/1.0")

        assert (answer.status, answer.json()["code"]) == (400, "bad_handshake")

    def test_there_is_no_socket_at_a_rest_path(self, server: Server) -> None:
        with RawSocket(server.port) as client:
            answer = client.handshake("/api/v1/status")

        assert (answer.status, answer.json()["code"]) == (400, "bad_request")
        assert answer.json()["detail"] == "There is no WebSocket at this path."

    @pytest.mark.parametrize(
        "changes",
        [
            {"Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits"},
            {"Sec-WebSocket-Extensions": "permessage-deflate; server_max_window_bits=99"},
            {"Sec-WebSocket-Extensions": ";;==,\xff"},
            {"Sec-WebSocket-Protocol": "no token"},
            {"Sec-WebSocket-Protocol": "a(b"},
            {"Connection": "Upgrade, \xff"},
            {"Origin": "https://elsewhere.example"},
            {"Connection": "keep-alive, UPGRADE", "Upgrade": "WebSocket"},
            {"X-Odd": "\xff"},
        ],
    )
    def test_what_is_offered_in_vain_does_no_harm(
        self, server: Server, changes: dict[str, str | None]
    ) -> None:
        with RawSocket(server.port) as client:
            answer = client.handshake(ECHO, changes)

            assert answer.status == 101
            assert "Sec-WebSocket-Extensions" not in answer.headers
            assert "Sec-WebSocket-Protocol" not in answer.headers
            client.send(frame(TEXT, b"hi"))
            assert client.frame().json()["message"] == "hi"


class TestTime:
    def test_five_updates_show_five_consecutive_seconds(
        self, server: Server, server_key: str
    ) -> None:
        with connect(f"{server.ws_url}{TIME}?api_key={server_key}") as ws:
            assert next_message(ws) == {"type": "auth_success", "api_key_name": "shared key"}
            greeted = time.monotonic()
            updates = [next_message(ws)]
            waited = time.monotonic() - greeted
            updates += [next_message(ws) for _ in range(4)]

        assert waited < 0.2 + 0.1
        assert all(list(update) == ["type", "formatted", "timestamp"] for update in updates)
        assert {update["type"] for update in updates} == {"time_update"}
        seconds = [datetime.strptime(update["formatted"], DISPLAY) for update in updates]
        assert seconds == [seconds[0] + timedelta(seconds=number) for number in range(5)]
        for second, update in zip(seconds, updates, strict=True):
            assert MILLISECONDS.fullmatch(update["timestamp"])
            assert update["timestamp"].startswith(second.isoformat())
            assert 100 <= int(update["timestamp"][-4:-1]) <= 900 + 50

    def test_the_key_may_come_in_a_header(self, server: Server, server_key: str) -> None:
        headers = {"X-API-Key": server_key}
        with connect(server.ws_url + TIME, additional_headers=headers) as ws:
            assert next_message(ws)["type"] == "auth_success"

    def test_what_the_client_says_is_ignored(self, server: Server, server_key: str) -> None:
        with RawSocket(server.port) as client:
            client.open(f"{TIME}?api_key={server_key}")
            client.send(frame(TEXT, b"hi") * 50 + frame(PING, b"?"))
            frames = [client.frame() for _ in range(3)]

        texts = [json.loads(found.payload)["type"] for found in frames if found.opcode == TEXT]
        assert (PONG, b"?") in frames
        assert texts == ["auth_success", "time_update"]

    @pytest.mark.parametrize(
        ("query", "code"),
        [
            ("", "missing_api_key"),
            ("?api_key=", "missing_api_key"),
            ("?api_key=nonsense", "invalid_api_key"),
            ("?api_key=%ff%fe", "invalid_api_key"),
        ],
    )
    def test_without_a_good_key_there_is_no_upgrade(
        self, server: Server, query: str, code: str
    ) -> None:
        with pytest.raises(InvalidStatus) as refused, connect(server.ws_url + TIME + query):
            pass

        response = refused.value.response
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == 'ApiKey realm="api", header="X-API-Key"'
        assert json.loads(response.body)["code"] == code

    def test_opening_counts_once_and_messages_do_not(self, server: Server) -> None:
        key = server.new_key()
        with connect(f"{server.ws_url}{TIME}?api_key={key}") as ws:
            assert [next_message(ws)["type"] for _ in range(3)][-1] == "time_update"
            with RawSocket(server.port) as client:
                stats = client.request("/api/v1/usage/stats", X_API_Key=key).json()

        assert stats["total_requests"] == 2

    def test_over_the_limit_there_is_no_upgrade(self, server: Server) -> None:
        key = server.new_key(tier="five")
        answers: list[Answer] = []
        while not answers or answers[-1].status == 101:
            with RawSocket(server.port) as client:
                answers.append(client.handshake(f"{TIME}?api_key={key}"))

        assert (answers[-1].status, answers[-1].json()["code"]) == (429, "rate_limited")
        assert answers[-1].headers["RateLimit"].startswith('"five";r=0;t=')
        assert int(answers[-1].headers["Retry-After"]) >= 1
        assert len(answers) >= 6

    def test_revoking_the_key_closes_within_two_seconds(self, server: Server) -> None:
        key, bystander = server.new_key(), server.new_key()
        url = f"{server.ws_url}{TIME}?api_key="
        with connect(url + key) as ws, connect(url + bystander) as other:
            assert next_message(ws)["type"] == "auth_success"
            server.flask("key", "revoke", key[8:16])
            revoked = time.monotonic()
            assert all(json.loads(text)["type"] == "time_update" for text in rest_of(ws))
            assert time.monotonic() - revoked < 2
            assert ws.close_code == 1008
            assert [next_message(other)["type"] for _ in range(5)][-1] == "time_update"


class TestCaps:
    @pytest.mark.one_process("each process caps its own sockets")
    def test_too_many_of_one_caller_and_of_all(self, start_server: StartServer) -> None:
        server = start_server(MAX_SOCKETS="3", MAX_SOCKETS_PER_CALLER="2")
        key, other_key = server.new_key(), server.new_key()

        def ask(path: str) -> RawSocket:
            client = RawSocket(server.port)
            clients.append(client)
            return client

        clients: list[RawSocket] = []
        try:
            echo = ask(ECHO).open(ECHO)
            ask(ECHO).open(ECHO)
            refused = ask(ECHO).handshake(ECHO)
            assert (refused.status, refused.json()["code"]) == (429, "too_many_sockets")
            assert int(refused.headers["Retry-After"]) >= 1

            ask(TIME).open(f"{TIME}?api_key={key}")
            full = ask(TIME).handshake(f"{TIME}?api_key={other_key}")
            assert (full.status, full.json()["code"]) == (503, "too_many_sockets")
            assert int(full.headers["Retry-After"]) >= 1
            assert full.headers["X-RateLimit-Remaining"] == "1000"  # it was not counted

            echo.send(close_frame(1000))
            assert echo.frame().close_code == 1000

            def room_again() -> bool:
                return ask(TIME).handshake(f"{TIME}?api_key={other_key}").status == 101

            eventually(room_again)
        finally:
            for client in clients:
                client.sock.close()

    @pytest.mark.one_process("each process caps its own sockets")
    def test_time_sockets_are_capped_by_key(self, start_server: StartServer) -> None:
        server = start_server(MAX_SOCKETS_PER_CALLER="1")
        first, second = (f"{TIME}?api_key={server.new_key()}" for _ in range(2))
        with RawSocket(server.port) as one, RawSocket(server.port) as two:
            one.open(first)
            assert two.handshake(first).status == 429
            two.open(second)

    def test_none_allowed_means_none(self, start_server: StartServer) -> None:
        server = start_server(MAX_SOCKETS="0")
        with RawSocket(server.port) as client:
            assert client.handshake(ECHO).status == 503
            assert client.request("/api/v1/status").status == 200


class TestUpgrade:
    @pytest.mark.parametrize(
        "upgrade", ["h2c, websocket", "websocket, h2c", "h2c,WebSocket", "websocket"]
    )
    def test_websocket_among_other_protocols_is_accepted(
        self, server: Server, upgrade: str
    ) -> None:
        with RawSocket(server.port) as client:
            client.open(ECHO, {"Upgrade": upgrade}).send(frame(TEXT, b"hi"))
            assert client.frame().json()["message"] == "hi"

    def test_frames_in_the_packet_of_the_handshake_are_answered(self, server: Server) -> None:
        texts = ["first", "x" * 60_000, "last"]
        frames = b"".join(frame(TEXT, text.encode()) for text in texts)
        with RawSocket(server.port) as client:
            client.send(handshake_bytes(ECHO) + frames)
            assert client.answer().status == 101
            assert [client.frame().json()["message"] for _ in texts] == texts

    def test_close_in_the_packet_of_the_handshake_is_answered(self, server: Server) -> None:
        with RawSocket(server.port) as client:
            client.send(handshake_bytes(ECHO) + close_frame(1000))
            assert client.answer().status == 101
            assert client.frame().close_code == 1000
            assert client.ended()

    def test_request_behind_a_refused_handshake_is_answered(self, server: Server) -> None:
        """What comes with a handshake is frames only if the handshake is accepted."""
        with RawSocket(server.port) as client:
            client.send(handshake_bytes(TIME) + request_bytes("/api/v1/status", {"Host": "a"}))
            assert client.answer().status == 401
            assert client.answer().status == 200

    @pytest.mark.parametrize(("offered", "chosen"), [("chat", "chat"), ("b, a", "b")])
    def test_first_subprotocol_that_is_offered_is_accepted(
        self, server: Server, offered: str, chosen: str
    ) -> None:
        with connect(server.ws_url + ECHO, subprotocols=parse(offered)) as ws:
            assert ws.subprotocol == chosen
            ws.send("hi")
            assert next_message(ws)["message"] == "hi"


def parse(offered: str) -> list[Subprotocol]:
    return [Subprotocol(name) for name in offered.split(", ")]


class TestChangedByHand:
    @pytest.mark.parametrize(
        "change",
        [
            "DELETE FROM api_key WHERE id = ?",
            "UPDATE api_key SET expires_at = 1 WHERE id = ?",
            'DELETE FROM "user" WHERE id IN (SELECT user_id FROM api_key WHERE id = ?)',
        ],
    )
    def test_time_sockets_of_a_key_that_is_gone_close_within_two_seconds(
        self, start_server: StartServer, change: str
    ) -> None:
        server = start_server()
        key = server.new_key()
        with RawSocket(server.port) as client:
            client.open(f"{TIME}?api_key={key}")
            assert client.frame().json()["type"] == "auth_success"
            with contextlib.closing(sqlite3.connect(server.database)) as database, database:
                database.execute(change, (key[8:16],))
            changed = time.monotonic()
            frames = [client.frame()]
            while frames[-1].opcode != CLOSE:
                frames.append(client.frame())
            assert time.monotonic() - changed < 2
            assert frames[-1].close_code == 1008


class TestBlockedEcho:
    """SIGTERM while an echo is blocked in the middle of a frame."""

    @pytest.fixture
    def blocked(self, start_server: StartServer) -> Iterator[tuple[Server, RawSocket]]:
        server = start_server()
        with RawSocket(server.port, receive_buffer=4096) as client:
            client.open(ECHO)
            client.sock.settimeout(0.5)
            unsent = frame(TEXT, b"x" * MAX_BYTES) * 200
            with contextlib.suppress(TimeoutError):
                while unsent:
                    unsent = unsent[client.sock.send(unsent) :]
            assert unsent, "the server takes no more"
            client.sock.settimeout(10)
            yield server, client

    def test_frame_is_finished_and_1001_sent_to_a_client_that_reads(
        self, blocked: tuple[Server, RawSocket]
    ) -> None:
        server, client = blocked
        os.kill(server.pid, signal.SIGTERM)
        frames = [client.frame()]
        while frames[-1].opcode == TEXT:
            assert len(frames[-1].json()["message"]) == MAX_BYTES
            frames.append(client.frame())

        assert frames[-1].close_code == 1001
        assert server.wait() == 0
        assert server.log_lines(": 1001")

    def test_1006_is_logged_for_a_client_that_does_not_read(
        self, blocked: tuple[Server, RawSocket]
    ) -> None:
        server, _ = blocked
        assert server.stop()[0] == 0
        assert server.log_lines(": 1006")
        assert not server.log_lines(": 1001")
