"""Who is admitted to a WebSocket, and how each connection ends, without a server."""

import logging
import socket
from collections.abc import Callable, Iterator
from typing import cast

import gevent
import pytest
from flask import Flask, g

from auth import Guard
from models import ApiKey
from protocol.problems import Problem
from protocol.websocket import Close, Closed, WebSocket
from ratelimit import Allowance
from rawsocket import CLOSE, UPGRADE, Frame, RawSocket
from sockets import OpenSockets, serve
from test_websocket import accepted


class OpenSocket:
    """Stands in for a WebSocket; remembers how it was interrupted."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def interrupt(self, code: int) -> None:
        self.codes.append(code)


def refusal(room: OpenSockets, caller: str) -> tuple[int, str]:
    """Status and code with which the caller is refused."""
    with pytest.raises(Problem) as refused:
        room.reserve(caller)
    response = refused.value.get_response()
    assert int(response.headers["Retry-After"]) >= 1
    return response.status_code, response.get_json()["code"]


# Room


def test_caller_and_server_have_a_limit() -> None:
    room = OpenSockets(limit=3, limit_per_caller=2)
    room.reserve("ada")
    room.reserve("ada")
    assert refusal(room, "ada") == (429, "too_many_sockets")
    room.reserve("grace")
    assert refusal(room, "mary") == (503, "too_many_sockets")


def test_ended_keys_and_a_stop_close_their_sockets() -> None:
    room = OpenSockets(limit=9, limit_per_caller=9)
    one, two, grace, echo = sockets = [OpenSocket() for _ in range(4)]
    for ws, key_id in zip(sockets, ("ada", "ada", "grace", None), strict=True):
        room.key_ids[cast(WebSocket, ws)] = key_id
    assert room.keys() == {"ada", "grace"}

    room.end({"ada", "nobody"})
    assert one.codes == two.codes == [Close.REVOKED]
    assert grace.codes == echo.codes == []

    room.shut_down()
    assert grace.codes == echo.codes == [Close.GOING_AWAY]
    assert refusal(room, "mary") == (503, "too_many_sockets")


# Handshakes


@pytest.fixture
def handshake(app: Flask) -> Callable[..., int]:
    """Asks for a WebSocket; returns the status after a moment in which the socket is open."""

    def ask(path: str, address: str = "127.0.0.1", **headers: str) -> int:
        environ = {"REMOTE_ADDR": address, "SERVER_PROTOCOL": "HTTP/1.1"}
        named = UPGRADE | {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            with app.test_request_context(path, headers=named, environ_overrides=environ):
                app.preprocess_request()
                gevent.sleep(0.02)
                return 101
        except Problem as problem:
            return problem.get_response().status_code

    return ask


Handshake = Callable[..., int]


def test_echo_sockets_are_capped_by_caller_and_time_sockets_by_key(
    app: Flask, handshake: Handshake, key: str
) -> None:
    app.extensions["sockets"].limit_per_caller = 1
    requests = [
        ("/api/v1/ws/echo", "2001:db8:1:2::3", {}, 101),
        ("/api/v1/ws/echo", "2001:db8:1:2::4", {}, 429),  # of the same /64
        ("/api/v1/ws/echo", "2001:db8:1:3::3", {}, 101),
        ("/api/v1/ws/time", "2001:db8:1:2::3", {"X_API_Key": key}, 101),
        ("/api/v1/ws/time", "192.0.2.1", {"X_API_Key": key}, 429),
    ]
    asked = [gevent.spawn(handshake, path, who, **key) for path, who, key, _ in requests]
    gevent.joinall(asked)
    assert [asking.value for asking in asked] == [status for *_, status in requests]
    assert handshake("/api/v1/ws/echo", "2001:db8:1:2::4") == 101, "there is room again"


def test_of_two_handshakes_at_once_one_gets_the_last_place(
    app: Flask, handshake: Handshake, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PostgreSQL others have their turn while a request is counted."""
    app.extensions["sockets"].limit_per_caller = 1
    spend = Guard.spend

    def spend_slowly(guard: Guard, key: ApiKey, cost: int = 1) -> Allowance:
        gevent.sleep(0.01)
        return spend(guard, key, cost)

    monkeypatch.setattr(Guard, "spend", spend_slowly)
    both = [gevent.spawn(handshake, "/api/v1/ws/time", X_API_Key=key) for _ in range(2)]
    gevent.joinall(both)
    assert sorted(asking.value for asking in both) == [101, 429]


def test_handshake_that_cannot_be_counted_leaves_its_place(
    app: Flask, handshake: Handshake, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.extensions["sockets"].limit_per_caller = 1
    spend = Guard.spend

    def use_up(guard: Guard, key: ApiKey, cost: int = 1) -> Allowance:
        if cost:
            raise Problem(429, "rate_limited", "It was the last request.")
        return spend(guard, key, cost)

    with monkeypatch.context() as patch:
        patch.setattr(Guard, "spend", use_up)
        assert handshake("/api/v1/ws/time", X_API_Key=key) == 429
    assert handshake("/api/v1/ws/time", X_API_Key=key) == 101


# Endings


@pytest.fixture
def ended_by(app: Flask) -> Iterator[Callable[[BaseException], RawSocket]]:
    """Serve a handler that raises the given exception; returns what the client is left with."""
    here, there = socket.socketpair()
    here.shutdown(socket.SHUT_WR)  # a client that has sent all it will

    def run(ending: BaseException) -> RawSocket:
        def handler(ws: WebSocket) -> None:
            assert list(app.extensions["sockets"].key_ids) == [ws]
            raise ending

        server = accepted(there)
        with app.test_request_context("/api/v1/ws/echo?api_key=private"):
            g.key = None
            serve(handler, server)
        assert not app.extensions["sockets"].key_ids, "only open sockets are kept"
        there.close()
        client = RawSocket.over(here)
        assert client.answer().status == 101
        return client

    with here, there:
        yield run


EndedBy = Callable[[BaseException], RawSocket]


def test_bug_closes_1011_and_is_logged_without_the_query(
    ended_by: EndedBy, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert ended_by(ending).ended()
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert caplog.messages[-1].endswith(": 1006")


@pytest.mark.parametrize("code", [1008, 4000])
def test_any_close_code_is_sent_and_logged(
    ended_by: EndedBy, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """So a new one is one entry in `Close`."""
    caplog.set_level(logging.INFO)
    assert ended_by(Closed(code)).frame() == Frame(CLOSE, code.to_bytes(2, "big"))
    assert caplog.messages[-1].endswith(f": {code}")
