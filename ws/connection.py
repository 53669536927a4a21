"""One WebSocket connection (RFC 6455): handshake, messages, pings and the close.

flask-sock and simple-websocket accept the connection. After that, one greenlet reads and answers
here, and wsproto parses the frames. simple-websocket's own reader thread is not started: it
queues messages without limit and writes to the socket without a lock.
"""

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from types import SimpleNamespace

import gevent
from gevent.socket import wait_write
from simple_websocket import ConnectionClosed, Server
from wsproto import events
from wsproto.connection import ConnectionState
from wsproto.frame_protocol import FrameProtocol
from wsproto.utilities import LocalProtocolError

from service.connections import CLOSE_SECONDS, READ_BYTES, TURN_SECONDS, half_close
from service.responses import Problem, json_text

HANDSHAKE = {  # as regular expressions (RFC 6455 part 4.2.1)
    "REQUEST_METHOD": "GET",
    "SERVER_PROTOCOL": "HTTP/1.1",
    "CONTENT_LENGTH": "0?",
    "HTTP_TRANSFER_ENCODING": "",
    "HTTP_HOST": "[!-~]{1,255}",
    "HTTP_SEC_WEBSOCKET_VERSION": "13",
    "HTTP_SEC_WEBSOCKET_KEY": "[A-Za-z0-9+/]{22}==",  # 16 bytes in base64
}
MAX_MESSAGE_BYTES = 65_536
PING_SECONDS = 25  # between pings
STALLED_SECONDS = 10  # how long a client may leave a ping unanswered, or a frame unread


class CloseCode(IntEnum):
    """The close codes of this service (RFC 6455 part 7.4.1)."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002  # found by wsproto, like NOT_UTF_8
    NOT_TEXT = 1003
    ABNORMAL = 1006  # never sent, only logged: the connection was lost
    NOT_UTF_8 = 1007
    REVOKED = 1008
    TOO_BIG = 1009
    BUG = 1011


# What the close frame says when the service begins the close; at most 123 bytes (part 5.5).
REASONS: dict[int, str] = {
    CloseCode.NORMAL: "The server has nothing more to send",
    CloseCode.GOING_AWAY: "The server is stopping or restarting",
    CloseCode.PROTOCOL_ERROR: "A frame violated RFC 6455",
    CloseCode.NOT_TEXT: "Only text messages are accepted",
    CloseCode.NOT_UTF_8: "A text message was not UTF-8",
    CloseCode.REVOKED: "The API key was revoked or has expired",
    CloseCode.TOO_BIG: f"A message was larger than {MAX_MESSAGE_BYTES:,} bytes",
    CloseCode.BUG: "There was an error in the server",
}


# These replace simple-websocket's reader thread, and the event that only this thread would set.
SERVER_OPTIONS = {
    "thread_class": lambda target: SimpleNamespace(name="", start=lambda: None),
    "event_class": object,
}


def check_handshake(environ: dict[str, str]) -> None:
    """Raises Problem 400 or 426 unless this is a WebSocket handshake."""
    if (
        "websocket" not in tokens(environ, "HTTP_UPGRADE")
        or environ.get("HTTP_SEC_WEBSOCKET_VERSION", "13") != "13"
    ):
        raise Problem(
            426,
            headers={
                "Connection": "upgrade",
                "Upgrade": "websocket",
                "Sec-WebSocket-Version": "13",
            },
        )
    if "upgrade" not in tokens(environ, "HTTP_CONNECTION") or not all(
        re.fullmatch(form, environ.get(name, "")) for name, form in HANDSHAKE.items()
    ):
        raise Problem(
            400,
            "bad_handshake",
            "A handshake must be an HTTP/1.1 GET without a body, with an ASCII Host, Connection: "
            "Upgrade, Sec-WebSocket-Version: 13, and 16 bytes in base64 as Sec-WebSocket-Key.",
        )


def plain_handshake(environ: dict[str, str]) -> dict[str, str]:
    """A copy with only the headers of a handshake, each in its plainest form.

    wsproto would raise an exception for unusual headers. Without Sec-WebSocket-Extensions it agrees
    to no compression, which would take 100 KiB a connection.
    """
    return {n: v for n, v in environ.items() if n in HANDSHAKE or n[:5] != "HTTP_"} | {
        "HTTP_HOST": "localhost",
        "HTTP_UPGRADE": "websocket",
        "HTTP_CONNECTION": "Upgrade",
    }


def tokens(environ: dict[str, str], name: str) -> set[str]:
    """The tokens of a header, in lower case; werkzeug would need 6 ms to parse a long header."""
    return {token.strip() for token in environ.get(name, "").lower().split(",")}


def frame(**message: object) -> bytes:
    """The frame of a JSON text message; a server's frames are the same for every client."""
    return bytes(FrameProtocol(client=False, extensions=[]).send_data(json_text(message)))


class WebSocket:
    """An open connection, served by the greenlet that calls the handler.

    Only this greenlet may call `messages`, `send` and `wait_closed`. Any greenlet may call
    `send_now`, `ping` and `close`, which never wait. A connection ends in this order:

        close         decides on the code, writes the close frame, and starts a timer
        the handler   ends: `messages` ends, `send` raises ConnectionClosed, `send_now` does nothing
        wait_closed   sends what is left, then waits until the client closes its side
        _disconnect   ends both waits, CLOSE_SECONDS after `close`
    """

    def __init__(self, server: Server) -> None:
        self.code = 0  # with which the connection closes; 0 while it is open
        self._greenlet = gevent.getcurrent()
        self._sock = server.sock
        # The worker has set a limit on each wait, which a silent client would exceed. Here, `ping`
        # and `close` end a wait.
        self._sock.settimeout(None)
        self._protocol = server.ws.connection
        server.ws = None  # the parser of the handshake would take some KiB
        self._unsent = b""  # what the kernel has not taken yet
        server.connected = False  # or flask-sock would send a close frame, too
        self._awaits_pong = False
        self.ping_deadline = time.monotonic() + PING_SECONDS  # for the next ping, or its pong
        # Frames may have come in the packet of the handshake, which gunicorn has read: this takes
        # them out of its buffer. See "Private APIs" in docs/design.md.
        self._protocol.receive_data(server.environ["wsgi.input"].reader.unreader.take_buffered())

    def messages(self) -> Iterator[str]:
        """The client's text messages, until the connection closes.

        While the caller handles a message, TCP holds back the next ones.
        """
        message = bytearray()
        for event in self._events():
            match event:
                case events.TextMessage():
                    message += event.data.encode()
                    if len(message) > MAX_MESSAGE_BYTES:
                        self.close(CloseCode.TOO_BIG)
                    elif event.message_finished:
                        yield message.decode()
                        message.clear()
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
            if gevent.getcurrent() is not self._greenlet:
                raise RuntimeError("Two frames could mix: call send_now from another greenlet.")
            self._flush(data)
        if self.code:
            raise ConnectionClosed(self.code)

    def send_now(self, data: bytes) -> None:
        """Send a frame; a client whose connection does not take all of it at once is lost.

        It neither waits nor raises an exception, so one client cannot end the updates of others.
        """
        if not self.code:
            with suppress(OSError):
                self._write(data)
            if self._unsent:
                self.close(CloseCode.ABNORMAL)

    def close(self, code: int) -> None:
        """Begin to close the connection with this code, unless it is closing."""
        if self.code:
            return
        self.code = code
        if code != CloseCode.ABNORMAL:
            is_answer = self._protocol.state is ConnectionState.REMOTE_CLOSING
            reason = None if is_answer else REASONS.get(code)
            self._write_control(events.CloseConnection(code, reason))
        gevent.spawn_later(0 if code == CloseCode.ABNORMAL else CLOSE_SECONDS, self._disconnect)

    def ping(self) -> None:
        """Ping the client; if it has not answered the last ping, it is lost."""
        if self._awaits_pong:
            self.close(CloseCode.ABNORMAL)
        else:
            self._write_control(events.Ping())
            self._awaits_pong = True
            self.ping_deadline = time.monotonic() + STALLED_SECONDS

    def wait_closed(self) -> int:
        """Wait until the client has closed its side; returns the code.

        The code is ABNORMAL if the client did not read everything, up to the close frame.
        """
        self._flush()
        half_close(self._sock)
        return CloseCode.ABNORMAL if self._unsent else self.code

    def _write_control(self, event: events.Event) -> None:
        """Write a ping, a pong or a close frame; this never waits.

        It writes nothing if either side has begun to close, because wsproto then refuses to make
        the frame.
        """
        with suppress(OSError, LocalProtocolError):
            self._write(self._protocol.send(event))

    def _flush(self, data: bytes = b"") -> None:
        """Wait until the kernel has taken everything, or the client is lost."""
        try:
            self._write(data)
            while self._unsent:
                wait_write(self._sock.fileno(), STALLED_SECONDS)
                self._write()
        except OSError:
            self.close(CloseCode.ABNORMAL)

    def _write(self, data: bytes = b"") -> None:
        """Send as much as the kernel takes at once, and keep the rest, so that no frames mix.

        This never waits. Raises OSError if the connection is lost.
        """
        self._unsent += data
        with suppress(BlockingIOError):
            # gevent's `send` would wait.
            self._unsent = self._unsent[os.write(self._sock.fileno(), self._unsent) :]

    def _disconnect(self) -> None:
        """End the connection, which wakes the greenlet that waits for it.

        What is left is sent if the kernel has room now, because a handler that waits for input
        sends nothing.
        """
        with suppress(OSError):
            self._write()
            self._sock.shutdown(socket.SHUT_RDWR)

    def _events(self) -> Iterator[events.Event]:
        while not self.code:
            for event in self._protocol.events():
                if isinstance(event, events.Ping):
                    self._write_control(event.response())
                    self._flush()
                if isinstance(event, events.Pong) and self._awaits_pong:
                    self._awaits_pong = False
                    self.ping_deadline = time.monotonic() + PING_SECONDS
                    continue  # it was asked for, so it needs no turn of its own
                yield event
                gevent.sleep(TURN_SECONDS)
                if self.code:  # what came behind it is not handled
                    return
            try:
                # None means that the client has left; wsproto makes a CloseConnection of it.
                self._protocol.receive_data(self._sock.recv(READ_BYTES) or None)
            except OSError:
                self.close(CloseCode.ABNORMAL)
