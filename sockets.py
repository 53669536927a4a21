"""The two WebSockets, echo and time: who is admitted, and what is sent."""

import logging
import time
from collections.abc import Callable
from functools import partial

import gevent
from flask import Blueprint, Flask, g, request
from flask_sock import Sock
from simple_websocket import Server

from protocol import websocket
from protocol.addresses import caller
from protocol.headers import ALLOWANCE
from protocol.problems import Problem
from protocol.timestamps import display, timestamp
from protocol.websocket import Close, Closed, WebSocket, frame
from services import services

log = logging.getLogger(__name__)

RETRY = {"Retry-After": "10"}  # seconds

routes = Blueprint("sockets", __name__, url_prefix="/api/v1/ws")


def register(app: Flask) -> None:
    """Add both sockets to the app."""
    app.config["SOCK_SERVER_OPTIONS"] = websocket.SERVER_OPTIONS
    app.register_blueprint(routes)


def echo(ws: WebSocket) -> None:
    """Send every message back, in order."""
    for text in ws.messages():
        now = time.time()
        times = {"timestamp": timestamp(now), "server_time": display(now)}
        ws.send(frame(type="echo", message=text, **times))


def stream_time(ws: WebSocket) -> None:
    """Let the ticker send the time; what the client sends is discarded."""
    ws.send(frame(type="auth_success", api_key_name=g.key.name))
    listeners = services().ticker.join(ws)
    try:
        for _ in ws.messages():
            pass
    finally:
        listeners.remove(ws)


class Ticker:
    """Sends the time to many sockets: once a second to each, at its own tenth of a second.

    One greenlet serves all of them: a timer for each would cost more than sending. No tick falls on
    a full second, so a tick that is a little late neither skips nor repeats a second.
    """

    def __init__(self) -> None:
        self._listeners: dict[int, set[WebSocket]] = {tenth: set() for tenth in range(1, 10)}

    def join(self, ws: WebSocket) -> set[WebSocket]:
        """Start ticks within 0.2 s, at the next tenth or the one after it, which has fewer sockets.

        They end when `ws` is removed from the returned set.
        """
        now = int(time.time() * 10)
        tenths = {(now + 1) % 10, (now + 2) % 10} & self._listeners.keys()  # 0 has no listeners
        listeners = min((self._listeners[tenth] for tenth in tenths), key=len)
        listeners.add(ws)
        return listeners

    def run(self) -> None:
        """Send the time forever."""
        tenths = 0  # since 1970
        while True:
            left = tenths / 10 - time.time()
            if abs(left) > 1:  # at first, and after the clock was set or the process was stopped
                tenths = int(time.time() * 10) + 1
            elif left > 0:
                gevent.sleep(left)  # may end a little early
            else:
                self._tick(tenths % 10)
                tenths += 1

    def _tick(self, tenth: int) -> None:
        if listeners := self._listeners.get(tenth):
            now = time.time()
            data = frame(type="time_update", formatted=display(now), timestamp=timestamp(now))
            for ws in listeners:  # push never yields, so the set cannot change meanwhile
                ws.push(data)


class OpenSockets:
    """`admitted` has an entry for each socket, from its handshake on; `open` has the open ones."""

    def __init__(self, limit: int, limit_per_caller: int) -> None:
        self.limit, self.limit_per_caller = limit, limit_per_caller  # the limit is 0 during a stop
        self.admitted: list[str] = []  # the key's id, or the client's address
        self.open: dict[WebSocket, str | None] = {}  # the key's id; None for an echo socket

    def reserve(self, who: str) -> None:
        """Admit a socket of this caller; raises Problem if there is no room for it."""
        if len(self.admitted) >= self.limit:
            raise Problem(503, "too_many_sockets", "The server has no socket left.", headers=RETRY)
        if self.admitted.count(who) >= self.limit_per_caller:
            raise Problem(429, "too_many_sockets", "You have too many sockets open.", headers=RETRY)
        self.admitted.append(who)

    def shut_down(self) -> None:
        """Admit no more sockets and close all with 1001."""
        self.limit = 0
        for ws in self.open:
            ws.interrupt(Close.GOING_AWAY)

    def keys(self) -> set[str]:
        """The ids of the keys that have sockets open."""
        return {key_id for key_id in self.open.values() if key_id}

    def end(self, key_ids: set[str]) -> None:
        """Close the sockets of these keys with 1008."""
        for ws, key_id in self.open.items():
            if key_id in key_ids:
                ws.interrupt(Close.REVOKED)


@routes.before_request
def admit() -> None:
    """Refuse with an HTTP response, before the upgrade."""
    if request.method == "OPTIONS":
        return  # Flask answers it
    websocket.check_handshake(request.environ)
    g.key = None
    if request.endpoint == "sockets.time":
        presented = request.args.get("api_key") or request.headers.get("X-API-Key")
        g.key = services().guard.check(presented, ", or as api_key in the query")
        # Counted when it is admitted; a refusal shows what is left.
        request.environ[ALLOWANCE] = services().guard.left(g.key)
    who = g.key.id if g.key else caller(request.remote_addr)
    services().sockets.reserve(who)
    g.caller = who
    if g.key:
        services().guard.spend(g.key)
    websocket.simplify(request.environ)


@routes.teardown_request
def release(error: BaseException | None) -> None:
    """Give back the place that `admit` reserved, however the request has ended."""
    if "caller" in g:
        services().sockets.admitted.remove(g.caller)


def serve(handler: Callable[[WebSocket], None], server: Server) -> None:
    """Let the handler serve an open socket.

    A handler ends by raising an exception, which says how to close; returning is a bug, and closes
    with 1011. It may wait only for the socket, or in `sleep`, because `interrupt` may end it there:
    a query might be left half done.
    """
    started, ws, code = time.monotonic(), WebSocket(server), int(Close.BUG)
    sockets = services().sockets
    sockets.open[ws] = g.key and g.key.id
    log.info("open %s", request.path)
    try:
        if not sockets.limit:  # the server began to stop while this one was admitted
            raise Closed(Close.GOING_AWAY)
        handler(ws)
    except Closed as closed:
        code = closed.code
    except OSError:  # the client has left
        code = Close.ABNORMAL
    except Exception:
        log.exception("bug in %s", request.path)
    # Nobody finds it any more, so nobody interrupts it. An interrupt that is already on its way is
    # raised in `close`, which then sends nothing more.
    del sockets.open[ws]
    code = ws.close(code)
    log.info("closed %s after %.1f s: %d", request.path, time.monotonic() - started, code)


def add_route(name: str, handler: Callable[[WebSocket], None]) -> None:
    """Serve a WebSocket at this path."""
    Sock().route(f"/{name}", bp=routes, endpoint=name)(partial(serve, handler))
    # The same endpoint, for requests without an Upgrade, which the rule above does not match. Its
    # view is never called for them, because `admit` refuses first.
    routes.add_url_rule(f"/{name}", name)


add_route("echo", echo)
add_route("time", stream_time)
