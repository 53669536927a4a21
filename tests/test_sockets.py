"""Who is admitted and how each connection ends, over a pair of sockets in this process."""

import logging
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import gevent
import pytest
from flask import Flask, g
from simple_websocket import Server
from wsproto.connection import Connection, ConnectionType

from auth import Guard
from models import Key
from protocol.problems import Problem
from protocol.websocket import Close, Closed, WebSocket
from ratelimit import Allowance
from rawsocket import CLOSE, UPGRADE, RawSocket
from server.worker import OnePiece
from sockets import OpenSockets, serve


class Listener:
    """Stands in for a WebSocket; remembers how it was ended."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def end(self, code: int) -> None:
        self.codes.append(code)


@pytest.fixture
def room() -> OpenSockets:
    """Room for three, and for two of each caller."""
    return OpenSockets(limit=3, limit_per_caller=2)


Open = Callable[[str | None], Listener]


@pytest.fixture
def opened(room: OpenSockets) -> Open:
    """Opens a socket of this key, or an echo socket."""

    def open_one(key_id: str | None) -> Listener:
        listener = Listener()
        room.key_ids[cast(WebSocket, listener)] = key_id
        return listener

    return open_one


def refusal(room: OpenSockets, caller: str) -> tuple[int, str]:
    """Status and code with which the caller is refused."""
    with pytest.raises(Problem) as refused:
        room.reserve(caller)
    response = refused.value.get_response()
    assert int(response.headers["Retry-After"]) >= 1
    return response.status_code, response.get_json()["code"]


def test_third_socket_of_a_caller_is_refused(room: OpenSockets) -> None:
    room.reserve("ada")
    room.reserve("ada")

    assert refusal(room, "ada") == (429, "too_many_sockets")
    room.reserve("grace")


def test_fourth_socket_of_all_is_refused(room: OpenSockets) -> None:
    for caller in ("ada", "grace", "::1"):
        room.reserve(caller)

    assert refusal(room, "mary") == (503, "too_many_sockets")


def test_keys_are_those_with_sockets_open(room: OpenSockets, opened: Open) -> None:
    for key_id in ("ada", "ada", None):
        opened(key_id)

    assert room.keys() == {"ada"}


def test_revoking_ends_the_sockets_of_these_keys_only(room: OpenSockets, opened: Open) -> None:
    one, two, other, echo = (opened(key_id) for key_id in ("ada", "ada", "grace", None))
    room.revoke({"ada", "nobody"})

    assert one.codes == two.codes == [Close.REVOKED]
    assert other.codes == echo.codes == []


def test_shutting_down_ends_all_and_admits_no_more(room: OpenSockets, opened: Open) -> None:
    listeners = [opened("ada"), opened(None)]
    room.shut_down()

    assert [listener.codes for listener in listeners] == [[Close.GOING_AWAY], [Close.GOING_AWAY]]
    assert refusal(room, "mary") == (503, "too_many_sockets")


# Places


@pytest.fixture
def handshake(app: Flask, key: str) -> Callable[[], int]:
    """Ask for a time socket; returns the status after a moment in which the socket is open."""

    def ask() -> int:
        headers = {**UPGRADE, "X-API-Key": key}
        try:
            with app.test_request_context("/api/v1/ws/time", headers=headers):
                app.preprocess_request()
                gevent.sleep(0.02)
                return 101
        except Problem as problem:
            return problem.get_response().status_code

    return ask


def test_of_two_handshakes_at_once_one_gets_the_last_place(
    app: Flask, handshake: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PostgreSQL others have their turn while a request is counted."""
    app.extensions["sockets"].limit_per_caller = 1
    spend = Guard.spend

    def spend_slowly(guard: Guard, key: Key, cost: int = 1) -> Allowance:
        gevent.sleep(0.01)
        return spend(guard, key, cost)

    monkeypatch.setattr(Guard, "spend", spend_slowly)
    both = gevent.joinall([gevent.spawn(handshake), gevent.spawn(handshake)])

    assert sorted(asked.value for asked in both) == [101, 429]
    assert handshake() == 101, "the place is free again"


def test_handshake_that_cannot_be_counted_leaves_its_place(
    app: Flask, handshake: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    app.extensions["sockets"].limit_per_caller = 1
    spend = Guard.spend

    def use_up(guard: Guard, key: Key, cost: int = 1) -> Allowance:
        if cost:
            raise Problem(429, "rate_limited", "It was the last request.")
        return spend(guard, key, cost)

    with monkeypatch.context() as patch:
        patch.setattr(Guard, "spend", use_up)
        assert handshake() == 429

    assert handshake() == 101


# Endings


@pytest.fixture
def ended_by(app: Flask) -> Iterator[Callable[[BaseException], RawSocket]]:
    """Serve a handler that raises the given exception; returns what the client is left with."""
    here, there = socket.socketpair()
    here.shutdown(socket.SHUT_WR)  # a client that has sent all it will

    def run(ending: BaseException) -> RawSocket:
        def handler(ws: WebSocket) -> None:
            raise ending

        sock = OnePiece(there, SimpleNamespace(take_buffered=bytes))
        server = SimpleNamespace(sock=sock, ws=Connection(ConnectionType.SERVER), connected=True)
        with app.test_request_context("/api/v1/ws/echo?api_key=private"):
            g.key = None
            serve(handler, cast(Server, server))
        assert not server.connected
        assert not app.extensions["sockets"].key_ids, "only open sockets are kept"
        there.close()
        return RawSocket.over(here)

    with here, there:
        yield run


EndedBy = Callable[[BaseException], RawSocket]


def test_bug_closes_1011_and_is_logged_without_the_query(
    ended_by: EndedBy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client = ended_by(ZeroDivisionError("a bug"))

    assert client.frame().close_code == 1011
    assert client.ended()
    assert "ZeroDivisionError" in caplog.text
    assert "/api/v1/ws/echo" in caplog.text
    assert "private" not in caplog.text


@pytest.mark.parametrize("ending", [ConnectionResetError(), TimeoutError(), Closed(1006)])
def test_client_that_is_lost_is_sent_nothing_and_is_no_bug(
    ended_by: EndedBy, caplog: pytest.LogCaptureFixture, ending: BaseException
) -> None:
    caplog.set_level(logging.INFO)
    client = ended_by(ending)

    assert client.ended()
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert caplog.messages[-1].endswith(": 1006")


def test_close_code_is_sent_and_logged(ended_by: EndedBy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client = ended_by(Closed(Close.REVOKED))

    assert client.frame() == (CLOSE, (Close.REVOKED).to_bytes(2, "big"))
    assert caplog.messages[-1].endswith(": 1008")
