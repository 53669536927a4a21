"""The gunicorn worker: fair turns for all connections, and bounds on what a request may cost.

The code that relies on internals of gunicorn 27.0 and gevent 26.9 is listed in docs/design.md, with
the tests that fail when one of them changes.
"""

import socket
from typing import Any

import gevent
from gevent.lock import BoundedSemaphore
from gevent.server import StreamServer
from gunicorn.workers.ggevent import GeventWorker

from server import gunicorn_patches
from ws.connection import TURN_SECONDS, drain

SEND_SECONDS = 10  # how long a client may leave a response unread, or a body unsent
BODY_HEADERS = {"CONTENT-LENGTH", "TRANSFER-ENCODING"}
MAX_ACCEPT = 16  # new connections that are accepted before others have their turn
KERNEL_BYTES = 65_536  # size of the kernel's buffers for input and output of a connection
# gunicorn takes up to 1 s to notice a stop. Requests then have GRACEFUL_SECONDS; ending idle
# connections takes 1 s, the last save 1 s: together less than the graceful_timeout of the master.
GRACEFUL_SECONDS = 1


class Worker(GeventWorker):
    """gunicorn's gevent worker, with bounds on what a connection and a request may cost.

    gevent starts a greenlet for each connection, in which one function calls the next:

        Worker.handle                here
        GeventWorker.handle          gunicorn
        AsyncWorker.handle           gunicorn: reads one request after another
        Worker.handle_request        here: bounds what a request may cost
        GeventWorker.handle_request  gunicorn
        AsyncWorker.handle_request   gunicorn: calls the app, and sends what that returns
    """

    # Pages take long: one begins in each round of gevent's loop, with requests to the API between.
    page_turn = BoundedSemaphore()
    syncing: gevent.Greenlet | None = None  # set by background.start

    def set_bounds(self) -> None:
        """Called in the worker's process, before it serves."""
        for listener in self.sockets:
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # else the kernel may keep 6 MiB
                listener.setsockopt(socket.SOL_SOCKET, option, KERNEL_BYTES)
        StreamServer.max_accept = MAX_ACCEPT
        self.cfg.set("workers", 1)  # with more, gunicorn would accept one connection at a time
        self.cfg.set("graceful_timeout", GRACEFUL_SECONDS)
        gunicorn_patches.apply(self.cfg)

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve a connection.

        gunicorn asks the listener for its address, which fails once a stop has closed it.
        """
        super().handle(client, client, addr)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        """Answer a request, then let other connections have their turn.

        A request that announces a body is the last one of its connection: before the next, gunicorn
        would discard what the app did not read, of any length, and serve no other connection.
        """
        if not req.path.startswith("/api/"):
            with self.page_turn:
                gevent.sleep(TURN_SECONDS)
        is_last = not BODY_HEADERS.isdisjoint(dict(req.headers))
        if is_last:
            req.force_close()  # gunicorn then sends Connection: close, and raises StopIteration
        sock.settimeout(SEND_SECONDS)
        try:
            with gunicorn_patches.ResponseSocket(sock) as response:
                super().handle_request(listener_name, req, response, addr)
        finally:
            if is_last:
                drain(sock)
        sock.settimeout(None)
        gevent.sleep(TURN_SECONDS)

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Log an error; a stop ends idle connections with GreenletExit, which is not an error."""
        if not isinstance(exc, gevent.GreenletExit):
            super().handle_error(req, client, addr, exc)
