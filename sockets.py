"""The two WebSockets, echo and time, over flask-sock: who gets in, and what they are told."""

import logging
import time
from collections.abc import Callable

from flask import Blueprint, Flask, current_app, g, request
from flask_sock import Sock
from simple_websocket import Server
from wsproto.utilities import LocalProtocolError

import clock
from auth import guard
from channel import BUG, GOING_AWAY, GONE, SERVER_OPTIONS, Channel, Closed, frame, negotiate
from metronome import Metronome
from problems import Problem
from settings import Settings

log = logging.getLogger(__name__)

TOO_MANY = "too_many_sockets"
RETRY = {"Retry-After": "10"}  # seconds, for those who have, or find, too many sockets open

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
    """The open channels, each with its caller: a key's id, or a client's address."""

    def __init__(self, limit: int, limit_per_caller: int) -> None:
        self.limit, self.limit_per_caller = limit, limit_per_caller
        self.callers: dict[Channel, str] = {}

    def check(self, caller: str) -> None:
        """Raises Problem when there is no room for one more."""
        if len(self.callers) >= self.limit:
            raise Problem(503, TOO_MANY, "The server has no socket left.", headers=RETRY)
        if list(self.callers.values()).count(caller) >= self.limit_per_caller:
            raise Problem(429, TOO_MANY, "You have too many sockets open.", headers=RETRY)

    def end(self, code: int = GOING_AWAY, caller: str | None = None) -> None:
        """Close all channels, or those of one caller."""
        for channel, owner in self.callers.items():
            if caller in (None, owner):
                channel.end(code)


@routes.before_request
def admit() -> None:
    """Refuse with HTTP, before the upgrade, whatever is to be refused."""
    key = request.args.get("api_key") or request.headers.get("X-API-Key")
    negotiate(request.environ)
    g.caller = request.remote_addr or ""
    if request.endpoint == "sockets.time":
        g.key = guard().check(key)
        g.caller = g.key.id
        guard().spend(g.key, cost=0)  # so that a refusal carries the headers of the limits, too
    current_app.extensions["crowd"].check(g.caller)
    if "key" in g:
        guard().spend(g.key)


@routes.errorhandler(ConnectionError)
def vanish(error: ConnectionError) -> tuple[str, int]:
    """The client left during the handshake: no bug, and nobody to be answered."""
    return "", 400


def serve(talk: Callable[[Channel], None]) -> Callable[[Server], None]:
    """Wrap a talk into a flask-sock handler that always ends with a close code and a log line."""

    def handler(server: Server) -> None:
        opened, channel = time.monotonic(), Channel(server)
        log.info("open %s", request.path)
        callers = current_app.extensions["crowd"].callers
        callers[channel] = g.caller
        try:
            talk(channel)
        except Closed as reason:
            closed = reason
        except (OSError, LocalProtocolError):
            closed = Closed(GONE)
        except Exception:
            log.exception("bug in %s", request.path)
            closed = Closed(BUG)
        finally:
            del callers[channel]
        server.connected = False  # or flask-sock would close once more
        channel.close(closed)
        seconds = time.monotonic() - opened
        log.info("closed %s after %.1f s: %d", request.path, seconds, closed.code)

    return handler


sock = Sock()
sock.route("/echo", bp=routes, endpoint="echo")(serve(echo))
sock.route("/time", bp=routes, endpoint="time")(serve(stream_time))
