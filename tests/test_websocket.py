"""One WebSocket's server side, over a pair of sockets, accepted by simple-websocket itself."""

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from gevent import socket as gsocket
from simple_websocket import ConnectionClosed, Server

from protocol import websocket
from protocol.websocket import SERVER_OPTIONS, Close, Closed, WebSocket, negotiate
from rawsocket import CLOSE, PING, PONG, RESET, TEXT, UPGRADE, Frame, RawSocket, close_frame, frame

Handler = Callable[[WebSocket], object]
Serve = Callable[[Handler], Any]


def accepted(sock: Any, early: bytes = b"") -> Server:
    """A connection as flask-sock hands it over; `early` came in the packet of the handshake."""
    unreader = SimpleNamespace(take_buffered=lambda: early)
    environ = {
        "REQUEST_METHOD": "GET",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "PATH_INFO": "/",
        "SCRIPT_NAME": "",
        "QUERY_STRING": "",
        "gunicorn.socket": sock,
        "wsgi.input": SimpleNamespace(reader=SimpleNamespace(unreader=unreader)),
    }
    environ |= {f"HTTP_{name.upper().replace('-', '_')}": text for name, text in UPGRADE.items()}
    negotiate(environ)
    return Server(environ, **SERVER_OPTIONS)


def skip_handshake(sock: Any) -> RawSocket:
    client = RawSocket.over(sock)
    assert client.answer().status == 101
    return client


@pytest.fixture
def ends() -> Iterator[tuple[Any, Any]]:
    here, there = gsocket.socketpair()
    for end in (here, there):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with here, there:
        yield here, there


@pytest.fixture
def server(ends: tuple[Any, Any]) -> Server:
    return accepted(ends[1])


@pytest.fixture
def client(server: Server, ends: tuple[Any, Any]) -> RawSocket:
    return skip_handshake(ends[0])


@pytest.fixture
def serve(server: Server, client: RawSocket) -> Iterator[Serve]:
    """Runs a handler in a greenlet; its value is what the handler returns, or the close code."""

    def run(handler: Handler) -> Any:
        ws = WebSocket(server)
        try:
            return handler(ws)
        except Closed as closed:
            return ws.close(closed.code)

    with contextlib.ExitStack() as stack:

        def start(handler: Handler) -> Any:
            serving = gevent.spawn(run, handler)
            stack.callback(serving.kill)
            return serving

        yield start


def read_all(ws: WebSocket) -> list[str]:
    return list(ws.messages())


def interrupted(serve: Serve, handler: Handler, code: int) -> Any:
    """The greenlet that serves the connection, interrupted from another one while it waits."""
    opened: list[WebSocket] = []

    def remember(ws: WebSocket) -> object:
        opened.append(ws)
        return handler(ws)

    serving = serve(remember)
    gevent.sleep(0.02)
    opened[0].interrupt(code)
    return serving


def rest(client: RawSocket) -> bytes:
    """What has arrived until nothing more comes."""
    data = b""
    client.sock.settimeout(0.1)
    with contextlib.suppress(TimeoutError):
        while more := client.sock.recv(100_000):
            data += more
    return data


# What simple-websocket has to be like


def test_its_reader_does_not_read(client: RawSocket, ends: tuple[Any, Any]) -> None:
    client.send(b"for us")
    gevent.sleep(0.05)
    assert ends[1].recv(100) == b"for us"


def test_connection_that_we_have_taken_over_is_not_closed_by_it(
    server: Server, client: RawSocket, ends: tuple[Any, Any]
) -> None:
    WebSocket(server)
    with pytest.raises(ConnectionClosed):
        server.close()
    ends[1].shutdown(socket.SHUT_WR)
    assert client.ended()


# Messages


def test_message_frame_is_json_in_one_piece() -> None:
    data = websocket.frame(type="echo", message="\u00e9" * 100)
    assert json.loads(data[4:]) == {"type": "echo", "message": "\u00e9" * 100}
    assert len(data[4:]) == int.from_bytes(data[2:4], "big") > 200


def test_frames_that_came_with_the_handshake_come_first(ends: tuple[Any, Any]) -> None:
    first, second = frame(TEXT, b"first"), frame(TEXT, b"second")
    messages = WebSocket(accepted(ends[1], early=first + second[:3])).messages()
    assert next(messages) == "first"
    ends[0].sendall(second[3:])
    assert next(messages) == "second"


def test_large_frame_arrives_whole_at_a_slow_reader(serve: Serve, client: RawSocket) -> None:
    serving = serve(lambda ws: ws.send(b"x" * 300_000))
    read = 0
    while read < 300_000:
        gevent.sleep(0)
        read += len(client.read(10_000))
    serving.get(timeout=5)
    assert read == 300_000


def test_thousand_messages_in_one_read_leave_others_their_turn() -> None:
    """After each message everybody else has a turn."""
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
            list(itertools.islice(WebSocket(accepted(there)).messages(), 1000))

    other = gevent.spawn(count_turns)
    gevent.joinall([gevent.spawn(read_a_thousand) for _ in range(3)], raise_error=True)
    other.kill()
    assert turns > 900


# Clients that are lost


def test_silent_client_is_pinged_and_stays_while_it_answers(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "PING_SECONDS", 0.05)
    monkeypatch.setattr(websocket, "STALLED_SECONDS", 0.1)
    serving = serve(read_all)
    for _ in range(5):
        assert client.frame() == Frame(PING, b"")
        client.send(frame(PONG))
    assert not serving.ready()
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
    with gsocket.create_server(("127.0.0.1", 0)) as listener:
        client = gsocket.create_connection(listener.getsockname())
        sock, _ = listener.accept()
    client.setsockopt(*RESET)
    with sock:
        received = WebSocket(accepted(sock)).messages()
        skip_handshake(client).send(frame(TEXT, b"x") * 1000)
        assert next(received) == "x"
        client.close()
        with pytest.raises(OSError, match="reset"):
            list(itertools.islice(received, 500))


# Frames that are pushed from another greenlet


def test_pushed_frame_arrives_at_once(serve: Serve, client: RawSocket) -> None:
    serve(lambda ws: ws.push(websocket.frame(type="news")))
    assert client.frame().json() == {"type": "news"}


@pytest.mark.parametrize("before", [0, 1_000_000], ids=["much was pushed", "a frame is half sent"])
def test_push_that_does_not_fit_ends_the_connection_and_tears_no_frame(
    serve: Serve, client: RawSocket, before: int
) -> None:
    opened: list[WebSocket] = []

    def send(ws: WebSocket) -> None:
        opened.append(ws)
        ws.send(bytes(before))
        read_all(ws)

    serving = serve(send)
    gevent.sleep(0.02)
    for _ in range(100):
        opened[0].push(bytes(5000))
    assert serving.get(timeout=5) == Close.ABNORMAL
    data = rest(client)  # what fitted, and after it no close frame
    assert data == bytes(len(data))


def test_push_to_a_client_that_left_ends_the_connection(serve: Serve, client: RawSocket) -> None:
    def push_late(ws: WebSocket) -> None:
        client.sock.close()
        ws.push(b"too late")
        read_all(ws)

    assert serve(push_late).get(timeout=5) == Close.ABNORMAL


# The close


def test_interrupted_connection_sends_the_code(serve: Serve, client: RawSocket) -> None:
    interrupted(serve, read_all, Close.REVOKED)
    assert client.frame().close_code == Close.REVOKED


def send_much(ws: WebSocket) -> None:
    ws.send(websocket.frame(message="x" * 300_000))


def test_frame_that_was_interrupted_is_finished_before_the_close(
    serve: Serve, client: RawSocket
) -> None:
    serving = interrupted(serve, send_much, Close.GOING_AWAY)
    assert len(client.frame().json()["message"]) == 300_000
    assert client.frame().close_code == Close.GOING_AWAY
    client.sock.close()
    assert serving.get(timeout=5) == Close.GOING_AWAY


def test_frame_that_nobody_reads_ends_with_1006(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "CLOSE_SECONDS", 0.05)
    assert interrupted(serve, send_much, Close.GOING_AWAY).get(timeout=5) == Close.ABNORMAL


def test_client_that_does_not_close_its_side_is_left_in_time(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.tcp.DRAIN_SECONDS", 0.05)
    serving = serve(read_all)
    client.send(close_frame(1000))
    assert serving.get(timeout=5) == 1000
    assert client.frame() == Frame(CLOSE, (1000).to_bytes(2, "big"))
