"""The two WebSockets, echo and time: what is sent, and who is admitted."""

import time
from functools import partial

from flask import Blueprint, Flask, g, request
from flask_sock import Sock
from simple_websocket import Server

import auth
from protocol import websocket
from protocol.application import ALLOWANCE, SOCKETS, caller
from protocol.open_sockets import Handler
from protocol.timestamps import display, timestamp
from protocol.websocket import WebSocket, frame
from services import services

bp = Blueprint("sockets", __name__, url_prefix=SOCKETS)


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


@bp.before_request
def admit() -> None:
    """Refuse with an HTTP response, before the upgrade; what is refused is not counted."""
    if request.method == "OPTIONS":
        return  # Flask answers it
    websocket.check_handshake(request.environ)
    g.key = None
    if request.endpoint == "sockets.time":
        presented = request.args.get("api_key") or request.headers.get("X-API-Key")
        g.key = auth.require_key(presented, ", or as api_key in the query")
        request.environ[ALLOWANCE] = auth.allowance_of(g.key)  # shown if there is no room
    who = g.key.id if g.key else caller(request.remote_addr)
    services().sockets.reserve(who)
    g.caller = who
    if g.key:
        auth.count_request(g.key, request.environ)
    request.environ = websocket.plain_handshake(request.environ)  # for flask-sock


@bp.teardown_request
def release(error: BaseException | None) -> None:
    """Give back the place that `admit` reserved, however the request has ended."""
    if "caller" in g:
        services().sockets.release(g.caller)


def serve(handler: Handler, server: Server) -> None:
    """Let the handler serve an open socket.

    A handler ends by raising an exception, which says how to close; returning is a bug, and closes
    with 1011. It may wait only for the socket, or in `sleep`, because `interrupt` may end it there:
    a query might be left half done.
    """
    services().sockets.serve(WebSocket(server), g.key and g.key.id, handler)


def add_route(name: str, handler: Handler) -> None:
    """Serve a WebSocket at this path."""
    Sock().route(f"/{name}", bp=bp, endpoint=name)(partial(serve, handler))


def register(app: Flask) -> None:
    """Add both sockets to the app."""
    app.config["SOCK_SERVER_OPTIONS"] = websocket.SERVER_OPTIONS
    app.register_blueprint(bp)


add_route("echo", echo)
add_route("time", stream_time)
