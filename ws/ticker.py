"""The ticker, which sends the same frame to many WebSockets once a second."""

import logging
import time
from collections.abc import Callable

import gevent
from flask import current_app
from flask.ctx import AppContext

from ws.connection import CloseCode, WebSocket

log = logging.getLogger(__name__)


class Ticker:
    """Sends a frame to many sockets: once a second to each, at its own tenth of a second.

    One greenlet calls `make_frame` for each tenth that has sockets, because a timer for each socket
    would be more expensive than sending. The call has an app context, but no request. If it raises
    an exception, these sockets close with 1011. No tick falls on a full second, so a tick that is a
    little late neither skips nor repeats a second.
    """

    def __init__(self, make_frame: Callable[[], bytes]) -> None:
        self._make_frame = make_frame
        self._listeners: dict[int, set[WebSocket]] = {tenth: set() for tenth in range(1, 10)}
        self._greenlet: gevent.Greenlet | None = None

    def stream(self, ws: WebSocket) -> None:
        """Send the frames until the socket closes; what the client sends is discarded.

        Of the next two tenths, the socket gets the one with fewer sockets, so the first frame comes
        within 0.2 s.
        """
        tick = int(time.time() * 10)
        # The keys are 1 to 9, so the full second is left out.
        tenths = {(tick + 1) % 10, (tick + 2) % 10} & self._listeners.keys()
        listeners = min((self._listeners[tenth] for tenth in tenths), key=len)
        listeners.add(ws)
        try:
            if not self._greenlet:  # there was none, or it has ended
                # The first tick is that of the next tenth, even if the greenlet begins after it.
                self._greenlet = gevent.spawn(self._run, current_app.app_context(), tick + 1)
            for _ in ws.messages():
                pass
        finally:
            listeners.remove(ws)

    def _run(self, context: AppContext, tick: int) -> None:
        """Tick as long as there are sockets; ticks are numbered, one each tenth since 1970."""
        with context:
            while any(self._listeners.values()):
                left = tick / 10 - time.time()
                if abs(left) > 1:  # the clock was set, or the process was stopped for a while
                    tick = int(time.time() * 10) + 1
                elif left > 0:
                    gevent.sleep(left)  # may end a little early
                else:
                    if listeners := self._listeners.get(tick % 10):
                        self._tick(listeners)
                    tick += 1

    def _tick(self, listeners: set[WebSocket]) -> None:
        try:
            data = self._make_frame()
        except Exception:
            log.exception("bug in what a ticker sends")
            for ws in listeners:
                ws.close(CloseCode.BUG)
        else:
            for ws in listeners:  # `send_now` never waits, so none is added or removed meanwhile
                ws.send_now(data)
