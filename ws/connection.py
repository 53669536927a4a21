"""One WebSocket connection (RFC 6455): handshake, messages, pings and the close.

flask-sock and simple-websocket accept the connection. After that, one greenlet reads and answers
here, and wsproto parses the frames. simple-websocket's own reader thread is not started: it
queues messages without limit and writes to the socket without a lock.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import gevent
from simple_websocket import Server
from wsproto import events
from wsproto.frame_protocol import FrameProtocol

from rest.problems import Problem, json_text
from ws.tcp import READ_BYTES, TURN_SECONDS, drain

UPGRADE = {"Connection": "upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
BAD_HANDSHAKE = (
    "A handshake has GET, HTTP/1.1, no body, an ASCII Host, Connection: Upgrade, "
    "Sec-WebSocket-Version: 13, and 16 bytes in base64 as Sec-WebSocket-Key."
)
HANDSHAKE = {  # as regular expressions (RFC 6455 part 4.2.1)
    "REQUEST_METHOD": "GET",
    "SERVER_PROTOCOL": "HTTP/1.1",
    "CONTENT_LENGTH": "0?",
    "HTTP_HOST": "[!-~]{1,255}",
    "HTTP_SEC_WEBSOCKET_VERSION": "13",
    "HTTP_SEC_WEBSOCKET_KEY": "[A-Za-z0-9+/]{22}==",  # 16 bytes in base64
}
MAX_MESSAGE_BYTES = 65_536
PING_SECONDS = 25  # between pings
STALLED_SECONDS = 10  # how long a client may leave a ping unanswered, or a frame unread
CLOSE_SECONDS = 0.8  # how long a client may take to read a close frame


class CloseCode(IntEnum):
    """The close codes of this service (RFC 6455 part 7.4.1); wsproto adds 1002 and 1007.

    ABNORMAL is never sent, only logged: the connection was lost.
    """

    GOING_AWAY = 1001
    NOT_TEXT = 1003
    ABNORMAL = 1006
    REVOKED = 1008
    TOO_BIG = 1009
    BUG = 1011


def no_thread(target: object) -> SimpleNamespace:
    """In place of simple-websocket's reader, which would queue messages without limit."""
    return SimpleNamespace(name="", start=lambda: None)


# simple-websocket makes an event as well, which only its reader would set.
SERVER_OPTIONS = {"thread_class": no_thread, "event_class": object}


class Closing(BaseException):
    """The connection is to be closed with this code; no `except Exception` may catch it."""

    def __init__(self, code: int) -> None:
        self.code = code


def check_handshake(environ: dict[str, Any]) -> None:
    """Raises Problem 400 or 426 unless this is a WebSocket handshake."""
    version = environ.get("HTTP_SEC_WEBSOCKET_VERSION", "13")
    if "websocket" not in tokens(environ, "HTTP_UPGRADE") or version != "13":
        raise Problem(426, headers=UPGRADE)
    fits = all(re.fullmatch(form, environ.get(name, "")) for name, form in HANDSHAKE.items())
    if not fits or "upgrade" not in tokens(environ, "HTTP_CONNECTION"):
        raise Problem(400, "bad_handshake", BAD_HANDSHAKE)


def plain_handshake(environ: dict[str, Any]) -> dict[str, Any]:
    """A copy with only the headers of a handshake, each in its plainest form.

    wsproto would raise an exception for unusual ones. Without Sec-WebSocket-Extensions it agrees to
    no compression, which would take 100 KiB a connection.
    """
    plain = {"HTTP_HOST": "localhost", "HTTP_UPGRADE": "websocket", "HTTP_CONNECTION": "Upgrade"}
    needed = {n: v for n, v in environ.items() if n in HANDSHAKE or not n.startswith("HTTP_")}
    return needed | plain


def tokens(environ: dict[str, Any], name: str) -> set[str]:
    """The tokens of a header, in lower case. werkzeug's parser takes 6 ms for a long header."""
    return {token.strip() for token in environ.get(name, "").lower().split(",")}


def frame(**message: object) -> bytes:
    """The frame of a JSON text message; a server's frames are the same for every client."""
    return bytes(FrameProtocol(client=False, extensions=[]).send_data(json_text(message)))


class WebSocket:
    """An open connection; its methods raise Closing, or OSError when the connection is lost."""

    def __init__(self, server: Server) -> None:
        self._sock, self._wire = server.sock, server.ws
        server.connected = False  # or flask-sock would send a close frame, too
        self._greenlet = gevent.getcurrent()
        self._unsent = memoryview(b"")
        self._is_pinged = False  # and has not answered yet
        self._due = time.monotonic() + PING_SECONDS  # the next ping, or the answer to the last
        # Frames may have come in the packet of the handshake, which gunicorn has read: this takes
        # them out of its buffer. See "Private APIs" in docs/design.md.
        self._wire.receive_data(server.environ["wsgi.input"].reader.unreader.take_buffered())

    def messages(self) -> Iterator[str]:
        """The client's text messages. While the caller handles one, TCP holds back the next."""
        message, size = "", 0
        for event in self._events():
            match event:
                case events.TextMessage():
                    message += event.data
                    size += len(event.data.encode())
                    if size > MAX_MESSAGE_BYTES:
                        raise Closing(CloseCode.TOO_BIG)
                    if event.message_finished:
                        yield message
                        message, size = "", 0
                case events.BytesMessage():
                    raise Closing(CloseCode.NOT_TEXT)
                case events.CloseConnection():
                    raise Closing(event.code)

    def send(self, data: bytes) -> None:
        """Send a whole frame, after the rest of one that was cut.

        A client that does not read for STALLED_SECONDS is lost.
        """
        self._unsent = memoryview(bytes(self._unsent) + data)
        self._sock.settimeout(STALLED_SECONDS)
        while self._unsent:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]

    def push(self, data: bytes) -> None:
        """Send a frame from another greenlet, if the kernel takes all of it at once.

        This never waits: gevent has made the descriptor non-blocking. If the kernel takes only a
        part, or an earlier frame is not sent yet, the client is too slow, and is lost.
        """
        rest = memoryview(data)
        if not self._unsent:
            with suppress(OSError):
                rest = self._unsent = rest[os.write(self._sock.fileno(), rest) :]
        if rest:
            self.interrupt(CloseCode.ABNORMAL)

    def interrupt(self, code: int) -> None:
        """Make the greenlet that serves this connection close it.

        Closing is raised where that greenlet waits: in `recv` or `send` of the socket, in `sleep`
        between two messages, or in `close`. This method returns at once.
        """
        gevent.kill(self._greenlet, Closing(code))

    def close(self, code: int) -> int:
        """Send a close frame and await the client's; returns 1006 if it was not sent, else `code`.

        An interrupt that was on its way ends this; nothing that follows may wait.
        """
        with suppress(OSError, Closing):
            if code != CloseCode.ABNORMAL:
                with gevent.Timeout(CLOSE_SECONDS, TimeoutError()):  # which is an OSError
                    self.send(self._wire.send(events.CloseConnection(code)))
                drain(self._sock)
        return CloseCode.ABNORMAL if self._unsent else code  # the client did not take the rest

    def _events(self) -> Iterator[events.Event]:
        while True:
            for event in self._wire.events():
                if isinstance(event, events.Ping):
                    self.send(self._wire.send(event.response()))
                if isinstance(event, events.Pong):
                    self._is_pinged, self._due = False, time.monotonic() + PING_SECONDS
                yield event
                gevent.sleep(TURN_SECONDS)
            # None: the client has left, for which wsproto makes a CloseConnection.
            self._wire.receive_data(self._read() or None)

    def _read(self) -> bytes:
        """Read, and ping the client every PING_SECONDS; raises TimeoutError without a pong."""
        while True:
            if (left := self._due - time.monotonic()) > 0:
                with suppress(TimeoutError):
                    self._sock.settimeout(left)
                    return bytes(self._sock.recv(READ_BYTES))
            elif self._is_pinged:
                raise TimeoutError
            else:
                self.send(self._wire.send(events.Ping()))
                self._is_pinged, self._due = True, time.monotonic() + STALLED_SECONDS
