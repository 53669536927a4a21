"""The bytes to send over a socket, in order, although several greenlets write."""

import os
from contextlib import suppress
from typing import Any

from gevent.socket import wait_write


class Outbox:
    """The bytes that the kernel has not taken yet. Each method may raise OSError."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock  # non-blocking, as gevent makes it
        self._unsent = b""

    @property
    def is_empty(self) -> bool:
        return not self._unsent

    def write(self, data: bytes = b"") -> None:
        """Send as much as the kernel takes at once, and keep the rest; never waits."""
        self._unsent += data
        with suppress(BlockingIOError):
            # gevent's `send` would wait.
            self._unsent = self._unsent[os.write(self._sock.fileno(), self._unsent) :]

    def wait_empty(self, seconds: float) -> None:
        """Send the rest; raises TimeoutError if the client reads nothing for so many seconds."""
        while self._unsent:
            wait_write(self._sock.fileno(), seconds)
            self.write()
