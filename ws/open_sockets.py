"""The routes of WebSockets: who is admitted, how many each caller has, and how they are closed."""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_plus

from flask import Blueprint, Flask, current_app, g, request
from flask_sock import Sock
from simple_websocket import ConnectionClosed, Server

import auth
from models import ApiKey
from service.application import current_service
from service.client_address import client_network
from service.responses import Problem
from settings import max_websockets
from ws.connection import SERVER_OPTIONS, CloseCode, WebSocket, check_handshake, plain_handshake

log = logging.getLogger(__name__)

RETRY = {"Retry-After": "10"}  # seconds

Handler = Callable[[WebSocket], None]


class OpenSockets:
    """Counts the sockets of each caller from the handshake on; `open` has the open ones."""

    def __init__(self, limit: int, limit_per_caller: int) -> None:
        self.limit = limit
        self.limit_per_caller = limit_per_caller
        self.is_stopping = False
        self.open: dict[WebSocket, ApiKey | None] = {}  # each with its key, if it has one
        self._count_by_caller: Counter[str] = Counter()  # by the key's id, or the client's address

    def reserve(self, caller: str) -> str:
        """Admit a socket of this caller; returns the caller. Raises Problem if there is no room."""
        if self.is_stopping or self._count_by_caller.total() >= self.limit:
            raise Problem(
                503,
                "too_many_sockets",
                "The server accepts no more sockets at the moment.",
                headers=RETRY,
            )
        if self._count_by_caller[caller] >= self.limit_per_caller:
            raise Problem(429, "too_many_sockets", "You have too many sockets open.", headers=RETRY)
        self._count_by_caller[caller] += 1
        return caller

    def release(self, caller: str) -> None:
        """Free what was reserved. A caller without sockets takes no memory."""
        self._count_by_caller[caller] -= 1
        if not self._count_by_caller[caller]:
            del self._count_by_caller[caller]

    def handle(self, ws: WebSocket, key: ApiKey | None, handler: Handler) -> None:
        """Call the handler, then close the socket with 1000, or with 1011 after an exception."""
        started = time.monotonic()
        what = f"{request.path} of key {key.id}" if key else request.path
        log.info("open %s", what)
        self.open[ws] = key
        if self.is_stopping:  # the stop began after this socket was admitted
            ws.close(CloseCode.GOING_AWAY)
        try:
            handler(ws)
            ws.close(CloseCode.NORMAL)  # unless it is closing already
        except ConnectionClosed:
            pass
        except Exception:
            log.exception("bug in %s", request.path)
            ws.close(CloseCode.BUG)
        finally:
            del self.open[ws]
        code = ws.wait_closed()
        log.info("closed %s after %.1f s: %d", what, time.monotonic() - started, code)

    def ping(self) -> None:
        """Ping the clients for which it is time."""
        now = time.monotonic()
        for ws in self.open:  # `ping` never waits, so none is added or removed meanwhile
            if ws.ping_deadline < now:
                ws.ping()

    def shut_down(self) -> None:
        """Admit no more sockets and close all with 1001."""
        self.is_stopping = True
        for ws in self.open:
            ws.close(CloseCode.GOING_AWAY)

    def close_ended(self, ended_digests: Callable[[list[ApiKey]], set[str]]) -> None:
        """Close with 1008 the sockets whose keys have ended.

        `ended_digests` returns the digests of those keys among the given ones. If it fails, only
        the keys that expire by themselves are known.
        """
        digests = {key.digest for key in self.open.values() if key and key.has_expired}
        try:
            digests = ended_digests([key for key in self.open.values() if key])
        finally:
            for ws, key in self.open.items():
                if key and key.digest in digests:
                    ws.close(CloseCode.REVOKED)


def open_sockets_of(app: Flask) -> OpenSockets:
    return app.extensions["sockets"]


class SocketBlueprint(Blueprint):
    """A blueprint whose routes are WebSockets."""

    def __init__(self, name: str, import_name: str, url_prefix: str) -> None:
        super().__init__(name, import_name, url_prefix=url_prefix)
        self.before_request(admit)
        self.teardown_request(release)
        # flask-sock sends the 101 inside the view; a client that has gone by then is not a bug.
        self.register_error_handler(ConnectionError, lambda _: Problem(400))

    def socket(self, path: str, *, needs_key: bool = False) -> Callable[[Handler], Handler]:
        """Serve a WebSocket at this path, to everybody or only to clients with an API key.

        The handler is called for each client. In it, `g.key` is the client's key or None, and
        `request.headers` are those that the client sent. When it returns, the socket closes with
        1000. If it raises an exception, that is logged, and the socket closes with 1011.
        """

        def decorate(handler: Handler) -> Handler:
            # Sock adds the route to this blueprint, and accepts the connection. `admit` finds
            # `needs_key` in request.view_args, as if it were a parameter of the path.
            @Sock().route(
                path, bp=self, endpoint=handler.__name__, defaults={"needs_key": needs_key}
            )
            def handle(server: Server, **values: object) -> None:
                open_sockets_of(current_app).handle(WebSocket(server), g.key, handler)

            return handler

        return decorate

    def register(self, app: Any, options: dict[str, Any]) -> None:
        """Add the routes to the service, with the limits of its settings."""
        app.extensions["sockets"] = OpenSockets(
            min(app.settings.max_sockets, max_websockets()), app.settings.max_sockets_per_caller
        )
        app.config["SOCK_SERVER_OPTIONS"] = SERVER_OPTIONS
        super().register(app, options)


def admit() -> None:
    """Check the handshake, the key and the limits.

    A refusal is an HTTP response before the upgrade, and is not counted. So the order matters:

    1. The handshake comes first: a request without one gets the same response with any key.
    2. The key comes before the limits, because they are limits of the key.
    3. The request is counted last, when nothing else can refuse it.
    """
    if request.method == "OPTIONS":
        return  # a pre-flight, which Flask answers
    check_handshake(request.environ)
    g.key = None
    if request.view_args["needs_key"]:  # type: ignore[index] # every route of sockets has it
        # To parse all of a long query would take 5 ms.
        found = re.search("(?:^|&)api_key=([^&]+)", request.environ["QUERY_STRING"])
        g.key = auth.require_key(
            unquote_plus(found[1]) if found else request.headers.get("X-API-Key"),
            or_where=", or as api_key in the query",
        )
        # A 429 `too_many_sockets` has the headers of the limit, too, but is not counted.
        request.environ["allowance"] = current_service().store.peek(g.key, auth.quota_of(g.key))
    g.reserved_for = open_sockets_of(current_app).reserve(
        g.key.id if g.key else client_network(request.remote_addr)
    )
    if g.key:
        auth.count_request(g.key)
    request.environ = plain_handshake(request.environ)  # which flask-sock reads


def release(error: BaseException | None) -> None:
    """Free what `admit` reserved, however the request has ended."""
    if "reserved_for" in g:
        open_sockets_of(current_app).release(g.reserved_for)
