"""The WebSockets that are open, and the ticker that sends the time to many of them."""

import logging
import time
from collections import Counter
from collections.abc import Callable

import gevent
from flask import request

from protocol.problems import Problem
from protocol.timestamps import display, timestamp
from protocol.websocket import CloseCode, Closing, WebSocket, frame

log = logging.getLogger(__name__)

RETRY = {"Retry-After": "10"}  # seconds

Handler = Callable[[WebSocket], None]


class OpenSockets:
    """Counts the sockets of each caller from the handshake on; `open` has the open ones."""

    def __init__(self, limit: int, limit_per_caller: int) -> None:
        self.limit, self.limit_per_caller = limit, limit_per_caller
        self.is_stopping = False
        self.admitted: Counter[str] = Counter()  # by the key's id, or the client's address
        self.open: dict[WebSocket, str | None] = {}  # the key's id; None for an echo socket

    def reserve(self, who: str) -> None:
        """Admit a socket of this caller; raises Problem if there is no room for it."""
        if self.is_stopping or self.admitted.total() >= self.limit:
            raise Problem(503, "too_many_sockets", "The server has no socket left.", headers=RETRY)
        if self.admitted[who] >= self.limit_per_caller:
            raise Problem(429, "too_many_sockets", "You have too many sockets open.", headers=RETRY)
        self.admitted[who] += 1

    def release(self, who: str) -> None:
        """Give back a place that was reserved."""
        self.admitted[who] -= 1
        if not self.admitted[who]:
            del self.admitted[who]

    def serve(self, ws: WebSocket, key_id: str | None, handler: Handler) -> None:
        """Let the handler serve the socket, then close it with the code of the exception it raises.

        Before that it leaves `open`, so that nobody interrupts it while it closes. This is no
        context manager: Python 3.13 would keep the exception, and with it half a message.
        """
        started, code, by = time.monotonic(), int(CloseCode.BUG), "server"
        what = f"{request.path} of key {key_id}" if key_id else request.path
        log.info("open %s", what)
        self.open[ws] = key_id
        try:
            if self.is_stopping:  # since this one was admitted
                raise Closing(CloseCode.GOING_AWAY)
            handler(ws)
        except Closing as closing:
            code, by = closing.code, closing.by
        except OSError:  # the client has left
            code, by = CloseCode.ABNORMAL, "client"
        except Exception:
            log.exception("bug in %s", request.path)
        finally:
            del self.open[ws]
            code = ws.close(code)
            seconds = time.monotonic() - started
            log.info("closed %s by the %s after %.1f s: %d", what, by, seconds, code)

    def shut_down(self) -> None:
        """Admit no more sockets and close all with 1001."""
        self.is_stopping = True
        for ws in self.open:
            ws.interrupt(CloseCode.GOING_AWAY)

    def keys(self) -> set[str]:
        """The ids of the keys that have sockets open."""
        return {key_id for key_id in self.open.values() if key_id}

    def end(self, key_ids: set[str]) -> None:
        """Close the sockets of these keys with 1008."""
        for ws, key_id in self.open.items():
            if key_id in key_ids:
                ws.interrupt(CloseCode.REVOKED)


class Ticker:
    """Sends the time to many sockets: once a second to each, at its own tenth of a second.

    One greenlet serves all of them: a timer for each would cost more than sending. No tick falls on
    a full second, so a tick that is a little late neither skips nor repeats a second.
    """

    def __init__(self) -> None:
        self._listeners: dict[int, set[WebSocket]] = {tenth: set() for tenth in range(1, 10)}

    def join(self, ws: WebSocket) -> set[WebSocket]:
        """Send the time to this socket until it is removed from the returned set.

        The first time within 0.2 s: of the next two tenths, it gets the one with fewer sockets.
        """
        tenth = int(time.time() * 10)
        tenths = {(tenth + 1) % 10, (tenth + 2) % 10} & self._listeners.keys()  # 0 has no listeners
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
