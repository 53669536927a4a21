"""Who is admitted to a WebSocket, and how connections end, all in this process."""

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gevent
import pytest
from flask import Flask, g
from gevent import socket as gsocket
from simple_websocket import ConnectionClosed, Server
from werkzeug.test import create_environ

import auth
from models import ApiKey
from paths import ECHO, TIME
from protocol import websocket
from protocol.open_sockets import Handler
from protocol.problems import Problem
from protocol.websocket import SERVER_OPTIONS, CloseCode, Closing, WebSocket, plain_handshake
from ratelimit import Allowance
from rawsocket import PING, PONG, TEXT, UPGRADE, Frame, RawSocket, close_frame, frame
from services import Services
from sockets import serve

Serving = Callable[[Handler], Any]
EndedBy = Callable[[BaseException], RawSocket]


def test_of_two_handshakes_at_once_one_gets_the_last_place(
    app: Flask, services: Services, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PostgreSQL others have their turn while a request is counted."""
    count, how = auth.count_request, {"SERVER_PROTOCOL": "HTTP/1.1", "HTTP_X_API_KEY": key}

    def count_slowly(key: ApiKey, environ: dict[str, Any]) -> Allowance:
        gevent.sleep(0)
        return count(key, environ)

    def ask() -> int:
        with app.test_request_context(TIME, headers=UPGRADE, environ_overrides=how):
            try:
                app.preprocess_request()
            except Problem as problem:
                return problem.get_response().status_code
            gevent.idle()  # it is open while others have their turn
            return 101

    monkeypatch.setattr(auth, "count_request", count_slowly)
    services.sockets.limit_per_caller = 1
    both = [gevent.spawn(ask) for _ in range(2)]
    assert sorted(asking.get(timeout=5) for asking in both) == [101, 429]


@pytest.fixture
def ends() -> Iterator[tuple[Any, Any]]:
    here, there = gsocket.socketpair()
    for end in (here, there):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with here, there:
        yield here, there


@pytest.fixture
def accepted(ends: tuple[Any, Any]) -> Server:
    """A connection that simple-websocket has accepted, as flask-sock hands it over."""
    environ = create_environ(headers=UPGRADE)
    environ |= {"SERVER_PROTOCOL": "HTTP/1.1", "gunicorn.socket": ends[1]}
    environ = plain_handshake(environ)
    unreader = SimpleNamespace(take_buffered=bytes)  # nothing came behind the handshake
    environ["wsgi.input"] = SimpleNamespace(reader=SimpleNamespace(unreader=unreader))
    return Server(environ, **SERVER_OPTIONS)


@pytest.fixture
def peer(accepted: Server, ends: tuple[Any, Any]) -> RawSocket:
    peer = RawSocket.over(ends[0])
    assert peer.answer().status == 101
    return peer


def test_library_does_not_close_it(
    accepted: Server, peer: RawSocket, ends: tuple[Any, Any]
) -> None:
    WebSocket(accepted)
    with pytest.raises(ConnectionClosed):
        accepted.close()
    ends[1].shutdown(socket.SHUT_WR)
    assert peer.ended()


def start(accepted: Server, first: bytes = b"") -> tuple[Any, WebSocket]:
    """A greenlet that sends this and reads all; its value is the code of the close."""
    opened: list[WebSocket] = []

    def run() -> int:
        opened.append(ws := WebSocket(accepted))
        try:
            ws.send(first)
            list(ws.messages())
        except Closing as closing:
            code = ws.close(closing.code)
        return code

    serving = gevent.spawn(run)
    gevent.idle()
    return serving, opened[0]


def talk(peer: RawSocket) -> None:
    """Answer each ping with anything but a pong."""
    while True:
        assert peer.frame() == Frame(PING, b"")
        peer.send(frame(TEXT, b"not a pong"))


def test_client_is_pinged_and_lost_when_it_does_not_answer(
    accepted: Server, peer: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "PING_SECONDS", 0.05)
    monkeypatch.setattr(websocket, "STALLED_SECONDS", 0.4)
    started = time.monotonic()
    serving, _ = start(accepted)
    for _ in range(5):
        assert peer.frame() == Frame(PING, b"")
        peer.send(frame(PONG))
    pinged = time.monotonic()
    assert pinged - started > 5 * 0.05
    talking = gevent.spawn(talk, peer)
    with pytest.raises(TimeoutError):
        serving.get(timeout=5)
    talking.kill()
    assert time.monotonic() - pinged > 0.4


@pytest.mark.parametrize("before", [0, 1_000_000], ids=["much was pushed", "a frame is half sent"])
def test_push_that_does_not_fit_ends_all(accepted: Server, peer: RawSocket, before: int) -> None:
    serving, ws = start(accepted, bytes(before))
    if before:
        assert set(peer.sock.recv(100_000)) == {0}  # so that a little would fit again
    for _ in range(100):
        ws.push(b"\1" * 5000)
    assert serving.get(timeout=5) == CloseCode.ABNORMAL

    data = b""
    peer.sock.settimeout(0.1)
    with contextlib.suppress(TimeoutError):
        while more := peer.sock.recv(100_000):
            data += more
    allowed = {0} if before else {1}  # what fitted, and after it no close frame
    assert set(data) <= allowed


def test_frame_that_was_pushed_in_part_is_finished_before_the_close(
    accepted: Server, peer: RawSocket
) -> None:
    serving, ws = start(accepted)
    ws.interrupt(CloseCode.GOING_AWAY)  # is on its way
    for _ in range(100):
        ws.push(b"\1" * 5000)
    data = b""
    while not data.endswith(close := b"\x88\x02\x03\xe9"):
        data += peer.sock.recv(100_000)
    assert set(data.removesuffix(close)) == {1}
    assert len(data) % 5000 == len(close)
    peer.send(close_frame(1001))
    assert serving.get(timeout=5) == CloseCode.GOING_AWAY


@pytest.fixture
def serving(app: Flask, accepted: Server) -> Serving:
    """Serves the connection with this handler, in the greenlet that it returns."""

    def run(handler: Handler) -> None:
        with app.test_request_context(f"{ECHO}?api_key=private"):
            g.key = None
            serve(handler, accepted)

    return partial(gevent.spawn, run)


@pytest.fixture
def ended_by(
    serving: Serving, services: Services, peer: RawSocket, ends: tuple[Any, Any]
) -> EndedBy:
    """Serves with a handler that raises this; returns what the peer is left with."""

    def run(ending: BaseException) -> RawSocket:
        def handler(ws: WebSocket) -> None:
            assert list(services.sockets.open) == [ws]
            raise ending

        ends[0].shutdown(socket.SHUT_WR)  # a peer that has sent all it will
        serving(handler).get(timeout=5)
        assert not services.sockets.open, "only open sockets are kept"
        ends[1].close()
        return peer

    return run


def test_socket_that_was_admitted_while_a_stop_began_closes_with_1001(
    ended_by: EndedBy, services: Services
) -> None:
    services.sockets.shut_down()
    assert ended_by(AssertionError("it is served")).frame().close_code == 1001


def test_bug_closes_1011_and_is_logged(ended_by: EndedBy, caplog: pytest.LogCaptureFixture) -> None:
    assert ended_by(ZeroDivisionError("a bug")).frame().close_code == 1011
    assert "ZeroDivisionError" in caplog.text
    assert ECHO in caplog.text
    assert "private" not in caplog.text


@pytest.mark.parametrize("ending", [ConnectionResetError(), TimeoutError(), Closing(1006)])
def test_client_that_is_lost_is_sent_nothing_and_is_no_bug(
    ended_by: EndedBy, caplog: pytest.LogCaptureFixture, ending: BaseException
) -> None:
    caplog.set_level(logging.INFO)
    assert ended_by(ending).ended()
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert caplog.messages[-1].endswith(": 1006")


@pytest.mark.parametrize("ending", [ConnectionResetError(), Closing(CloseCode.REVOKED)])
def test_interrupt_that_comes_too_late_is_dropped(serving: Serving, ending: BaseException) -> None:
    def handler(ws: WebSocket) -> None:
        ws.interrupt(CloseCode.GOING_AWAY)
        raise ending

    serving(handler).get(timeout=5)


def test_socket_that_is_closing_is_not_interrupted(
    serving: Serving, peer: RawSocket, services: Services
) -> None:
    """A client that is slow to answer a close frame still gets all of it."""
    closing = serving(mock.Mock(side_effect=Closing(CloseCode.REVOKED)))
    assert peer.frame().close_code == 1008
    services.sockets.shut_down()
    gevent.idle()
    assert not closing.ready()
    peer.sock.close()
    closing.get(timeout=5)
