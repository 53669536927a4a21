"""The ticker, which sends the time to many WebSockets."""

import time

import gevent

from rest.timestamps import display, timestamp
from ws.connection import WebSocket, frame


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
