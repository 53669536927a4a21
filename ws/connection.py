"""One WebSocket connection (RFC 6455): handshake, messages, pings and the close.

flask-sock and simple-websocket accept the connection. After that, one greenlet reads and answers
here, and wsproto parses the frames. simple-websocket's own reader thread is not started: it
queues messages without limit and writes to the socket without a lock.
"""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import gevent
from simple_websocket import ConnectionClosed, Server
from wsproto import events
from wsproto.frame_protocol import FrameProtocol

from http_api.problems import Problem, json_text
from ws.outbox import Outbox

# Sleeping for this time lets all other greenlets run. It must not be 0: greenlets that
# call sleep(0) go on in the same round of gevent's loop, up to 50 times, before the loop looks for
# new input of other connections. A timer, however short, ends in a later round.
TURN_SECONDS = 1e-6
READ_BYTES = 16_384

UPGRADE = {"Connection": "upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
BAD_HANDSHAKE = (
    "A handshake must be an HTTP/1.1 GET without a body, with an ASCII Host, Connection: Upgrade, "
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
CLOSE_SECONDS = 0.8  # how long a client may take to read a close frame, and to close its side


class CloseCode(IntEnum):
    """The close codes of this service (RFC 6455 part 7.4.1); wsproto adds 1002 and 1007.

    `messages` closes with NOT_TEXT and TOO_BIG, OpenSockets with the others. ABNORMAL is never
    sent, only logged: the connection was lost.
    """

    NORMAL = 1000
    GOING_AWAY = 1001
    NOT_TEXT = 1003
    ABNORMAL = 1006
    REVOKED = 1008
    TOO_BIG = 1009
    BUG = 1011


def no_reader(target: object) -> SimpleNamespace:
    """In place of simple-websocket's reader, which would queue messages without limit."""
    return SimpleNamespace(name="", start=lambda: None)


# simple-websocket makes an event as well, which only its reader would set.
SERVER_OPTIONS = {"thread_class": no_reader, "event_class": object}


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
    """An open connection, served by the greenlet that calls the handler.

    Only this greenlet may call `messages`, `send` and `finish`. Any greenlet may call `push` and
    `close`, which never wait. The first `close` decides on the code. From then on nothing else is
    sent: `push` does nothing, `send` raises ConnectionClosed, and `messages` ends. The client has
    CLOSE_SECONDS to close its side; then the connection is cut, even while its greenlet is waiting.
    """

    def __init__(self, server: Server) -> None:
        self.code = 0  # with which the connection closes; 0 while it is open
        self._sock = server.sock
        self._protocol = server.ws
        self._outbox = Outbox(self._sock)
        server.connected = False  # or flask-sock would send a close frame, too
        self._awaits_pong = False
        self._ping_deadline = time.monotonic() + PING_SECONDS  # for the next ping, or its pong
        # Frames may have come in the packet of the handshake, which gunicorn has read: this takes
        # them out of its buffer. See "Private APIs" in docs/design.md.
        self._protocol.receive_data(server.environ["wsgi.input"].reader.unreader.take_buffered())

    def messages(self) -> Iterator[str]:
        """The client's text messages, until the connection closes.

        While the caller handles a message, TCP holds back the next ones.
        """
        message, size = "", 0
        for event in self._events():
            match event:
                case events.TextMessage():
                    message += event.data
                    size += len(event.data.encode())
                    if size > MAX_MESSAGE_BYTES:
                        self.close(CloseCode.TOO_BIG)
                    elif event.message_finished:
                        yield message
                        message, size = "", 0
                case events.BytesMessage():
                    self.close(CloseCode.NOT_TEXT)
                case events.CloseConnection():
                    self.close(event.code)

    def send(self, data: bytes) -> None:
        """Send a frame, and wait until the kernel has taken all of it.

        A client that does not read for STALLED_SECONDS is lost. Raises ConnectionClosed when the
        connection is closing or lost.
        """
        if not self.code:
            self._flush(data)
        if self.code:
            raise ConnectionClosed(self.code)

    def push(self, data: bytes) -> None:
        """Send a frame; a client whose connection does not take all of it at once is lost."""
        if not self.code:
            with suppress(OSError):
                self._outbox.write(data)
            if not self._outbox.is_empty:
                self.close(CloseCode.ABNORMAL)

    def close(self, code: int) -> None:
        """Begin to close the connection with this code, unless it is closing."""
        if self.code:
            return
        self.code = code
        if code == CloseCode.ABNORMAL:
            self._cut()
            return
        with suppress(OSError):
            self._outbox.write(self._protocol.send(events.CloseConnection(code)))
        gevent.spawn_later(CLOSE_SECONDS, self._cut)

    def finish(self) -> int:
        """Wait until the client has closed its side; returns the code.

        The code is ABNORMAL if the client did not read everything, up to the close frame.
        """
        self._flush()
        drain(self._sock)
        return self.code if self._outbox.is_empty else CloseCode.ABNORMAL

    def _flush(self, data: bytes = b"") -> None:
        """Wait until the kernel has taken everything, or the client is lost."""
        try:
            self._outbox.write(data)
            self._outbox.wait_empty(STALLED_SECONDS)
        except OSError:
            self.close(CloseCode.ABNORMAL)

    def _cut(self) -> None:
        """End the connection; if its greenlet is waiting for it, that goes on."""
        with suppress(OSError):
            self._outbox.write()
            self._sock.shutdown(socket.SHUT_RDWR)

    def _events(self) -> Iterator[events.Event]:
        while not self.code:
            for event in self._protocol.events():
                if isinstance(event, events.Ping):
                    self._flush(self._protocol.send(event.response()))
                if isinstance(event, events.Pong) and self._awaits_pong:
                    self._awaits_pong = False
                    self._ping_deadline = time.monotonic() + PING_SECONDS
                yield event
                gevent.sleep(TURN_SECONDS)
                if self.code:
                    return
            try:
                # None: the client has left, for which wsproto makes a CloseConnection.
                self._protocol.receive_data(self._read() or None)
            except OSError:
                self.close(CloseCode.ABNORMAL)

    def _read(self) -> bytes:
        """Read, and ping the client every PING_SECONDS; raises TimeoutError without a pong."""
        while not self.code:
            if (left := self._ping_deadline - time.monotonic()) > 0:
                self._sock.settimeout(left)
                try:
                    return bytes(self._sock.recv(READ_BYTES))
                except TimeoutError:
                    continue
            if self._awaits_pong:
                raise TimeoutError
            self._flush(self._protocol.send(events.Ping()))
            self._awaits_pong = True
            self._ping_deadline = time.monotonic() + STALLED_SECONDS
        return b""


def drain(sock: Any) -> None:
    """Half-close, then discard input for CLOSE_SECONDS at most, unless the connection is lost.

    If input were left unread at the close, the kernel would reset the connection, and the client
    might lose what was sent last (RFC 9112 part 9.6).
    """
    with suppress(OSError), gevent.Timeout(CLOSE_SECONDS, False):  # False: raises nothing
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(READ_BYTES):
            gevent.sleep(TURN_SECONDS)
