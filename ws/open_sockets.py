"""The open WebSockets: how many each caller has, and how they are closed."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from flask import Flask, request
from simple_websocket import ConnectionClosed

from models import ApiKey
from service.problems import Problem
from ws.connection import CloseCode, WebSocket

log = logging.getLogger(__name__)

RETRY = {"Retry-After": "10"}  # seconds

Handler = Callable[[WebSocket], None]


class OpenSockets:
    """Counts the sockets of each caller from the handshake on; `open` has the open ones."""

    def __init__(self, limit: int, limit_per_caller: int) -> None:
        self.limit, self.limit_per_caller = limit, limit_per_caller
        self.is_stopping = False
        self.open: dict[WebSocket, ApiKey | None] = {}  # each with its key, if it has one
        self._count_by_caller: Counter[str] = Counter()  # by the key's id, or the client's address

    def reserve(self, caller: str) -> None:
        """Admit a socket of this caller; raises Problem if there is no room for it."""
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
            call(handler, ws)
            code = ws.wait_closed()
        finally:
            del self.open[ws]
        log.info("closed %s after %.1f s: %d", what, time.monotonic() - started, code)

    def shut_down(self) -> None:
        """Admit no more sockets and close all with 1001."""
        self.is_stopping = True
        for ws in self.open:
            ws.close(CloseCode.GOING_AWAY)

    def close_ended(self, ended_digests: Callable[[list[ApiKey]], set[str]]) -> None:
        """Close with 1008 the sockets whose keys have ended.

        `ended_digests` returns the digests of those keys among the given ones.
        """
        digests = ended_digests([key for key in self.open.values() if key])
        for ws, key in self.open.items():
            if key and key.digest in digests:
                ws.close(CloseCode.REVOKED)


def call(handler: Handler, ws: WebSocket) -> None:
    """Call the handler unless the socket is closing, then begin to close it."""
    try:
        if not ws.code:
            handler(ws)
        ws.close(CloseCode.NORMAL)  # unless it is closing already
    except ConnectionClosed:
        pass
    except Exception:
        log.exception("bug in %s", request.path)
        ws.close(CloseCode.BUG)


def open_sockets_of(app: Flask) -> OpenSockets:
    return app.extensions["sockets"]
