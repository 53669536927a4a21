"""Who gets a socket and how each ends, over a pair of sockets in this process."""

import logging
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from flask import Flask, g
from simple_websocket import Server
from wsproto.connection import Connection, ConnectionType
from wsproto.utilities import LocalProtocolError

from protocol.problems import Problem
from protocol.websocket import Channel, Closed
from rawsocket import CLOSE, RawSocket
from sockets import Crowd, serve


class Listener:
    """In place of a channel: remembers how it was ended."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def end(self, code: int) -> None:
        self.codes.append(code)


@pytest.fixture
def room() -> Crowd:
    """Room for three, and for two of each caller."""
    return Crowd(limit=3, limit_per_caller=2)


@pytest.fixture
def enter(room: Crowd) -> Callable[[str], Listener]:
    """Lets channels in: `enter("ada")`."""

    def let_in(caller: str) -> Listener:
        room.check(caller)
        listener = Listener()
        room.callers[cast(Channel, listener)] = caller
        return listener

    return let_in


def refusal(room: Crowd, caller: str) -> tuple[int | None, str]:
    """Status and code with which the caller is refused."""
    with pytest.raises(Problem) as refused:
        room.check(caller)
    response = refused.value.get_response()
    assert int(response.headers["Retry-After"]) >= 1
    return refused.value.get_response().status_code, response.get_json()["code"]


def test_third_socket_of_a_caller_is_one_too_many(
    room: Crowd, enter: Callable[..., Listener]
) -> None:
    enter("ada")
    enter("ada")

    assert refusal(room, "ada") == (429, "too_many_sockets")
    room.check("grace")


def test_fourth_socket_of_all_is_one_too_many(room: Crowd, enter: Callable[..., Listener]) -> None:
    for caller in ("ada", "grace", "joan"):
        enter(caller)

    assert refusal(room, "mary") == (503, "too_many_sockets")


def test_end_reaches_one_caller_only(room: Crowd, enter: Callable[..., Listener]) -> None:
    one, two, other = enter("ada"), enter("ada"), enter("grace")
    room.end(1008, "ada")
    room.end(1008, "nobody")

    assert (one.codes, two.codes, other.codes) == ([1008], [1008], [])


def test_end_without_a_caller_reaches_all(room: Crowd, enter: Callable[..., Listener]) -> None:
    listeners = [enter("ada"), enter("grace")]
    room.end(1001)

    assert [listener.codes for listener in listeners] == [[1001], [1001]]


@pytest.fixture
def talk_ends(app: Flask) -> Iterator[Callable[[BaseException], RawSocket]]:
    """Serve a talk that ends with the given exception; returns what the client is left with."""
    here, there = socket.socketpair()
    here.shutdown(socket.SHUT_WR)  # a client that has said all it will

    def run(ending: BaseException) -> RawSocket:
        def talk(channel: Channel) -> None:
            raise ending

        server = SimpleNamespace(sock=there, ws=Connection(ConnectionType.SERVER), connected=True)
        with app.test_request_context("/api/v1/ws/echo?api_key=private"):
            g.caller = "ada"
            serve(talk)(cast(Server, server))
        assert not server.connected
        assert not app.extensions["crowd"].callers, "whoever leaves makes room"
        there.close()
        return RawSocket.over(here)

    with here, there:
        yield run


def test_bug_closes_1011_and_is_logged_without_the_query(
    talk_ends: Callable[[BaseException], RawSocket], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client = talk_ends(ZeroDivisionError("a bug"))

    assert client.frame().close_code == 1011
    assert client.ended()
    assert "ZeroDivisionError" in caplog.text
    assert "/api/v1/ws/echo" in caplog.text
    assert "private" not in caplog.text


@pytest.mark.parametrize(
    "ending", [ConnectionResetError(), TimeoutError(), LocalProtocolError("closed"), Closed(1006)]
)
def test_client_that_is_gone_is_sent_nothing_and_is_no_bug(
    talk_ends: Callable[[BaseException], RawSocket],
    caplog: pytest.LogCaptureFixture,
    ending: BaseException,
) -> None:
    caplog.set_level(logging.INFO)
    client = talk_ends(ending)

    assert client.ended()
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert caplog.messages[-1].endswith(": 1006")


def test_reason_is_sent_and_logged(
    talk_ends: Callable[[BaseException], RawSocket],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    client = talk_ends(Closed(1008))

    assert client.frame() == (CLOSE, (1008).to_bytes(2, "big"))
    assert caplog.messages[-1].endswith(": 1008")
