"""One WebSocket (RFC 6455): handshake, whole messages, back-pressure, pings, a clean close.

flask-sock accepts a connection; from then on one greenlet reads and answers it here, with wsproto
for the frames. The reader thread of simple-websocket never starts: it would queue without bound,
write beside the handler without a lock, and cost a second greenlet per socket.
"""

import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gevent
from gevent.lock import Semaphore
from simple_websocket import Server
from wsproto import events
from wsproto.frame_protocol import FrameProtocol
from wsproto.utilities import LocalProtocolError

from problems import BAD_HANDSHAKE, UPGRADE, Problem

HANDSHAKE = {
    "HTTP_HOST": "localhost",
    "HTTP_CONNECTION": "Upgrade",
    "HTTP_UPGRADE": "websocket",
    "HTTP_SEC_WEBSOCKET_VERSION": "13",
}
NONCE = re.compile("[A-Za-z0-9+/]{22}==")  # 16 bytes in base64
MAX_MESSAGE_BYTES = 65_536
READ_BYTES = 16_384
PING_SECONDS = 25
STUCK_SECONDS = 10  # how long a client may leave a ping unanswered or a message untaken
GOODBYE_SECONDS = 1  # how long the client gets to answer a close
GOING_AWAY, NOT_TEXT, GONE, REVOKED, TOO_BIG, BUG = 1001, 1003, 1006, 1008, 1009, 1011

SERVER_OPTIONS = {  # of simple-websocket
    "thread_class": lambda target: SimpleNamespace(name="", start=lambda: None),
    "event_class": object,
}
TURN = Semaphore(1)


class Closed(gevent.GreenletExit):
    """The connection is over; `code` says why. gunicorn lets a GreenletExit pass in silence."""

    def __init__(self, code: int, reply: events.Event | None = None) -> None:
        self.code, self.reply = code, reply


def negotiate(environ: dict[str, Any]) -> None:
    """Check the handshake (part 4.2.1), then leave wsproto no header to stumble over.

    It gets no extension to agree to either: compression costs 100 KiB a socket. Raises Problem 400
    or 426.
    """
    version = environ.get("HTTP_SEC_WEBSOCKET_VERSION", "")
    nonce = environ.get("HTTP_SEC_WEBSOCKET_KEY", "")
    host = environ.get("HTTP_HOST", "")
    if version not in ("", "13"):
        raise Problem(426, headers=UPGRADE)
    request_line = (environ["REQUEST_METHOD"], environ["SERVER_PROTOCOL"])
    has_body = environ.get("CONTENT_LENGTH", "0") != "0"
    sound = version and NONCE.fullmatch(nonce) and host and host.isascii() and not has_body
    if not sound or request_line != ("GET", "HTTP/1.1"):
        raise Problem(400, *BAD_HANDSHAKE)
    for name in [name for name in environ if name.startswith("HTTP_")]:
        del environ[name]
    environ |= HANDSHAKE | {"HTTP_SEC_WEBSOCKET_KEY": nonce}


def frame(**message: str) -> bytes:
    """The JSON text message as the bytes on the wire; a server's are the same for every client."""
    payload = json.dumps(message, ensure_ascii=False)
    return bytes(FrameProtocol(client=False, extensions=[]).send_data(payload))


def pause() -> None:
    """Let everything else have its turn; of all channels one goes on, the one that waits longest.

    A timer makes the event loop look for new work first, which it would not after a sleep(0).
    """
    with TURN:
        gevent.sleep(1e-6)
    gevent.sleep(0)  # or this channel would take TURN again before one that waits for it


class Channel:
    """Serves one client; its methods raise Closed, or OSError when the connection breaks."""

    def __init__(self, server: Server) -> None:
        self._sock, self._wire = server.sock, server.ws
        self._greenlet = gevent.getcurrent()
        self._message, self._size = "", 0
        self._sending = False
        self._ping_at = time.monotonic() + PING_SECONDS
        self._answer_by = math.inf

    def texts(self) -> Iterator[str]:
        """The client's messages. While the caller is busy with one, TCP holds back the next."""
        while True:
            self._sock.settimeout(self._beat())
            try:
                data = self._sock.recv(READ_BYTES)
            except TimeoutError:
                continue
            self._answer_by = math.inf  # whatever it sent, it is alive
            self._wire.receive_data(data or None)
            for event in self._wire.events():
                yield from self._take(event)
                pause()  # for there may be no end of them

    def send(self, data: bytes) -> None:
        """Send a frame, whole; a client that takes nothing for STUCK_SECONDS is cut off."""
        rest = memoryview(data)
        self._sending = True
        self._sock.settimeout(STUCK_SECONDS)
        while rest:
            rest = rest[self._sock.send(rest) :]
        self._sending = False

    def push(self, data: bytes) -> None:
        """Send a frame from another greenlet without ever waiting: at once, or it is the end."""
        try:
            whole = not self._sending and os.write(self._sock.fileno(), data) == len(data)
        except OSError:
            whole = False
        if not whole:
            self._sending = True  # half a frame may be out
            self.end(GONE)

    def end(self, code: int) -> None:
        """Make the greenlet that serves this channel close it."""
        gevent.kill(self._greenlet, Closed(code))

    def close(self, closed: Closed) -> None:
        """Say goodbye, as far as the connection still allows."""
        if closed.code == GONE or self._sending:
            return
        try:
            self.send(self._wire.send(closed.reply or events.CloseConnection(closed.code)))
            self._sock.shutdown(socket.SHUT_WR)
            with gevent.Timeout(GOODBYE_SECONDS, False):
                # Unread input would make the kernel reset the connection, and the code be lost.
                while self._sock.recv(READ_BYTES):
                    pause()
        except (OSError, LocalProtocolError, Closed):
            pass

    def _beat(self) -> float:
        """Keep the pings going; returns the seconds until this has to be called again."""
        now = time.monotonic()
        if now >= self._answer_by:
            raise Closed(GONE)
        if now >= self._ping_at:
            self.send(self._wire.send(events.Ping()))
            self._ping_at, self._answer_by = now + PING_SECONDS, now + STUCK_SECONDS
        return min(self._ping_at, self._answer_by) - now

    def _take(self, event: events.Event) -> Iterator[str]:
        match event:
            case events.TextMessage():
                self._message += event.data
                self._size += len(event.data.encode())
                if self._size > MAX_MESSAGE_BYTES:
                    raise Closed(TOO_BIG)
                if event.message_finished:
                    text, self._message, self._size = self._message, "", 0
                    yield text
            case events.BytesMessage():
                raise Closed(NOT_TEXT)
            case events.Ping():
                self.send(self._wire.send(event.response()))
            case events.CloseConnection():  # the client's, or wsproto's verdict on a bad frame
                raise Closed(event.code, event.response())
