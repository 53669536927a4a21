"""Letting other connections have their turn, and closing one without losing what was sent last."""

import socket
from contextlib import suppress
from typing import Any

import gevent

# Sleeping for this time gives all other connections their turn. It must not be 0: greenlets that
# call sleep(0) go on in the same round of gevent's loop, up to 50 times, before the loop looks for
# new input of other connections. A timer, however short, ends in a later round.
TURN_SECONDS = 1e-6
DRAIN_SECONDS = 0.8  # how long a client may take to close its side
READ_BYTES = 16_384


def drain(sock: Any) -> None:
    """Half-close, then discard input for DRAIN_SECONDS at most, unless the connection is lost.

    If input were left unread at the close, the kernel would reset the connection, and the client
    might lose what was sent last (RFC 9112 part 9.6).
    """
    with suppress(OSError), gevent.Timeout(DRAIN_SECONDS, False):  # False: raises nothing
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(READ_BYTES):
            gevent.sleep(TURN_SECONDS)
