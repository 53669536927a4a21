"""How long a request may wait for PostgreSQL in all, however many statements it makes.

service.py sets the limit of each request, and sockets.py that of a socket.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

API_SECONDS = 1.8
PAGE_SECONDS = 5.0  # pages and forms make more statements
SOCKET_SECONDS = math.inf  # after its handshake, a socket may ask again and again

# What has no request has no limit: commands, the background, the threads of psycopg's pools.
_seconds_left: ContextVar[float] = ContextVar("seconds left", default=math.inf)


def limit_waiting(seconds: float) -> None:
    """From now on, this greenlet may wait for so many seconds in all."""
    _seconds_left.set(seconds)


@contextmanager
def waiting(timeout: float, reserved: float = 0) -> Iterator[float]:
    """Yields a timeout for what waits inside, and counts the seconds for which that has waited.

    The timeout is the given one, or what this request has left without what is `reserved` for
    later, if that is less. One `waiting` inside another would count the seconds twice.
    """
    began = time.monotonic()
    try:
        yield min(timeout, _seconds_left.get() - reserved)
    finally:
        _seconds_left.set(_seconds_left.get() - (time.monotonic() - began))
