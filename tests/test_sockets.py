"""How WebSockets end where no client can bring it about: all in this process."""

import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import urlencode

import gevent
import pytest
from flask import Flask, current_app
from gevent import socket as gsocket
from simple_websocket import ConnectionClosed, Server
from werkzeug.test import create_environ
from werkzeug.wrappers import Response

from conftest import NewKey
from helpers.described import misfits, values_of
from helpers.documents import API, SOCKETS, needs_key, resolved, socket_operations
from helpers.paths import ECHO, TEST, TIME, TOTALS
from helpers.rawsocket import PING, PONG, TEXT, UPGRADE, RawSocket, closing, frame
from helpers.server import sources
from helpers.stored import (
    HIDDEN,
    add_hidden_user,
    add_rows,
    change,
    check_beside_others,
    outage,
    row,
)
from models import now
from service.application import Service
from settings import Settings
from ws.connection import REASONS, SERVER_OPTIONS, CloseCode, WebSocket, plain_handshake
from ws.open_sockets import Handler, open_sockets_of
from ws.ticker import Ticker

# Of the headers of a refusal, those that are described.
NAMED = {"Connection", "Upgrade", "Sec-WebSocket-Version", *API["components"]["headers"]} - {
    "Cache-Control"
}


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
    return Server(plain_handshake(handshake("/", ends[1])), **SERVER_OPTIONS)


def handshake(path: str, end: Any, **headers: str) -> dict[str, Any]:
    """The WSGI environ of a client whose connection has this end."""
    unread = SimpleNamespace(take_buffered=bytes)  # nothing came behind the handshake
    return create_environ(path, headers=UPGRADE | headers) | {
        "SERVER_PROTOCOL": "HTTP/1.1",
        "gunicorn.socket": end,
        "wsgi.input": SimpleNamespace(
            read=lambda size: b"", reader=SimpleNamespace(unreader=unread)
        ),
    }


@pytest.fixture
def peer(accepted: Server, ends: tuple[Any, Any]) -> RawSocket:
    peer = RawSocket(sock=ends[0])
    assert peer.answer().status == 101
    return peer


def start(accepted: Server, first: bytes = b"") -> tuple[Any, WebSocket]:
    """A greenlet that sends this and reads all; its value is the code of the close."""
    opened: list[WebSocket] = []

    def run() -> int:
        opened.append(ws := WebSocket(accepted))
        with suppress(ConnectionClosed):
            ws.send(first)
            list(ws.messages())
        return ws.wait_closed()

    serving = gevent.spawn(run)
    gevent.idle()
    return serving, opened[0]


@pytest.mark.parametrize("kind", [TEXT, PING, PONG])
def test_each_frame_gives_others_a_turn(accepted: Server, peer: RawSocket, kind: int) -> None:
    """Also those that come in one packet, and a pong that nobody has asked for."""
    start(accepted)
    peer.send(frame(kind) * 1000 + frame(*closing(1000)))
    ended = gevent.spawn(peer.close_code)
    turns = 0
    while not ended.ready():
        turns += 1
        gevent.sleep(1e-6)
    assert turns > 500, (
        f"1,000 frames give others {turns} turns: sleep after each in _events, for TURN_SECONDS"
    )


@pytest.mark.parametrize("before", [0, 1_000_000], ids=["much was pushed", "a frame is half sent"])
def test_push_that_does_not_fit_ends_all(accepted: Server, peer: RawSocket, before: int) -> None:
    serving, ws = start(accepted, bytes(before))
    if before:
        assert set(peer.sock.recv(100_000)) == {0}  # so that a little would fit again
    for _ in range(100):
        ws.send_now(b"\1" * 5000)
    assert serving.get(timeout=30) == CloseCode.ABNORMAL

    # What fitted, and after it no close frame.
    assert {*b"".join(iter(partial(peer.sock.recv, 100_000), b""))} <= {0 if before else 1}, (
        "a frame follows what was cut: see send_now"
    )


def test_push_to_a_client_that_has_left_raises_nothing(accepted: Server, peer: RawSocket) -> None:
    """It would end the ticker of all others."""
    serving, ws = start(accepted)
    peer.sock.close()
    ws.ping()
    ws.send_now(b"late")
    assert serving.get(timeout=30) == CloseCode.ABNORMAL


@mock.patch("service.connections.CLOSE_SECONDS", 100)
@mock.patch("ws.connection.CLOSE_SECONDS", 100)
def test_nothing_follows_a_close_frame(accepted: Server, peer: RawSocket) -> None:
    """No push, no answer to a message or a ping, no second close.

    The server closes its side without waiting for the client, or for CLOSE_SECONDS.
    """
    serving, ws = start(accepted)
    ws.close(CloseCode.GOING_AWAY)
    ws.close(CloseCode.REVOKED)
    ws.ping()
    ws.send_now(b"late")
    with pytest.raises(ConnectionClosed):
        ws.send(b"late")
    assert peer.frame() == closing(1001, REASONS[1001]), (
        "the close frame comes at once, with the code of the first close: see WebSocket.close"
    )
    peer.send(frame(PING) + frame(TEXT, b"hi"))
    assert peer.ended(), "something follows the close frame: see `close` and `_write_control`"
    peer.sock.close()
    assert serving.get(timeout=30) == CloseCode.GOING_AWAY, "the first close decides on the code"


def test_one_close_frame_is_sent_when_there_is_room(
    accepted: Server, peer: RawSocket, ends: tuple[Any, Any]
) -> None:
    """The library sends none; the handler waits for input, and sends nothing."""
    ws = start(accepted)[1]
    with pytest.raises(ConnectionClosed):
        accepted.close()
    sent = os.write(ends[1].fileno(), bytes(1_000_000))  # all that the kernel takes
    ws.close(CloseCode.REVOKED)
    peer.read(sent)
    assert peer.frame() == closing(1008, REASONS[1008]), "see `_disconnect`"


@pytest.mark.parametrize("is_away", [False, True])
def test_each_of_many_sockets_is_pinged_and_closed_in_time(
    app: Service, new_key: NewKey, is_away: bool
) -> None:
    """The end of a key closes neither those of its user's other keys nor those of strangers.

    Nor the last one, of one more key, which opens while the database is asked. If that is away, a
    key still ends when it expires.
    """
    keys = [new_key(), "", new_key()]
    open_now = open_sockets_of(app)
    change(keys[0], expires_at=now() if is_away else None)
    sockets: Any = {
        mock.Mock(WebSocket, ping_deadline=0): row(key) if key else None
        for key in (*keys * 150, new_key())
    }
    open_now.open |= dict([*sockets.items()][:-1])
    change(keys[0], expires_at=1)
    with outage() if is_away else nullcontext(), suppress(Exception):
        open_now.close_ended(
            lambda asked: open_now.open.update(sockets) or app.store.ended_digests(asked)
        )
    open_now.ping()
    for ws, key in sockets.items():
        has_ended = key is not None and key.id == keys[0][8:16]
        assert ws.mock_calls == [mock.call.close(1008)] * has_ended + [mock.call.ping()], (
            "all are pinged, and those of the ended keys are closed, but none that has opened "
            "meanwhile: see `ping` and `close_ended` in ws/open_sockets.py"
        )


def test_reasons_of_closes_are_described_and_short_enough() -> None:
    """wsproto would cut a longer one."""
    rows = SOCKETS["x-close-codes"].items()
    described = {int(code): row["reason"] for code, row in rows if "reason" in row}
    assert described == REASONS, "edit docs/asyncapi.json: x-close-codes: reason"
    assert {int(code) for code, _ in rows} == {1000, 1002, 1007, *map(int, CloseCode)}
    written = {
        int(code)
        for file in sources()
        for code in re.findall(r"\.close\((\d{4})", file.read_text())
    }
    assert written <= described.keys(), "close with a CloseCode, and name it in REASONS"
    assert max(len(reason.encode()) for reason in REASONS.values()) <= 123, "shorten it in REASONS"


@pytest.mark.parametrize(
    ("handler", "code", "error"),
    [
        pytest.param(lambda ws: None, 1000, "", id="none"),
        pytest.param(lambda ws: None, 1001, "", id="a stop began after the handshake"),
        pytest.param(mock.Mock(side_effect=ZeroDivisionError), 1011, "ZeroDivisionError", id="any"),
        pytest.param(
            mock.Mock(side_effect=FileNotFoundError), 1011, "FileNotFoundError", id="OSError"
        ),
        pytest.param(lambda ws: gevent.spawn(ws.send, b"").get(), 1011, "send_now", id="greenlet"),
        pytest.param(
            Ticker(lambda: current_app.extensions["none"]).stream,
            1011,
            "KeyError",  # there is an app context
            id="in what a ticker sends",
        ),
    ],
)
def test_handler_that_ends_closes_and_its_bug_is_logged(
    app: Service,
    accepted: Server,
    peer: RawSocket,
    caplog: pytest.LogCaptureFixture,
    handler: Handler,
    code: int,
    error: str,
) -> None:
    open_sockets_of(app).is_stopping = code == CloseCode.GOING_AWAY

    def serve() -> None:
        with app.test_request_context(f"{ECHO}?api_key=private"):
            open_sockets_of(app).handle(WebSocket(accepted), None, handler)

    served = gevent.spawn(serve)
    assert peer.frame() == closing(code, REASONS[code]), "see OpenSockets.handle"
    peer.sock.close()
    served.get(timeout=30)
    assert error in caplog.text, "a bug of a handler is not logged: see OpenSockets.handle"
    assert "private" not in caplog.text, "the query is logged, which may have a key"


TOLD = {  # by the codes of refusals
    "missing_api_key": "in the X-API-Key header, or as api_key in the query.",
    "rate_limited": "The limit of 1 request per day is used up.",
}


def leave(client: Any) -> None:
    """End what a client sends, when the handler has sent its first frames."""
    gevent.idle()
    with suppress(OSError):  # it was refused meanwhile
        client.shutdown(socket.SHUT_WR)


def ask(
    app: Flask, url: str, headers: dict[str, str], talk: Callable[[Any], None] = leave
) -> Response | str:
    """The refusal of a handshake, or what an accepted client gets, which leaves soon."""
    here, there = gsocket.socketpair()
    # flask-sock ends a request of gunicorn with StopIteration. The service catches an Exception of
    # the handler, but no gevent.Timeout.
    try:
        with here, there, gevent.Timeout(10):
            gevent.spawn(talk, here)
            with suppress(StopIteration):
                return Response.from_app(app, handshake(url, there, **headers))
            return str(here.recv(65_536), "latin-1")
    except gevent.Timeout:
        pytest.fail(f"{url}: the handler does not end")


@pytest.mark.parametrize("config", [{"MAX_SOCKETS": "2"}], indirect=True)
@pytest.mark.parametrize("name", SOCKETS["channels"])
def test_refusals_are_described_hold_no_place_and_count_nothing(
    app: Service, new_key: NewKey, read: set[str], name: str
) -> None:
    """With two places, three refusals that held one would leave none."""
    channel = SOCKETS["channels"][name]
    advice = f"edit docs/asyncapi.json: {name}"
    assert "x-refusals" in channel, (
        f'{advice}: x-refusals: {{"$ref": "#/channels/echo/x-refusals"}} or "time"'
    )
    path = channel["address"]
    ws = channel.get("bindings", {}).get("ws", {})
    good, used_up = ({"X-API-Key": new_key(tier=tier)} for tier in ("pro", "once"))
    asked = [
        (path, headers)
        for headers in ({"Upgrade": "h2c"}, {"Sec-WebSocket-Key": "x"}, {}, {"X-API-Key": "x"})
    ]
    query = {"api_key": {}} | ws.get("query", {}).get("properties", {})
    for parameter, schema in query.items():
        for value, fits in values_of(schema):
            url = f"{path}?{urlencode({parameter: value})}"
            asked += [] if fits else [(url, good)]
            assert isinstance(ask(app, url, good), str) == fits, (
                f"{advice}: bindings, or check {url}"
            )
    answers = []
    for url, headers in [*asked, (path, used_up)]:
        before = app.store.usage_of(row(good["X-API-Key"])).total
        answers += [ask(app, url, headers) for _ in range(3)]
        assert app.store.usage_of(row(good["X-API-Key"])).total == before, f"{url} is counted"
        assert isinstance(ask(app, path, good), str), f"refusals of {url}, {headers} hold a place"
    with outage():
        app.store.clear_cache()
        answers += [ask(app, path, good) for _ in range(3)]
    assert isinstance(ask(app, path, good), str), "refusals in an outage hold a place"
    assert read <= query.keys(), f"{advice}: bindings: query: {read - query.keys()}"
    for answer in [each for each in answers if isinstance(each, Response)]:
        check_refusal(name, answer)


def check_refusal(name: str, answer: Response) -> None:
    """It is described, with its headers and no others."""
    listed = {
        (row["status"], row["code"]): set(row.get("headers", ()))
        for row in resolved(SOCKETS["channels"][name]["x-refusals"], SOCKETS)
    }
    body = answer.get_json(force=True)
    what = answer.status_code, body["code"]
    assert what in listed, f"edit docs/asyncapi.json: {name}: x-refusals: {what}"
    assert TOLD.get(body["code"], "") in body["detail"], "edit the words of the refusal"
    wrong = listed[what] ^ NAMED & set(answer.headers.keys())
    assert not wrong, f"edit docs/asyncapi.json: {name}: x-refusals: headers of {what}: {wrong}"


def test_client_that_leaves_before_it_is_accepted_is_no_bug(
    app: Service, ends: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    ends[0].close()
    assert Response.from_app(app, handshake(ECHO, ends[1])).status_code == 400
    assert not caplog.messages, "see the error handler of SocketBlueprint"


@pytest.mark.parametrize(
    ("name", "path", "scheme"),
    [
        (name, path, scheme)
        for name, path, description in (("openapi", TEST, API), ("asyncapi", TIME, SOCKETS))
        for scheme in description["components"]["securitySchemes"].values()
    ],
)
def test_key_is_taken_where_it_is_described(
    app: Flask, key: str, name: str, path: str, scheme: dict[str, str]
) -> None:
    url, headers = {
        "header": (path, {scheme["name"]: key}),
        "query": (f"{path}?{scheme['name']}={key}&more=1", {"X-API-Key": "x"}),
    }[scheme["in"]]
    assert re.search(r"\[200 OK\]|HTTP/1.1 101 ", str(ask(app, url, headers))), (
        f"{url} with {headers} is refused: see `admit` and `require_api_key`, or edit "
        f"docs/{name}.json: securitySchemes: {scheme['name']} in {scheme['in']}"
    )
    wrong = [
        found
        for channel in filter(needs_key, SOCKETS["channels"])
        for found in misfits(
            {"query": {}, "headers": {}}
            | {"query" if scheme["in"] == "query" else "headers": {scheme["name"]: key}},
            {"properties": SOCKETS["channels"][channel].get("bindings", {}).get("ws", {})},
            SOCKETS,
            channel,
        )
    ]
    assert not wrong, (
        f"edit docs/asyncapi.json: bindings: a key in the {scheme['in']} is enough: {wrong}"
    )


@pytest.mark.parametrize(
    "config",
    [{name: limit} for name in ("MAX_SOCKETS", "MAX_SOCKETS_PER_CALLER") for limit in "02"],
    indirect=True,
)
@pytest.mark.parametrize("name", SOCKETS["channels"])
def test_of_handshakes_at_once_as_many_are_admitted_as_the_limit_says(
    app: Service, config: Settings, key: str, name: str
) -> None:
    """Also while requests are counted slowly, as they may be in PostgreSQL."""
    change(key, total=9, reset=1, used=9)  # in a window that has ended
    slow: Any = {"wraps": app.store.hit, "side_effect": lambda *_: gevent.idle() or mock.DEFAULT}
    with mock.patch.object(app.store, "hit", **slow):
        asking = [
            gevent.spawn(ask, app, SOCKETS["channels"][name]["address"], {"X-API-Key": key})
            for _ in range(5)
        ]
        refusals = [got for each in asking if isinstance(got := each.get(), Response)]
    assert 5 - len(refusals) == min(config.max_sockets, config.max_sockets_per_caller), (
        "of 5 handshakes at once, as many are admitted as the limit says: reserve a place before "
        "anything waits (see OpenSockets.reserve), and 0 is not the default (see `register`)"
    )
    for refusal in refusals:
        assert refusal.headers.get("X-RateLimit-Remaining", "1000") == "1000", (
            "a refusal counts nothing: see `admit`, and KeyStore.peek"
        )
        check_refusal(name, refusal)


@pytest.mark.usefixtures("stopped_clock")
@pytest.mark.parametrize("name", SOCKETS["channels"])
def test_frames_tell_what_is_stored_now_and_is_the_keys(app: Service, key: str, name: str) -> None:
    """They neither show nor count what is another user's, nor what that one has just seen.

    A socket that was opened before something has changed replies as one that was opened later.
    """
    own = add_rows(row(key), "~own", 1)
    path = SOCKETS["channels"][name]["address"]
    other = add_hidden_user()
    sent = b"".join(
        frame(TEXT, (text if isinstance(text, str) else json.dumps(text)).encode())
        for each in socket_operations(name)
        for message in (each["messages"] if "reply" in each else ())
        for text in [resolved(message, SOCKETS)["examples"][0]["payload"]]
    )

    def send(key: str, meanwhile: Callable[[], object] = list) -> list[str]:
        """The frames before the first pong, and between this and the second one."""
        told = []

        def talk(client: Any) -> None:
            peer = RawSocket(sock=client)
            peer.answer()
            for happen in (list, meanwhile):
                happen()
                peer.send(sent + frame(PING))
                told.append(str([each.payload for each in iter(peer.frame, (PONG, b""))]))
            leave(client)

        ask(app, path, {"X-API-Key": key}, talk)
        return told

    change(other, used=0)
    send(other)
    # With an odd number, a row has not ended yet. Each table gets ten rows, so that it has one with
    # the ID of the first row of any other table.
    theirs, *_ = [add_rows(row(other), "HIDDEN", number) for number in range(777_779, 777_799, 2)]
    check_beside_others(
        lambda: (
            {path: str(send(key))}
            | {
                url: str(ask(app, url, {"X-API-Key": key}))
                for bindings in [SOCKETS["channels"][name].get("bindings", {}).get("ws", {})]
                for parameter in bindings.get("query", {}).get("properties", ())
                for url in [f"{path}?{parameter}={value}" for value in theirs.values()]
            }
        ),
        *(other, [], None if path in TOTALS else theirs),
    )
    assert not HIDDEN.search(str(send(key))), f"{path} shows rows of others: name g.key.user_id"
    for user, number, parents in ((other, 5, own), (key, 3, None)):  # also below a row of Ada
        open_then, *new = [
            send(key, happens)[1]
            for happens in (
                partial(add_rows, row(user), "~new", number, parents=parents),
                *(list, list),
            )
        ]
        assert open_then in new or new[0] != new[1], (
            f"{path}: a socket that is open replies {open_then}, but a new one {new[0]}: ask for "
            "the rows when a message comes"
        )
