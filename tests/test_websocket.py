"""One WebSocket's server side, over a pair of sockets in this process."""

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import gevent
import pytest
from gevent import socket as gsocket
from simple_websocket import Server
from wsproto.connection import Connection, ConnectionType

from protocol import websocket
from protocol.websocket import Close, Closed, WebSocket
from rawsocket import CLOSE, PING, PONG, RESET, TEXT, Frame, RawSocket, close_frame, frame
from server.worker import OnePiece

Serve = Callable[[Callable[[WebSocket], object]], Any]


def connected(sock: Any, early: bytes = b"") -> WebSocket:
    """The server's side of a connection that was accepted; `early` came with the handshake."""
    sock = OnePiece(sock, SimpleNamespace(take_buffered=lambda: early))
    parts = SimpleNamespace(sock=sock, ws=Connection(ConnectionType.SERVER))
    return WebSocket(cast(Server, parts))


@pytest.fixture
def ends() -> Iterator[tuple[Any, Any]]:
    here, there = gsocket.socketpair()
    for end in (here, there):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with here, there:
        yield here, there


@pytest.fixture
def client(ends: tuple[Any, Any]) -> RawSocket:
    return RawSocket.over(ends[0])


@pytest.fixture
def serve(ends: tuple[Any, Any]) -> Iterator[Serve]:
    """Runs a handler in a greenlet; its value is what the handler returns, or the close code."""

    def run(handler: Callable[[WebSocket], object]) -> Any:
        ws = connected(ends[1])
        try:
            return handler(ws)
        except Closed as closed:
            return ws.close(closed.code)

    with contextlib.ExitStack() as stack:

        def start(handler: Callable[[WebSocket], object]) -> Any:
            serving = gevent.spawn(run, handler)
            stack.callback(serving.kill)
            return serving

        yield start


def everything(client: RawSocket) -> bytes:
    """What has arrived until nothing more comes."""
    data = b""
    client.sock.settimeout(0.1)
    with contextlib.suppress(TimeoutError):
        while more := client.sock.recv(100_000):
            data += more
    return data


def read_all(ws: WebSocket) -> list[str]:
    return list(ws.messages())


def test_message_frame_is_json_in_one_piece() -> None:
    data = websocket.frame(type="echo", message="é" * 100)

    assert json.loads(data[4:]) == {"type": "echo", "message": "é" * 100}
    assert len(data[4:]) == int.from_bytes(data[2:4], "big") > 200


def test_frames_that_came_with_the_handshake_come_first(ends: tuple[Any, Any]) -> None:
    first, second = frame(TEXT, b"first"), frame(TEXT, b"second")
    messages = connected(ends[1], early=first + second[:3]).messages()
    assert next(messages) == "first"

    ends[0].sendall(second[3:])
    assert next(messages) == "second"


def test_silent_client_is_pinged(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "PING_SECONDS", 0.05)
    serve(read_all)

    for _ in range(3):
        assert client.frame() == Frame(PING, b"")
        client.send(frame(PONG))


def test_client_that_answers_no_ping_is_lost(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "PING_SECONDS", 0.1)
    monkeypatch.setattr(websocket, "STALLED_SECONDS", 0.05)
    serving = serve(read_all)

    with pytest.raises(TimeoutError):
        serving.get(timeout=5)


def test_client_that_sends_anything_is_not_lost(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "PING_SECONDS", 0.15)
    monkeypatch.setattr(websocket, "STALLED_SECONDS", 0.1)
    serving = serve(read_all)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        client.send(frame(TEXT, b"here"))
        gevent.sleep(0.02)

    assert not serving.ready()


def test_client_that_reads_nothing_is_lost(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "STALLED_SECONDS", 0.1)
    serving = serve(lambda ws: ws.send(bytes(5_000_000)))

    with pytest.raises(TimeoutError):
        serving.get(timeout=5)


def test_connection_that_was_reset_is_lost_though_input_is_left() -> None:
    """The kernel keeps no input of a reset connection, but wsproto may have much of it."""
    messages = (f"{number:03}".encode() for number in itertools.count())
    with gsocket.create_server(("127.0.0.1", 0)) as listener:
        client = gsocket.create_connection(listener.getsockname())
        sock, _ = listener.accept()
    client.setsockopt(*RESET)
    with sock:
        ws = connected(sock)
        client.sendall(b"".join(frame(TEXT, next(messages)) for _ in range(1000)))
        received = ws.messages()
        assert next(received) == "000"
        client.close()
        with pytest.raises(OSError, match="reset"):
            list(itertools.islice(received, 500))


def test_large_message_arrives_whole_at_a_slow_reader(serve: Serve, client: RawSocket) -> None:
    serving = serve(lambda ws: ws.send(b"x" * 300_000))
    read = 0
    while read < 300_000:
        gevent.sleep(0)
        read += len(client.read(10_000))

    serving.get(timeout=5)
    assert read == 300_000


def test_pushed_frame_arrives_at_once(serve: Serve, client: RawSocket) -> None:
    serve(lambda ws: ws.push(websocket.frame(type="news")))

    assert client.frame().json() == {"type": "news"}


def test_push_that_does_not_fit_ends_the_connection_at_once(
    serve: Serve, client: RawSocket
) -> None:
    def push_on(ws: WebSocket) -> None:
        while True:
            ws.push(bytes(5000))
            gevent.sleep(0)

    assert serve(push_on).get(timeout=5) == Close.ABNORMAL
    data = everything(client)  # what fitted, and after it no close frame
    assert data == bytes(len(data))


def test_push_into_a_half_sent_frame_ends_the_connection(serve: Serve, client: RawSocket) -> None:
    open_sockets: list[WebSocket] = []

    def send(ws: WebSocket) -> None:
        open_sockets.append(ws)
        ws.send(bytes(1_000_000))

    serving = serve(send)
    gevent.sleep(0.02)
    open_sockets[0].push(b"torn")

    assert serving.get(timeout=5) == Close.ABNORMAL
    data = everything(client)
    assert data == bytes(len(data))


def test_push_to_a_client_that_left_ends_the_connection(serve: Serve, client: RawSocket) -> None:
    def push_late(ws: WebSocket) -> None:
        client.sock.close()
        ws.push(b"too late")
        read_all(ws)

    assert serve(push_late).get(timeout=5) == Close.ABNORMAL


def test_ended_from_outside_sends_the_code(serve: Serve, client: RawSocket) -> None:
    open_sockets: list[WebSocket] = []

    def read(ws: WebSocket) -> None:
        open_sockets.append(ws)
        read_all(ws)

    serve(read)
    gevent.sleep(0.01)
    open_sockets[0].end(Close.REVOKED)
    assert client.frame().close_code == Close.REVOKED


def end_in_the_middle_of_a_frame(serve: Serve, code: int) -> Any:
    open_sockets: list[WebSocket] = []

    def send(ws: WebSocket) -> None:
        open_sockets.append(ws)
        ws.send(websocket.frame(message="x" * 300_000))

    serving = serve(send)
    gevent.sleep(0.02)
    open_sockets[0].end(code)
    return serving


def test_ended_in_the_middle_of_a_frame_finishes_it_before_the_close(
    serve: Serve, client: RawSocket
) -> None:
    serving = end_in_the_middle_of_a_frame(serve, Close.GOING_AWAY)

    assert len(client.frame().json()["message"]) == 300_000
    assert client.frame().close_code == Close.GOING_AWAY
    client.sock.close()
    assert serving.get(timeout=5) == Close.GOING_AWAY


def test_ended_in_a_frame_that_nobody_reads_is_1006(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "CLOSE_SECONDS", 0.05)
    serving = end_in_the_middle_of_a_frame(serve, Close.GOING_AWAY)

    assert serving.get(timeout=5) == Close.ABNORMAL


def test_client_that_answers_no_close_is_left_in_time(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.tcp.DRAIN_SECONDS", 0.05)
    serving = serve(read_all)
    client.send(close_frame(1000))

    assert serving.get(timeout=5) == 1000
    assert client.frame() == Frame(CLOSE, (1000).to_bytes(2, "big"))


def test_input_that_never_ends_leaves_others_their_turn() -> None:
    """A thousand messages are one read. After each message everybody else has a turn."""
    turns = 0

    def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            gevent.sleep(1e-6)

    def read_a_thousand() -> None:
        here, there = gsocket.socketpair()
        with here, there:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            here.sendall(frame(TEXT, b"x") * 1000)
            list(itertools.islice(connected(there).messages(), 1000))

    other = gevent.spawn(count_turns)
    gevent.joinall([gevent.spawn(read_a_thousand) for _ in range(3)], raise_error=True)
    other.kill()

    assert turns > 900
