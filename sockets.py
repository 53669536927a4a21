"""The WebSockets, echo and time: what they send, and which clients are admitted."""

import time
from functools import partial

from flask import Blueprint, Flask, g, request
from flask_sock import Sock
from simple_websocket import Server

import auth
from http_api.client_address import client_network
from http_api.problems import Problem
from http_api.requests import SOCKETS
from http_api.timestamps import display, timestamp
from service import current_service
from storage.time_limit import SOCKET_SECONDS, limit_waiting
from ws import connection
from ws.connection import WebSocket, frame
from ws.open_sockets import Handler
from ws.ticker import Ticker

bp = Blueprint("sockets", __name__, url_prefix=SOCKETS)
NEEDS_KEY: dict[str | None, bool] = {}  # by endpoint


def echo(ws: WebSocket) -> None:
    """Send every message back, in order."""
    for text in ws.messages():
        now = time.time()
        ws.send(
            frame(type="echo", message=text, timestamp=timestamp(now), server_time=display(now))
        )


def time_update() -> bytes:
    now = time.time()
    return frame(type="time_update", formatted=display(now), timestamp=timestamp(now))


time_ticker = Ticker(time_update)


def stream_time(ws: WebSocket) -> None:
    """Confirm the key, then send the time once a second."""
    ws.send(frame(type="auth_success", api_key_name=g.key.name))
    time_ticker.serve(ws)


@bp.before_request
def admit() -> None:
    """Refuse with an HTTP response, before the upgrade; what is refused is not counted."""
    connection.check_handshake(request.environ)
    g.key = None
    if NEEDS_KEY[request.endpoint]:
        presented = request.args.get("api_key") or request.headers.get("X-API-Key")
        g.key = auth.require_key(presented, ", or as api_key in the query")
        # A 429 `too_many_sockets` carries the limit headers, too.
        auth.add_limit_headers(current_service.store.peek(g.key, auth.quota_of(g.key)))
    caller = g.key.id if g.key else client_network(request.remote_addr)
    current_service.sockets.reserve(caller)
    g.caller = caller
    if g.key:
        auth.count_request(g.key)
    # For flask-sock; last, because what is written to this copy reaches no header of the response.
    request.environ = connection.plain_handshake(request.environ)


@bp.teardown_request
def release(error: BaseException | None) -> None:
    """Give back the place that `admit` reserved, however the request has ended."""
    if "caller" in g:
        current_service.sockets.release(g.caller)


def serve(handler: Handler, server: Server) -> None:
    """Let the handler serve a connection that flask-sock has accepted."""
    limit_waiting(SOCKET_SECONDS)
    current_service.sockets.serve(WebSocket(server), g.key, handler)


@bp.errorhandler(ConnectionError)
def client_left(error: ConnectionError) -> Problem:
    """flask-sock answers a handshake inside the view: a client that left then is no bug."""
    return Problem(400)


def add_route(name: str, handler: Handler, *, needs_key: bool) -> None:
    """Serve a WebSocket at this path, to clients with an API key only or to everybody.

    The handler is called for each client; there, `request.headers` are those that were sent.
    When it returns, the socket closes with 1000; after an exception with 1011, and the exception is
    logged.
    """
    NEEDS_KEY[f"{bp.name}.{name}"] = needs_key
    Sock().route(f"/{name}", bp=bp, endpoint=name)(partial(serve, handler))


def register(app: Flask) -> None:
    """Add the sockets to the app."""
    app.config["SOCK_SERVER_OPTIONS"] = connection.SERVER_OPTIONS
    app.register_blueprint(bp)


add_route("echo", echo, needs_key=False)
add_route("time", stream_time, needs_key=True)
