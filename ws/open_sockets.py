"""The WebSockets that are open: how many, of which callers, and how they end."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from flask import request
from simple_websocket import ConnectionClosed

from http_api.problems import Problem
from models import ApiKey
from ws.connection import CloseCode, WebSocket

log = logging.getLogger(__name__)

RETRY = {"Retry-After": "10"}  # seconds

Handler = Callable[[WebSocket], None]


class OpenSockets:
    """Counts the sockets of each caller from the handshake on; `open` has the open ones."""

    def __init__(self, limit: int, limit_per_caller: int) -> None:
        self.limit, self.limit_per_caller = limit, limit_per_caller
        self.is_stopping = False
        self.admitted: Counter[str] = Counter()  # by the key's id, or the client's address
        self.open: dict[WebSocket, ApiKey | None] = {}  # each with its key, if it has one

    def reserve(self, caller: str) -> None:
        """Admit a socket of this caller; raises Problem if there is no room for it."""
        if self.is_stopping or self.admitted.total() >= self.limit:
            raise Problem(
                503,
                "too_many_sockets",
                "The server accepts no more sockets at the moment.",
                headers=RETRY,
            )
        if self.admitted[caller] >= self.limit_per_caller:
            raise Problem(429, "too_many_sockets", "You have too many sockets open.", headers=RETRY)
        self.admitted[caller] += 1

    def release(self, caller: str) -> None:
        """Give back a place that was reserved."""
        self.admitted[caller] -= 1
        if not self.admitted[caller]:
            del self.admitted[caller]

    def serve(self, ws: WebSocket, key: ApiKey | None, handler: Handler) -> None:
        """Call the handler, then close the socket with 1000, or with 1011 after an exception."""
        started, code = time.monotonic(), int(CloseCode.BUG)
        what = f"{request.path} of key {key.id}" if key else request.path
        log.info("open %s", what)
        self.open[ws] = key
        try:
            if self.is_stopping:  # the stop began after this socket was admitted
                ws.close(CloseCode.GOING_AWAY)
            else:
                handler(ws)
            code = CloseCode.NORMAL
        except ConnectionClosed:
            pass
        except Exception:
            log.exception("bug in %s", request.path)
        finally:
            ws.close(code)  # unless it is closing already
            code = ws.finish()
            del self.open[ws]
            log.info("closed %s after %.1f s: %d", what, time.monotonic() - started, code)

    def shut_down(self) -> None:
        """Admit no more sockets and close all with 1001."""
        self.is_stopping = True
        for ws in self.open:
            ws.close(CloseCode.GOING_AWAY)

    def close_ended(self, ended: Callable[[list[ApiKey]], set[str]]) -> None:
        """Close the sockets of keys that have ended with 1008; `ended` returns their digests."""
        digests = ended([key for key in self.open.values() if key])
        for ws, key in self.open.items():
            if key and key.digest in digests:
                ws.close(CloseCode.REVOKED)
