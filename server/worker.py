"""The gunicorn worker: fair turns, limits on waiting, and a stop that loses nothing.

Everything that leans on inner parts of gunicorn 27.0 and gevent 26.9 is here, and
`tests/test_worker.py` fails when one of them changes:

- `handle`, `handle_request`, `timeout_ctx`, `load_wsgi`, `init_signals` and `alive` of the worker:
  gunicorn calls or reads them as AsyncWorker does.
- `req.body.reader`, `req.unreader` and `req.force_close()`: what is known of a request's body.
- `cfg.__dict__`: gunicorn reads 22 settings per request through a slow `__getattr__`.
- `StreamServer.do_read()`, `do_handle()`, `full()` and `closed`: how gevent accepts a connection.
- `client._sock`: the socket below gevent's, whose `shutdown` does not raise in the reader.
"""

import math
import os
import signal
import socket
from contextlib import suppress
from functools import partial
from io import BytesIO
from typing import Any

import gevent
from gevent.pool import Pool
from gevent.server import StreamServer
from gunicorn.errors import AppImportError
from gunicorn.http.body import LengthReader
from gunicorn.workers.base_async import AsyncWorker
from gunicorn.workers.ggevent import GeventWorker

from protocol.tcp import TURN_SECONDS, drain
from settings import MAX_BODY_BYTES, SettingsError

SEND_SECONDS = 10  # for which a client may leave a response unread
HEADER_SECONDS = 10  # for which a request's header may take to arrive
IDLE_SECONDS = 0.8  # after the stop signal, in which idle clients may still send a request
FINISH_SECONDS = 2  # after that, for requests that are being answered
SAVE_SECONDS = 1.7  # after that, for counts that cannot be saved at once
SPARE_CONNECTIONS = 10  # that are kept free by closing idle ones
KERNEL_BYTES = 65_536  # of input, and of output, that wait in the kernel; without it up to 6 MiB


class Worker(GeventWorker):
    """gunicorn's gevent worker, with its own way to serve a connection and to stop."""

    def init_signals(self) -> None:
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as nohup wants it
        super().init_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else self.handle_hangup)

    def handle_hangup(self, number: int, frame: Any) -> None:
        """The terminal was closed, which signals all processes of the group: stop the master."""
        os.kill(self.ppid, signal.SIGTERM)

    # SIGINT and SIGQUIT stop as carefully as SIGTERM; some platforms stop with SIGINT.
    handle_quit = GeventWorker.handle_exit

    def load_wsgi(self) -> None:
        try:
            super().load_wsgi()
        except SettingsError as error:  # gunicorn would start a new worker again and again
            raise AppImportError(str(error)) from None

    def run(self) -> None:
        """Serve until a signal sets `alive` to False, then stop within 5 s, as Fly wants."""
        self.cfg.__dict__.update({name: getattr(self.cfg, name) for name in self.cfg.settings})
        self.clients: set[Any] = set()
        self.idle: dict[Any, None] = {}  # clients that wait for their next request, in order
        pool = Pool(self.worker_connections)
        listeners = [
            Listener(sock, partial(self.handle, sock), spawn=pool) for sock in self.sockets
        ]
        background = self.wsgi.extensions["background"]
        saving = gevent.spawn(background.run)
        try:
            for listener in listeners:
                listener.start()
            while self.alive:
                self.notify()
                gevent.sleep(0.1)
            self.drain(listeners, pool)
        finally:
            background.stopping.set()
            if not gevent.wait([saving], timeout=SAVE_SECONDS):
                self.log.error("the last counts could not be saved")

    def drain(self, listeners: "list[Listener]", pool: Pool) -> None:
        """Close the WebSockets and the listeners, then finish the requests."""
        self.wsgi.extensions["sockets"].shut_down()
        for listener in listeners:
            listener.close()
        pool.join(timeout=IDLE_SECONDS)
        for client in list(self.idle):
            hang_up(client)
        pool.join(timeout=FINISH_SECONDS)

    def timeout_ctx(self) -> gevent.Timeout:
        """For the header of a request; gunicorn would take its `keepalive`."""
        return gevent.Timeout(HEADER_SECONDS if self.alive else IDLE_SECONDS, False)

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve a connection. If there are too many, close the one that is idle for longest."""
        self.clients.add(client)
        self.idle[client] = None
        if len(self.clients) > self.worker_connections - SPARE_CONNECTIONS:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            hang_up(oldest)
        try:
            # AsyncWorker asks the listener only for its address; a closed one would have none.
            AsyncWorker.handle(self, client, client, addr)
        finally:
            self.clients.discard(client)
            self.idle.pop(client, None)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        """Answer a request, and let others have their turn; StopIteration ends the connection."""
        self.idle.pop(sock, None)
        sock.settimeout(SEND_SECONDS)
        # gunicorn discards the rest of a body of any length, and nobody has a turn meanwhile.
        discardable = body_length(req) <= MAX_BODY_BYTES
        if not discardable:
            req.force_close()
        early = self.take_early_frames(req)
        try:
            super().handle_request(listener_name, req, sock, addr)
            req.unreader.unread(early)
            gevent.sleep(TURN_SECONDS)
            self.await_next_request(req, sock)
        except TimeoutError:
            raise StopIteration from None
        finally:
            if not discardable:
                with suppress(OSError):
                    drain(sock)

    def take_early_frames(self, req: Any) -> bytes:
        """What came in one packet with a handshake; the app reads it as the request's body."""
        upgrade = any(
            name == "UPGRADE" and "websocket" in text.lower() for name, text in req.headers
        )
        if not (upgrade and body_length(req) == 0):
            return b""
        early: bytes = req.unreader.take_buffered()
        req.body = BytesIO(early)
        return early

    def await_next_request(self, req: Any, sock: Any) -> None:
        """Wait for input for as long as `keepalive` says; raises TimeoutError."""
        self.idle[sock] = None
        if not req.unreader.buf.tell():
            sock.settimeout(self.cfg.keepalive)
            sock.recv(1, socket.MSG_PEEK)
        sock.settimeout(None)


def body_length(req: Any) -> float:
    """In bytes; infinite for a chunked body."""
    reader = req.body.reader
    return reader.length if isinstance(reader, LengthReader) else math.inf


class Listener(StreamServer):
    """Accepts what waits in the backlog before it closes; the kernel would reset it."""

    def start(self) -> None:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # connections inherit them
            self.socket.setsockopt(socket.SOL_SOCKET, option, KERNEL_BYTES)
        super().start()

    def close(self) -> None:
        with suppress(OSError):  # too many open files
            while not self.closed and not self.full() and (accepted := self.do_read()):
                self.do_handle(*accepted)
        super().close()


def hang_up(client: Any) -> None:
    """Make an idle connection end as if its client had closed it."""
    with suppress(OSError):
        client._sock.shutdown(socket.SHUT_RD)
