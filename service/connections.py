"""How the greenlets of connections take turns, and how a connection ends without losing data."""

import socket
from contextlib import suppress

import gevent

# Sleeping for this time lets all other greenlets run. It must not be 0: greenlets that call
# sleep(0) go on in the same round of gevent's loop, for up to 5 ms, before the loop looks for new
# input of other connections. A timer, however short, ends in a later round.
TURN_SECONDS = 1e-6
READ_BYTES = 16_384
CLOSE_SECONDS = 0.8  # how long a client may take to close its side


def half_close(sock: socket.socket) -> None:
    """Close our side, then discard input until the client closes its side, or CLOSE_SECONDS pass.

    If input were left unread at the close, the kernel would reset the connection, and the client
    might lose what was sent last (RFC 9112 part 9.6). Raises nothing if the connection is lost.
    """
    with suppress(OSError), gevent.Timeout(CLOSE_SECONDS, False):  # False: raises nothing
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(65_536):
            # A small part costs as much as a large one, so let several arrive before the next read.
            gevent.sleep(0.001 if len(data) > READ_BYTES else 0.01)
