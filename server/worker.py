"""The gunicorn worker: fair turns for all connections, timeouts, and a graceful stop.

The code that relies on internals of gunicorn 27.0 and gevent 26.9 is listed in docs/design.md, with
the tests that fail when one of them changes.
"""

import errno
import math
import signal
import socket
from functools import partial
from select import select
from typing import Any

import gevent
from gevent.pool import Pool
from gevent.server import StreamServer
from gunicorn.workers.ggevent import GeventWorker

from models import database
from protocol.application import MAX_BODY_BYTES
from protocol.tcp import TURN_SECONDS, drain
from server import repairs
from server.background import Background
from services import Services

SEND_SECONDS = 10  # how long a client may leave a response unread, or a body unsent
MAX_ACCEPT = 16  # new connections that are accepted before others have their turn
KERNEL_BYTES = 65_536  # size of the kernel's buffers for input and output of a connection
# A stop takes 0.1 s to be noticed, then these, then at most 1 s to save: 4.5 s in all, less than
# graceful_timeout.
IDLE_SECONDS = 0.5  # in which clients may still be accepted, and then, if idle, send a request
FINISH_SECONDS = 1.9  # in which running requests may finish; the others end with the process
LAST_SYNC_SECONDS = 0.5  # in which the background may finish what it has begun


class Worker(GeventWorker):
    """gunicorn's gevent worker, which serves connections and stops in its own way.

    gevent starts a greenlet for each connection, in which one function calls the next:

        GeventWorker.handle          gunicorn
        AsyncWorker.handle           gunicorn: reads one request after another
        Worker.handle_request        here: bounds what a request may cost
        GeventWorker.handle_request  gunicorn
        AsyncWorker.handle_request   gunicorn: calls the app, and sends what that returns
    """

    requests = 0  # that are being answered, and WebSockets
    is_serving = True  # False when nothing that is counted would be saved any more

    def init_process(self) -> None:
        self.handle_stops()  # until gunicorn does, the master's handlers would swallow a signal
        super().init_process()

    def handle_stops(self) -> None:
        """Let SIGINT and SIGQUIT stop as SIGTERM does, because some platforms stop with SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, self.handle_exit)  # which sets `alive` to False

    def run(self) -> None:
        """Serve until `alive` is False, then stop within 5 s.

        It replaces all of GeventWorker.run, which would stop in another way, and could serve TLS.
        """
        self.handle_stops()  # again, in place of gunicorn's handlers
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the master gets it, too, and decides
        repairs.apply(self.cfg)
        self.connections = Pool(self.worker_connections)
        services: Services = self.wsgi.extensions["services"]
        background = Background(services)
        tasks = [gevent.spawn(run) for run in (background.run, services.ticker.run)]
        for task in tasks:
            task.link_exception(self.give_up)
        services.store.open()
        servers = [self.listen(listener) for listener in self.sockets]
        while self.alive:
            self.notify()  # tells the master that this worker is alive
            gevent.sleep(0.1)
        services.sockets.shut_down()
        background.stopping.set()
        self.stop(servers)
        tasks[0].join(timeout=LAST_SYNC_SECONDS)  # a save that is in progress
        services.store.close()
        database.close_all()

    def give_up(self, task: Any) -> None:
        """Stop as usual, because a background task has failed; gunicorn starts another worker."""
        self.log.error("a background task failed, so this worker stops")  # gevent says why
        self.alive = False

    def listen(self, listener: Any) -> StreamServer:
        """Serve each connection in a greenlet of its own."""
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # else the kernel may keep 6 MiB
            listener.setsockopt(socket.SOL_SOCKET, option, KERNEL_BYTES)
        server = StreamServer(listener, partial(self.handle, listener), spawn=self.connections)
        server.max_accept = MAX_ACCEPT
        server.start()
        return server

    def stop(self, servers: list[StreamServer]) -> None:
        """Accept the connections that wait for it, then no more, and finish the requests."""
        with gevent.Timeout(IDLE_SECONDS, False):  # False: raises nothing
            while select(self.sockets, [], [], 0)[0]:
                gevent.sleep(0.02)
        for server in servers:
            server.close()
        self.connections.join(timeout=IDLE_SECONDS)
        with gevent.Timeout(FINISH_SECONDS, False):
            answered = -1
            while self.requests or answered < self.nr:  # gunicorn counts those that it has answered
                answered = self.nr
                gevent.sleep(0.02)
        self.is_serving = False

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        """Answer a request, then let other connections have their turn.

        Where the connection is to be closed, gunicorn raises StopIteration. It is closed after a
        request whose body is long or chunked: before the next request gunicorn would discard a body
        of any length, and nobody else would have a turn.
        """
        if not self.is_serving:
            raise ConnectionResetError(errno.ECONNRESET, "stopped")  # which gunicorn ignores
        self.requests += 1
        sock.settimeout(SEND_SECONDS)
        if unread(req) > MAX_BODY_BYTES:  # nothing has been read yet
            req.force_close()
        try:
            with repairs.ResponseSocket(sock) as response:
                super().handle_request(listener_name, req, response, addr)
        finally:
            # If the connection stays open instead, gunicorn discards the rest of the body, for as
            # long as a connection may be idle. At a stop, and with --keep-alive 0, it closes all.
            closes = req.should_close() or not (self.alive and self.cfg.keepalive)
            if closes and unread(req):
                drain(sock)
            self.requests -= 1
        sock.settimeout(None)
        gevent.sleep(TURN_SECONDS)


def unread(req: Any) -> float:
    """How many bytes of the body are still to come; infinite for a chunked body.

    gunicorn's LengthReader counts `length` down; its ChunkedReader has none.
    """
    return getattr(req.body.reader, "length", math.inf)
