"""The two WebSockets, echo and time, over flask-sock: who gets in, and what they are told."""

import base64
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flask import Blueprint, Flask, current_app, g, request
from flask_sock import Sock
from simple_websocket import Server
from wsproto.utilities import LocalProtocolError

import clock
from auth import ALLOWANCE, guard
from channel import BUG, GOING_AWAY, GONE, SERVER_OPTIONS, Channel, Closed, frame
from metronome import Metronome
from problems import Problem, bad_handshake, upgrade_required
from settings import Settings

log = logging.getLogger(__name__)

RETRY_SECONDS = 10  # for those who have, or find, too many sockets open

routes = Blueprint("sockets", __name__, url_prefix="/api/v1/ws")


def register(app: Flask, config: Settings) -> None:
    """Add both sockets to the app."""
    app.config["SOCK_SERVER_OPTIONS"] = SERVER_OPTIONS
    app.extensions["crowd"] = Crowd(config.max_sockets, config.max_sockets_per_caller)
    app.extensions["metronome"] = Metronome()
    app.register_blueprint(routes)


def echo(channel: Channel) -> None:
    """Send every text back, one reply a message, in order."""
    for text in channel.texts():
        now = time.time()
        reply = {"timestamp": clock.timestamp(now), "server_time": clock.display(now)}
        channel.send(frame(type="echo", message=text, **reply))


def stream_time(channel: Channel) -> None:
    """Greet, then leave the talking to the metronome; what the client says is dropped."""
    channel.send(frame(type="auth_success", api_key_name=g.key.name))
    audience = current_app.extensions["metronome"].join(channel)
    try:
        for _ in channel.texts():
            pass
    finally:
        audience.remove(channel)


class Crowd:
    """The open channels by caller: a key's id, or a client's address."""

    def __init__(self, limit: int, limit_per_caller: int) -> None:
        self._limit, self._limit_per_caller = limit, limit_per_caller
        self._channels: defaultdict[str, set[Channel]] = defaultdict(set)
        self._size, self._leaving = 0, False

    def check(self, caller: str) -> None:
        """Raises Problem when there is no room for one more."""
        retry = {"Retry-After": str(RETRY_SECONDS)}
        if self._leaving:
            raise Problem(503, "unavailable", "The server is going away.", retry)
        if self._size >= self._limit:
            raise Problem(503, "too_many_sockets", "The server has no socket left.", retry)
        if len(self._channels.get(caller, ())) >= self._limit_per_caller:
            raise Problem(429, "too_many_sockets", "You have too many sockets open.", retry)

    @contextmanager
    def member(self, caller: str, channel: Channel) -> Iterator[None]:
        self._channels[caller].add(channel)
        self._size += 1
        try:
            yield
        finally:
            self._size -= 1
            self._channels[caller].remove(channel)
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
        # The headers of the limits belong onto a refusal, too.
        request.environ[ALLOWANCE] = keys.peek(g.key.id, g.key.tier)
        crowd().check(g.caller)
        keys.spend(g.key)
    else:
        g.caller = request.remote_addr or ""
        crowd().check(g.caller)
    keep_handshake(request.environ)


def check_handshake() -> None:
    """RFC 6455 part 4.2.1; raises Problem 400 or 426."""
    headers = request.headers
    version = headers.get("Sec-WebSocket-Version")
    if version and version != "13":
        raise upgrade_required("Speak version 13 here.", **{"Sec-WebSocket-Version": "13"})
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


def keep_handshake(environ: dict[str, Any]) -> None:
    """Leave wsproto only what it needs: no extension to negotiate, no header to stumble over."""
    handshake = {
        "HTTP_HOST": "localhost",
        "HTTP_CONNECTION": "Upgrade",
        "HTTP_UPGRADE": "websocket",
        "HTTP_SEC_WEBSOCKET_VERSION": "13",
        "HTTP_SEC_WEBSOCKET_KEY": environ["HTTP_SEC_WEBSOCKET_KEY"],
    }
    for name in [name for name in environ if name.startswith("HTTP_")]:
        del environ[name]
    # The Worker in gunicorn.conf.py holds an answer back until it is whole; frames cannot wait.
    client = environ["gunicorn.socket"]
    environ |= handshake | {"gunicorn.socket": getattr(client, "unbuffered", client)}


def serve(talk: Callable[[Channel], None]) -> Callable[[Server], None]:
    """Wrap a talk into a flask-sock handler that always ends with a close code and a log line."""

    def handler(server: Server) -> None:
        opened, channel, closed = time.monotonic(), Channel(server), Closed(GONE)
        log.info("open %s", request.path)
        try:
            with crowd().member(g.caller, channel):
                talk(channel)
        except Closed as reason:
            closed = reason
        except (OSError, LocalProtocolError):
            pass  # the client is gone
        except Exception:
            log.exception("bug in %s", request.path)
            closed = Closed(BUG)
        server.connected = False  # or flask-sock would close once more
        channel.close(closed)
        seconds = time.monotonic() - opened
        log.info("closed %s after %.1f s: %d", request.path, seconds, closed.code)

    return handler


sock = Sock()
sock.route("/echo", bp=routes, endpoint="echo")(serve(echo))
sock.route("/time", bp=routes, endpoint="time")(serve(stream_time))
