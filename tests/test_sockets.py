"""Who is admitted and how each connection ends, over a pair of sockets in this process."""

import logging
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from flask import Flask, g
from simple_websocket import Server
from wsproto.connection import Connection, ConnectionType

from protocol.problems import Problem
from protocol.websocket import Close, Closed, WebSocket
from rawsocket import CLOSE, RawSocket
from server.worker import OnePiece
from sockets import Caller, OpenSockets, serve


class Listener:
    """Stands in for a WebSocket; remembers how it was ended."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def end(self, code: int) -> None:
        self.codes.append(code)


Admit = Callable[[Caller], Listener]


@pytest.fixture
def room() -> OpenSockets:
    """Room for three, and for two of each caller."""
    return OpenSockets(limit=3, limit_per_caller=2)


@pytest.fixture
def admit(room: OpenSockets) -> Admit:
    """Opens sockets: `admit(("key", "ada"))`."""

    def open_one(caller: Caller) -> Listener:
        room.check(caller)
        listener = Listener()
        room.callers[cast(WebSocket, listener)] = caller
        return listener

    return open_one


def refusal(room: OpenSockets, caller: Caller) -> tuple[int, str]:
    """Status and code with which the caller is refused."""
    with pytest.raises(Problem) as refused:
        room.check(caller)
    response = refused.value.get_response()
    assert int(response.headers["Retry-After"]) >= 1
    return response.status_code, response.get_json()["code"]


def test_third_socket_of_a_caller_is_refused(room: OpenSockets, admit: Admit) -> None:
    admit(("key", "ada"))
    admit(("key", "ada"))

    assert refusal(room, ("key", "ada")) == (429, "too_many_sockets")
    room.check(("key", "grace"))


def test_fourth_socket_of_all_is_refused(room: OpenSockets, admit: Admit) -> None:
    for caller in (("key", "ada"), ("key", "grace"), ("address", "::1")):
        admit(caller)

    assert refusal(room, ("key", "mary")) == (503, "too_many_sockets")


def test_keys_are_those_with_sockets_open(room: OpenSockets, admit: Admit) -> None:
    for caller in (("key", "ada"), ("key", "ada"), ("address", "::1")):
        admit(caller)

    assert room.keys() == {"ada"}


def test_revoking_ends_the_sockets_of_these_keys_only(room: OpenSockets, admit: Admit) -> None:
    one, two, other = admit(("key", "ada")), admit(("key", "ada")), admit(("key", "grace"))
    room.revoke({"ada", "nobody"})

    assert (one.codes, two.codes, other.codes) == ([Close.REVOKED], [Close.REVOKED], [])


def test_shutting_down_ends_all_and_admits_no_more(room: OpenSockets, admit: Admit) -> None:
    listeners = [admit(("key", "ada")), admit(("address", "::1"))]
    room.shut_down()

    assert [listener.codes for listener in listeners] == [[Close.GOING_AWAY], [Close.GOING_AWAY]]
    assert refusal(room, ("key", "mary")) == (503, "too_many_sockets")


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
            g.caller = ("key", "ada")
            serve(handler)(cast(Server, server))
        assert not server.connected
        assert not app.extensions["sockets"].callers, "a socket that has ended makes room"
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
