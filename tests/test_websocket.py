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

from protocol import websocket as channel
from protocol.websocket import GONE, REVOKED, Channel, Closed
from rawsocket import CLOSE, PING, PONG, TEXT, Frame, RawSocket, close_frame, frame

Serve = Callable[[Callable[[Channel], object]], Any]


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
    """Runs a talk with a channel, as a handler does; its value is how it ended."""

    def run(talk: Callable[[Channel], object]) -> Any:
        parts = SimpleNamespace(sock=ends[1], ws=Connection(ConnectionType.SERVER))
        served = Channel(cast(Server, parts))
        try:
            return talk(served)
        except Closed as closed:
            served.close(closed)
            return closed

    with contextlib.ExitStack() as stack:

        def start(talk: Callable[[Channel], object]) -> Any:
            serving = gevent.spawn(run, talk)
            stack.callback(serving.kill)
            return serving

        yield start


def everything(client: RawSocket) -> bytes:
    """What has arrived until nothing more comes."""
    data = b""
    client.sock.settimeout(0.1)
    with contextlib.suppress(TimeoutError):
        while True:
            data += client.sock.recv(100_000)
    return data


def listen(served: Channel) -> list[str]:
    return list(served.texts())


def test_message_frame_is_json_in_one_piece() -> None:
    data = channel.frame(type="echo", message="é" * 100)

    assert json.loads(data[4:]) == {"type": "echo", "message": "é" * 100}
    assert len(data[4:]) == int.from_bytes(data[2:4], "big") > 200


def test_silent_client_is_pinged(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PING_SECONDS", 0.05)
    serve(listen)

    for _ in range(3):
        assert client.frame() == Frame(PING, b"")
        client.send(frame(PONG))


def test_client_that_answers_no_ping_is_gone(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PING_SECONDS", 0.1)
    monkeypatch.setattr(channel, "STUCK_SECONDS", 0.05)
    serving = serve(listen)

    assert serving.get(timeout=5).code == GONE


def test_client_that_says_anything_is_alive(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PING_SECONDS", 0.15)
    monkeypatch.setattr(channel, "STUCK_SECONDS", 0.1)
    serving = serve(listen)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        client.send(frame(TEXT, b"here"))
        gevent.sleep(0.02)

    assert not serving.ready()


def test_client_that_takes_nothing_is_gone(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "STUCK_SECONDS", 0.1)
    serving = serve(lambda served: served.send(bytes(5_000_000)))

    with pytest.raises(TimeoutError):
        serving.get(timeout=5)


def test_large_message_arrives_whole_at_a_slow_reader(serve: Serve, client: RawSocket) -> None:
    serving = serve(lambda served: served.send(b"x" * 300_000))
    read = 0
    while read < 300_000:
        gevent.sleep(0)
        read += len(client.read(10_000))

    serving.get(timeout=5)
    assert read == 300_000


def test_pushed_frame_arrives_at_once(serve: Serve, client: RawSocket) -> None:
    serve(lambda served: served.push(channel.frame(type="news")))

    assert client.frame().json() == {"type": "news"}


def test_push_to_a_full_client_waits_for_nobody_and_ends_it(
    serve: Serve, client: RawSocket
) -> None:
    def talk(served: Channel) -> None:
        while True:
            served.push(bytes(5000))
            gevent.sleep(0)

    closed = serve(talk).get(timeout=5)

    assert closed.code == GONE
    data = everything(client)  # what fitted, and after it no close frame
    assert data == bytes(len(data))


def test_push_into_a_half_sent_message_ends_it(serve: Serve, client: RawSocket) -> None:
    channels: list[Channel] = []

    def talk(served: Channel) -> None:
        channels.append(served)
        served.send(bytes(1_000_000))

    serving = serve(talk)
    gevent.sleep(0.02)
    channels[0].push(b"torn")

    assert serving.get(timeout=5).code == GONE
    data = everything(client)
    assert data == bytes(len(data))


def test_push_to_a_client_that_left_ends_it(serve: Serve, client: RawSocket) -> None:
    def talk(served: Channel) -> None:
        client.sock.close()
        served.push(b"too late")
        listen(served)

    assert serve(talk).get(timeout=5).code == GONE


def test_ended_from_outside_it_says_why(serve: Serve, client: RawSocket) -> None:
    channels: list[Channel] = []

    def talk(served: Channel) -> None:
        channels.append(served)
        listen(served)

    serve(talk)
    gevent.sleep(0.01)
    channels[0].end(REVOKED)
    assert client.frame().close_code == REVOKED


def test_client_that_answers_no_close_is_left_after_a_second(
    serve: Serve, client: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "GOODBYE_SECONDS", 0.05)
    serving = serve(listen)
    client.send(close_frame(1000))

    assert serving.get(timeout=5).code == 1000
    assert client.frame() == Frame(CLOSE, (1000).to_bytes(2, "big"))


def test_input_that_never_ends_leaves_others_their_turn() -> None:
    """A thousand messages are one read for the server; so are those of its other clients."""
    turns = 0

    def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            gevent.sleep(1e-6)

    def listen_to_a_thousand() -> None:
        here, there = gsocket.socketpair()
        with here, there:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            here.sendall(frame(TEXT, b"x") * 1000)
            parts = SimpleNamespace(sock=there, ws=Connection(ConnectionType.SERVER))
            list(itertools.islice(Channel(cast(Server, parts)).texts(), 1000))

    other = gevent.spawn(count_turns)
    gevent.joinall([gevent.spawn(listen_to_a_thousand) for _ in range(3)], raise_error=True)
    other.kill()

    assert turns > 2700
