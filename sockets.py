"""The two WebSockets, echo and time (RFC 6455), over flask-sock.

flask-sock and simple-websocket route and accept a connection; from then on one greenlet reads
and writes it, with wsproto for the frames. Their own reader thread never starts: it would queue
without bound, write beside the handler without a lock, and cost a second greenlet per socket.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import random
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import gevent
from flask import Blueprint, Flask, current_app, g, request
from flask_sock import Sock
from simple_websocket import Server
from wsproto import events
from wsproto.utilities import LocalProtocolError

import clock
from auth import guard
from problems import Problem, bad_handshake, upgrade_required
from settings import Settings

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 65_536
READ_BYTES = 16_384
SEND_BUFFER_BYTES = 262_144  # of the kernel's, for each socket: bounds what a stuck client costs
PING_SECONDS = 25
STUCK_SECONDS = 10  # how long a client may leave a ping unanswered or a message untaken
GOODBYE_SECONDS = 1  # how long the client gets to answer a close
MARGIN_SECONDS = 0.1  # no tick is nearer than this to the turn of a second
SPREAD_SECONDS = 0.18  # first ticks are spread over this long
RETRY_SECONDS = 10  # for those who have, or find, too many sockets open
GOING_AWAY, NOT_TEXT, GONE, REVOKED, TOO_BIG, BUG = 1001, 1003, 1006, 1008, 1009, 1011

routes = Blueprint("sockets", __name__, url_prefix="/api/v1/ws")


def register(app: Flask, config: Settings) -> None:
    """Add both sockets to the app."""
    app.config["SOCK_SERVER_OPTIONS"] = {
        "thread_class": lambda target: SimpleNamespace(name="", start=lambda: None),
        "event_class": object,
    }
    app.extensions["crowd"] = Crowd(config.max_sockets, config.max_sockets_per_caller)
    app.register_blueprint(routes)


def echo(channel: Channel) -> None:
    """Send every text back, one reply a message, in order."""
    for text in channel.texts():
        now = time.time()
        channel.send(
            type="echo",
            message=text,
            timestamp=clock.timestamp(now),
            server_time=clock.display(now),
        )


def stream_time(channel: Channel) -> None:
    """Greet, then tell the time once a second; what the client says is read and dropped."""
    channel.send(type="auth_success", api_key_name=g.key.name)
    phase = first_tick(time.time(), random.random())
    delay = phase - time.time()
    while True:
        for _ in channel.texts(delay):
            pass
        now = time.time()
        channel.send(
            type="time_update", formatted=clock.display(now), timestamp=clock.timestamp(now)
        )
        delay = seconds_to_tick(time.time(), phase)


def first_tick(now: float, chance: float) -> float:
    """When to tick first: soon, away from the turn of the second, `chance` (0 to 1) spreading."""
    earliest = max(now, math.floor(now) + MARGIN_SECONDS)
    if earliest % 1 > 1 - MARGIN_SECONDS:
        earliest = math.ceil(now) + MARGIN_SECONDS
    latest = min(now + SPREAD_SECONDS, math.floor(earliest) + 1 - MARGIN_SECONDS)
    return earliest + chance * max(0, latest - earliest)


def seconds_to_tick(now: float, phase: float) -> float:
    """Until the next moment with this phase; one that is all but now was a tick woken early.

    Reckoned from the clock each time, so that nothing drifts and a clock that is set does no harm.
    """
    left = (phase - now) % 1
    return left if left > MARGIN_SECONDS else left + 1


class Closed(gevent.GreenletExit):
    """The connection is over; `code` says why. gunicorn lets a GreenletExit pass in silence."""

    def __init__(self, code: int, reply: events.Event | None = None) -> None:
        self.code = code
        self.reply = reply


class Channel:
    """One open WebSocket; only `end` may be called from another greenlet.

    The methods raise Closed, or OSError when the connection breaks.
    """

    def __init__(self, server: Server) -> None:
        self._sock, self._wire = server.sock, server.ws
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._greenlet = gevent.getcurrent()
        self._parts: list[str] = []
        self._size = 0
        self._sending = False
        self._ping_at = time.monotonic() + PING_SECONDS
        self._answer_by = math.inf

    def send(self, **message: str) -> None:
        """Send one JSON text message, whole."""
        self._send(events.TextMessage(json.dumps(message)))

    def texts(self, seconds: float = math.inf) -> Iterator[str]:
        """The client's messages, until so many seconds have passed.

        The next is not read before the caller is done with the last: a client that sends
        faster than it is served is held back by TCP.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._sock.settimeout(min(left, self._beat()))
            try:
                data = self._sock.recv(READ_BYTES)
            except TimeoutError:
                continue
            self._answer_by = math.inf  # whatever it sent, it is alive
            self._wire.receive_data(data or None)
            for event in self._wire.events():
                yield from self._take(event)
                gevent.sleep(0)  # there may be no end of them: let others have their turn

    def end(self, code: int) -> None:
        """Make the greenlet that serves this channel close it."""
        gevent.kill(self._greenlet, Closed(code), block=False)

    def close(self, closed: Closed) -> None:
        """Say goodbye, as far as the connection still allows."""
        if closed.code == GONE or self._sending:  # nobody there, or half a frame is out
            return
        try:
            self._send(closed.reply or events.CloseConnection(closed.code))
            self._sock.shutdown(socket.SHUT_WR)
            with gevent.Timeout(GOODBYE_SECONDS, False):
                # Unread input would make the kernel reset the connection, and the code be lost.
                while self._sock.recv(READ_BYTES):
                    pass
        except (OSError, LocalProtocolError, Closed):
            pass

    def _send(self, event: events.Event) -> None:
        data = self._wire.send(event)
        self._sending = True
        self._sock.settimeout(STUCK_SECONDS)
        self._sock.sendall(data)
        self._sending = False

    def _beat(self) -> float:
        """Keep the pings going; returns the seconds until this has to be called again."""
        now = time.monotonic()
        if now >= self._answer_by:
            raise Closed(GONE)
        if now >= self._ping_at:
            self._send(events.Ping())
            self._ping_at, self._answer_by = now + PING_SECONDS, now + STUCK_SECONDS
        return min(self._ping_at, self._answer_by) - now

    def _take(self, event: events.Event) -> Iterator[str]:
        match event:
            case events.TextMessage():
                if event.data:
                    self._parts.append(event.data)
                    self._size += len(event.data.encode())
                if self._size > MAX_MESSAGE_BYTES:
                    raise Closed(TOO_BIG)
                if event.message_finished:
                    text = "".join(self._parts)
                    self._parts, self._size = [], 0
                    yield text
            case events.BytesMessage():
                raise Closed(NOT_TEXT)
            case events.Ping():
                self._send(event.response())
            case events.CloseConnection():  # the client's, or wsproto's verdict on a bad frame
                raise Closed(event.code, event.response())


class Crowd:
    """The open channels by caller: a key's id, or a client's address."""

    def __init__(self, limit: int, limit_per_caller: int) -> None:
        self._limit, self._limit_per_caller = limit, limit_per_caller
        self._channels: defaultdict[str, set[Channel]] = defaultdict(set)
        self._size = 0
        self._leaving = False

    def check(self, caller: str) -> None:
        """Raises Problem when there is no room for one more."""
        retry = {"Retry-After": str(RETRY_SECONDS)}
        if self._leaving:
            raise Problem(503, "unavailable", "The server is going away.", retry)
        if self._size >= self._limit:
            raise Problem(503, "too_many_sockets", "The server has no socket left.", retry)
        if len(self._channels.get(caller, ())) >= self._limit_per_caller:
            raise Problem(429, "too_many_sockets", "You have too many sockets open.", retry)

    def enter(self, caller: str, channel: Channel) -> None:
        self._channels[caller].add(channel)
        self._size += 1

    def leave(self, caller: str, channel: Channel) -> None:
        self._channels[caller].remove(channel)
        self._size -= 1
        if not self._channels[caller]:
            del self._channels[caller]

    def end(self, caller: str, code: int) -> None:
        """Close all channels of one caller."""
        for channel in self._channels.get(caller, ()):
            channel.end(code)

    def end_all(self) -> None:
        """Close every channel because the server stops, and let no more in."""
        self._leaving = True
        for caller in self._channels:
            self.end(caller, GOING_AWAY)


def crowd(app: Flask | None = None) -> Crowd:
    found: Crowd = (app or current_app).extensions["crowd"]
    return found


@routes.before_request
def admit() -> None:
    """Refuse with HTTP, before the upgrade, whatever is to be refused."""
    check_handshake()
    if request.endpoint == "sockets.time":
        keys = guard()
        g.key = keys.check(request.args.get("api_key") or request.headers.get("X-API-Key"))
        g.caller = g.key.id
        g.allowance = keys.peek(g.key.id, g.key.tier)  # its headers go onto a refusal, too
        crowd().check(g.caller)
        keys.spend(g.key)
    else:
        g.caller = request.remote_addr or ""
        crowd().check(g.caller)
    keep_handshake()


def check_handshake() -> None:
    """RFC 6455 part 4.2.1; raises Problem 400 or 426."""
    headers = request.headers
    version = headers.get("Sec-WebSocket-Version")
    if version and version != "13":
        raise upgrade_required("Only version 13 is spoken here.", {"Sec-WebSocket-Version": "13"})
    try:
        nonce = base64.b64decode(headers.get("Sec-WebSocket-Key", ""), validate=True)
    except ValueError:
        nonce = b""
    if not version or len(nonce) != 16:
        raise bad_handshake("Sec-WebSocket-Version or Sec-WebSocket-Key is missing or malformed.")
    if request.method != "GET" or request.environ["SERVER_PROTOCOL"] != "HTTP/1.1":
        raise bad_handshake("A WebSocket is opened with GET and HTTP/1.1.")
    if not headers.get("Host") or not headers["Host"].isascii():
        raise bad_handshake("Host is missing or malformed.")


def keep_handshake() -> None:
    """Leave wsproto only what it needs: no extension to negotiate, no header to stumble over."""
    environ = request.environ
    nonce = environ["HTTP_SEC_WEBSOCKET_KEY"]
    for name in [name for name in environ if name.startswith("HTTP_")]:
        del environ[name]
    environ["HTTP_HOST"] = "localhost"
    environ["HTTP_CONNECTION"], environ["HTTP_UPGRADE"] = "Upgrade", "websocket"
    environ["HTTP_SEC_WEBSOCKET_VERSION"], environ["HTTP_SEC_WEBSOCKET_KEY"] = "13", nonce


def serve(talk: Callable[[Channel], None]) -> Callable[[Server], None]:
    """Wrap a talk into a flask-sock handler that always ends with a close code and a log line."""

    def handler(server: Server) -> None:
        opened, caller, here = time.monotonic(), g.caller, crowd()
        channel = Channel(server)
        log.info("open %s", request.path)
        here.enter(caller, channel)
        closed = Closed(GONE)
        try:
            talk(channel)
        except Closed as reason:
            closed = reason
        except (OSError, LocalProtocolError):
            pass
        except Exception:
            log.exception("bug in %s", request.path)
            closed = Closed(BUG)
        finally:
            here.leave(caller, channel)
            server.connected = False  # or flask-sock would close once more
            channel.close(closed)
            seconds = time.monotonic() - opened
            log.info("closed %s after %.1f s: %d", request.path, seconds, closed.code)

    return handler


sock = Sock()
sock.route("/echo", bp=routes, endpoint="echo")(serve(echo))
sock.route("/time", bp=routes, endpoint="time")(serve(stream_time))
