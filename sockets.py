"""The WebSockets: a public echo, and the server's time for clients with an API key."""

import time

from flask import g

from service.application import SOCKETS
from service.timestamps import display, timestamp
from ws.connection import WebSocket, frame
from ws.open_sockets import SocketBlueprint
from ws.ticker import Ticker

bp = SocketBlueprint("sockets", __name__, url_prefix=SOCKETS)


@bp.socket("/echo")
def echo(ws: WebSocket) -> None:
    """Send every message back, in order."""
    for text in ws.messages():
        now = time.time()
        ws.send(
            frame(type="echo", message=text, timestamp=timestamp(now), server_time=display(now))
        )


@bp.socket("/time", needs_key=True)
def stream_time(ws: WebSocket) -> None:
    """Confirm the key, then send the time once a second."""
    ws.send(frame(type="auth_success", api_key_name=g.key.name))
    ticker.stream(ws)


def time_update() -> bytes:
    now = time.time()
    return frame(type="time_update", formatted=display(now), timestamp=timestamp(now))


ticker = Ticker(time_update)  # one for all clients
