"""The gunicorn worker: fair turns for all connections, and bounds on what a request may cost.

The code that relies on internals of gunicorn 27.0 and gevent 26.9 is listed in docs/design.md, with
the tests that fail when one of them changes.
"""

import errno
import socket
from typing import Any

import gevent
from gunicorn.workers.ggevent import GeventWorker

from server import lifecycle
from service.connections import TURN_SECONDS, half_close

SEND_SECONDS = 10  # how long a client may leave a part of a response unread, or a body unsent


class Worker(GeventWorker):
    """gunicorn's gevent worker, with bounds on what a connection and a request may cost.

    gevent starts a greenlet for each connection, in which one function calls the next:

        Worker.handle                here
        GeventWorker.handle          gunicorn
        AsyncWorker.handle           gunicorn: reads one request after another
        Worker.handle_request        here: gives others their turn
        Worker.answer                here: bounds what a response may wait
        GeventWorker.handle_request  gunicorn
        AsyncWorker.handle_request   gunicorn: calls the app, and sends what that returns
    """

    def run(self) -> None:
        self.script_name = self.wsgi.settings.script_name  # the prefix of all paths
        self.wsgi.has_our_worker = True
        with lifecycle.serving(self, self.wsgi):
            super().run()

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve a connection, unless the client has reset it while it waited to be accepted.

        gunicorn asks the listener for its address, which fails once a stop has closed it. So the
        client's socket is given instead.
        """
        if not client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            super().handle(client, client, addr)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        """Answer a request, then let other connections have their turn."""
        if not f"{req.path}/".startswith(f"{self.script_name}/"):
            # This leads to a 404; gunicorn itself would answer a path without the prefix with 500.
            req.path = f"{self.script_name}/outside{req.path}"
        # Otherwise each request of a connection would wait longer than the one before.
        req.unreader.parts = 0
        self.answer(listener_name, req, sock, addr)
        gevent.sleep(TURN_SECONDS)

    def answer(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        """Let gunicorn answer a request, and disconnect a client that does not read.

        A request that announces a body is the last one of its connection: before the next one,
        gunicorn would read the rest of the body, however long, and let nobody else run.
        """
        has_body = not {"CONTENT-LENGTH", "TRANSFER-ENCODING"}.isdisjoint(dict(req.headers))
        if has_body:
            req.force_close()  # gunicorn then sends Connection: close, and raises StopIteration
        sock.settimeout(SEND_SECONDS)
        try:
            super().handle_request(listener_name, req, sock, addr)
        except TimeoutError as error:  # gunicorn would log it; it ignores a broken pipe
            raise BrokenPipeError(errno.EPIPE, "the client does not read") from error
        finally:
            if has_body:
                half_close(sock)
        # gunicorn limits the wait for the next request itself, which may be longer.
        sock.settimeout(None)

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Answer a request that can't be parsed, and log the error, without the query.

        A stop ends idle connections with GreenletExit, which is not an error.
        """
        if req:
            req.uri = req.path  # gunicorn logs the URI
        if not isinstance(exc, gevent.GreenletExit):
            super().handle_error(req, client, addr, exc)
            half_close(client)
