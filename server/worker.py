"""The gunicorn worker: fair turns for all connections, timeouts, and a graceful stop.

The code that relies on internals of gunicorn 27.0 and gevent 26.9 is listed in docs/design.md, with
the tests that fail when one of them changes.
"""

import gc
import math
import signal
import socket
import time
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import gevent
from gevent.pool import Pool
from gevent.server import StreamServer
from gunicorn import http, util
from gunicorn.workers.ggevent import GeventWorker

from models import database
from protocol.requests import MAX_BODY_BYTES
from protocol.tcp import TURN_SECONDS, drain
from server.background import Background
from services import Services

SEND_SECONDS = 10  # how long a client may leave a response unread, or a body unsent
HEADER_BYTES = 32_768  # of a request's header
MAX_ACCEPT = 16  # new connections that are accepted before others have their turn
KERNEL_BYTES = 65_536  # size of the kernel's buffers for input and output of a connection
# A stop takes 0.1 s to be noticed, then these, then at most 1 s to save: 4.2 s in all, less than
# graceful_timeout.
IDLE_SECONDS = 0.5  # in which idle clients may still send a request
FINISH_SECONDS = 2.6  # in which running requests may finish; the others end with the process


class Worker(GeventWorker):
    """gunicorn's gevent worker, which serves connections and stops in its own way.

    For each connection, gevent calls `handle`. gunicorn's `handle` then calls `handle_request` for
    each request, and `answer` has gunicorn's `handle_request` call the app.
    """

    # gunicorn calls handle_exit at SIGTERM, which sets `alive` to False, and handle_quit at SIGINT
    # and SIGQUIT. They do the same here, because some platforms stop with SIGINT.
    handle_quit = GeventWorker.handle_exit

    def init_process(self) -> None:
        # Until super() installs the worker's handlers, the master's would swallow a signal.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, self.handle_exit)
        super().init_process()

    def run(self) -> None:
        """Serve until `alive` is False, then stop within 5 s.

        It replaces all of GeventWorker.run, which would stop in another way, and could serve TLS.
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the master gets it, too, and decides
        speed_up(self.cfg)
        limit_header()
        util.write_error = write_error
        self.pool = Pool(self.worker_connections)
        self.idle = set[Any]()  # clients that are expected to send a request
        services: Services = self.wsgi.extensions["services"]
        background = Background(services)
        for task in (background.run, services.ticker.run):
            gevent.spawn(self.keep_running, task)
        servers = [self.listen(listener) for listener in self.sockets]
        while self.alive:
            self.notify()  # tells the master that this worker is alive
            gevent.sleep(0.1)
        services.sockets.shut_down()
        self.stop(servers)
        background.stopping.set()
        services.store.close()
        database.close_all()

    def keep_running(self, task: Any) -> None:
        """Run a task that ends only at the stop. If it fails, the worker stops as usual.

        gunicorn then starts another worker.
        """
        try:
            task()
        except Exception:
            self.log.exception("a background task failed, so this worker stops")
            self.alive = False

    def listen(self, listener: Any) -> StreamServer:
        """Serve each connection in a greenlet of its own."""
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # else the kernel may keep 6 MiB
            listener.setsockopt(socket.SOL_SOCKET, option, KERNEL_BYTES)
        server = StreamServer(listener, partial(self.handle, listener), spawn=self.pool)
        server.max_accept = MAX_ACCEPT
        server.start()
        return server

    def stop(self, servers: list[StreamServer]) -> None:
        """Accept no more connections, and finish the requests."""
        for server in servers:
            server.close()
        self.pool.join(timeout=IDLE_SECONDS)
        for client in self.idle:
            end_input(client)
        self.pool.join(timeout=FINISH_SECONDS)

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        self.idle.add(client)
        try:
            super().handle(listener, client, addr)
        finally:
            self.idle.discard(client)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        """Answer a request, then let other connections have their turn.

        `sock` is the `client` of `handle`. StopIteration tells gunicorn to close the connection;
        after a WebSocket `answer` raises it, too.
        """
        self.idle.discard(sock)
        sock.settimeout(SEND_SECONDS)
        try:
            self.answer(listener_name, req, sock, addr)
        except TimeoutError:
            raise StopIteration from None
        sock.settimeout(None)
        self.idle.add(sock)
        gevent.sleep(TURN_SECONDS)

    def answer(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        """Call the app and send its response.

        After a request whose body is long or chunked, the connection is closed: before the next
        request gunicorn would discard a body of any length, and nobody else would have a turn.
        """
        if unread(req) > MAX_BODY_BYTES:  # nothing has been read yet
            req.force_close()  # so that should_close() is true below
        response = OnePiece(sock)
        try:
            super().handle_request(listener_name, req, response, addr)
        finally:
            response.flush()
            has_rest = unread(req) > 0
            will_close = req.should_close() or not self.alive  # at a stop, gunicorn closes all
            # If the connection stays open instead, gunicorn discards the rest of the body, for as
            # long as a connection may be idle.
            if has_rest and will_close:
                drain(sock)


def end_input(client: Any) -> None:
    """Make the greenlet that reads from this client see the end of its input.

    gevent's own `shutdown` would raise an error in that greenlet, so this calls the socket's.
    """
    with suppress(OSError):
        client._sock.shutdown(socket.SHUT_RD)


class OnePiece:
    """A client's socket that sends a response in one piece, which saves 10 % of a request.

    gunicorn calls `sendall` for the header, and again for the body; here it only collects them. A
    WebSocket has this object as its socket, too, and is flushed only at its end: so it must use
    `send`.
    """

    def __init__(self, sock: Any) -> None:
        self._sock, self._parts = sock, list[bytes]()
        self.sendall = self._parts.append

    def flush(self) -> None:
        if whole := b"".join(self._parts):
            sent = self._sock.send(whole)  # mostly all; sendall would first ask for a buffer's size
            self._sock.sendall(whole[sent:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def unread(req: Any) -> float:
    """How many bytes of the body are still to come; infinite for a chunked body.

    gunicorn's LengthReader counts `length` down; its ChunkedReader has none.
    """
    return getattr(req.body.reader, "length", math.inf)


def speed_up(cfg: Any) -> None:
    """Save work that would be done for each request, 19 % of a request in all."""
    gc.freeze()  # objects that were created at the start are excluded from garbage collection
    # gunicorn's settings become plain attributes, so that Config.__getattr__ is not called.
    cfg.__dict__.update({name: getattr(cfg, name) for name in cfg.settings})
    # The Date header is formatted once a second.
    date = lru_cache(maxsize=1)(util.http_date)
    util.http_date = lambda: date(int(time.time()))
    # All requests share one stream for errors, as they have the same settings.
    http.wsgi.WSGIErrorsWrapper = lru_cache(maxsize=1)(http.wsgi.WSGIErrorsWrapper)


def limit_header() -> None:
    """Limit a request's header to HEADER_BYTES.

    gunicorn's own limit is 800 KiB, and it searches all of a header again whenever a part of it
    arrives. It sets that limit for each request, which this property ignores.
    """
    http.message.Message.max_buffer_headers = property(lambda _: HEADER_BYTES, lambda *_: None)


def write_error(sock: Any, status: int, reason: str, message: str) -> None:
    """Answer a request that gunicorn cannot parse.

    From Python 3.14 on, textwrap.dedent, with which gunicorn's own function of this name writes the
    header, turns the empty line at its end into a bare line feed.
    """
    body = f"{reason}: {message}\n".encode()
    header = f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    util.write_nonblock(sock, f"{header}Content-Length: {len(body)}\r\n\r\n".encode() + body)
