"""The gunicorn worker: fair turns for all connections, and bounds on what a request may cost.

The code that relies on internals of gunicorn 27.0 and gevent 26.9 is listed in docs/design.md, with
the tests that fail when one of them changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import gevent
from gevent.lock import BoundedSemaphore
from gunicorn import util
from gunicorn.workers.ggevent import GeventWorker

from http_api.headers import is_api
from server.gunicorn_patches import ResponseSocket
from ws.connection import TURN_SECONDS, drain

SEND_SECONDS = 10  # how long a client may leave a part of a response unread, or a body unsent
BODY_HEADERS = {"CONTENT-LENGTH", "TRANSFER-ENCODING"}


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

    # Pages are slow to render, so only one starts per loop iteration; API requests run in between.
    page_turn = BoundedSemaphore()

    def load_wsgi(self) -> None:
        """With --reload, a mistake in an edited file ends nothing: the next edit may mend it."""
        try:
            super().load_wsgi()
        except Exception as error:
            if not self.cfg.reload:
                raise
            self.log.exception("the edited files cannot be imported")
            for frame, _ in walk_tb(error.__traceback__):  # a module that failed is in no list
                self.reloader.add_extra_file(frame.f_code.co_filename)
            self.wsgi = util.make_fail_app("The edited files cannot be imported; see the log.\n")

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve a connection.

        gunicorn asks the listener for its address, which fails once a stop has closed it.
        """
        super().handle(client, client, addr)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        """Answer a request, then let other connections have their turn."""
        if not is_api(req.path):
            with self.page_turn:
                gevent.sleep(TURN_SECONDS)
        with bounded(req, sock) as response:
            super().handle_request(listener_name, req, response, addr)
        gevent.sleep(TURN_SECONDS)

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Log an error, without the query of the request.

        A stop ends idle connections with GreenletExit, which is not an error.
        """
        if req:
            req.uri = req.path
        if not isinstance(exc, gevent.GreenletExit):
            super().handle_error(req, client, addr, exc)


@contextmanager
def bounded(req: Any, sock: Any) -> Iterator[ResponseSocket]:
    """Bound what a request may cost; yields the socket for its response.

    A request that announces a body is the last one of its connection: before the next, gunicorn
    would discard what the app did not read, of any length, and serve no other connection.
    """
    is_last = not BODY_HEADERS.isdisjoint(dict(req.headers))
    if is_last:
        req.force_close()  # gunicorn then sends Connection: close, and raises StopIteration
    sock.settimeout(SEND_SECONDS)
    response = ResponseSocket(sock)
    try:
        yield response
    finally:
        response.end()
        if is_last:
            drain(sock)
    sock.settimeout(None)
