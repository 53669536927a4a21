"""The gunicorn worker: fair turns, limits on waiting, and a stop that loses nothing.

Almost all that leans on inner parts of gunicorn 27.0 and gevent 26.9 is here, and
`tests/test_worker.py` fails when one of them changes:

- `handle`, `handle_request`, `timeout_ctx`, `load_wsgi` and `alive` of the worker: gunicorn's
  AsyncWorker calls or reads them.
- `req.body.reader`, `req.unreader`, `req.force_close()` and `req.should_close()`: a request's body,
  and what comes after. `Message.max_buffer_headers`: how long its header may be.
- `cfg.__dict__`: gunicorn reads 22 settings per request through a slow `__getattr__`; as plain
  attributes they save 12 % of a request.
- `util.http_date`, `WSGIErrorsWrapper`: gunicorn formats the date, and makes a stream for errors,
  for every response; the date once a second saves 3 %, one stream for all 4 %.
- `sock.sendall`: all that gunicorn uses to send a response.
- `StreamServer.do_read()`, `do_handle()`, `full()`, `closed` and `max_accept`: how gevent accepts
  connections.
- `Arbiter.SIGNALS`, `handle_hup`, `kill_workers` and a StopIteration: how the master takes signals.
- `client._sock`: the socket below gevent's, whose `shutdown` does not raise in the reader.
"""

import gc
import math
import os
import signal
import socket
import time
from collections import OrderedDict
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from typing import Any

import gevent
from gevent.pool import Pool
from gevent.server import StreamServer
from gunicorn import http, util
from gunicorn.arbiter import Arbiter
from gunicorn.errors import AppImportError
from gunicorn.workers.base_async import AsyncWorker
from gunicorn.workers.ggevent import GeventWorker

from protocol.tcp import READ_BYTES, TURN_SECONDS, drain
from settings import MAX_BODY_BYTES, SettingsError

SEND_SECONDS = 10  # for which a client may leave a response unread, or a body unsent
HEADER_SECONDS = 10  # for which a request's header may take to arrive
HEADER_BYTES = 32_768  # of a request's header
IDLE_SECONDS = 0.8  # after the stop signal, in which idle clients may still send a request
FINISH_SECONDS = 2.6  # after that, for requests that are being answered
SAVE_SECONDS = 1.2  # after that, for counts that cannot be saved at once
SPARE_CONNECTIONS = 10  # that are kept free by closing idle ones
KERNEL_BYTES = 65_536  # of input, and of output, that may wait in the kernel


class Worker(GeventWorker):
    """gunicorn's gevent worker, with its own way to serve a connection and to stop."""

    def handle_hangup(self, number: int, frame: Any) -> None:
        """The terminal was closed, which signals all processes of the group: stop the master."""
        if signal.SIGHUP in Arbiter.SIGNALS:  # else it was started with nohup
            os.kill(self.ppid, signal.SIGTERM)

    # SIGINT and SIGQUIT stop as carefully as SIGTERM; some platforms stop with SIGINT.
    handle_quit = GeventWorker.handle_exit

    def load_wsgi(self) -> None:
        try:
            super().load_wsgi()
        except SettingsError as error:  # gunicorn would start a new worker again and again
            raise AppImportError(str(error)) from None

    def run(self) -> None:
        """Serve until a signal sets `alive` to False, then stop within 5 s.

        Fly kills after that.
        """
        signal.signal(signal.SIGHUP, self.handle_hangup)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # `post_fork` has blocked some
        speed_up(self.cfg)
        self.pool = Pool(self.worker_connections)
        # Clients without a complete request, oldest first, and until when each may stay so.
        self.idle = OrderedDict[Any, float]()
        background = self.wsgi.extensions["background"]
        saving = gevent.spawn(background.run)
        gevent.spawn(self.wsgi.extensions["ticker"].run)
        try:
            self.serve()
        finally:
            background.stopping.set()
            if not gevent.wait([saving], timeout=SAVE_SECONDS):
                self.log.error("the last counts could not be saved")

    def serve(self) -> None:
        """Accept connections until the signal."""
        listeners = [Listener(s, partial(self.handle, None), spawn=self.pool) for s in self.sockets]
        for listener in listeners:
            limit_kernel_buffers(listener.socket)
            listener.start()
        while self.alive:
            self.notify()
            self.end_idle(time.monotonic())
            gevent.sleep(0.1)
        self.stop(listeners)

    def stop(self, listeners: list["Listener"]) -> None:
        """Close the WebSockets, and finish the requests."""
        sockets = self.wsgi.extensions["sockets"]
        sockets.shut_down()
        for listener in listeners:
            listener.close()
        self.pool.join(timeout=IDLE_SECONDS)
        sockets.shut_down()  # those that were being admitted
        self.end_idle(math.inf)
        self.pool.join(timeout=FINISH_SECONDS)

    def end_idle(self, now: float) -> None:
        """End the connections whose time for a next request is over.

        One look at all, ten times a second, is cheaper than a timer for each request: 2 % of it.
        """
        for client, until in self.idle.items():
            if until < now:
                hang_up(client)

    # gunicorn would limit the time for a header by `keepalive`, too; `end_idle` limits it.
    timeout_ctx = nullcontext

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve a connection. If there are too many, close the one that is idle for longest.

        That may be this one: where all others are being answered, there is no room for it.
        """
        self.idle[client] = time.monotonic() + HEADER_SECONDS
        if self.pool.free_count() < SPARE_CONNECTIONS:
            hang_up(self.idle.popitem(last=False)[0])
        try:
            # gunicorn only asks the listener for its address. The client's socket knows it, too,
            # and is still open at a stop.
            AsyncWorker.handle(self, client, client, addr)
        finally:
            self.idle.pop(client, None)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        """Answer a request, then await the next one for as long as `keepalive` says.

        StopIteration ends the connection.
        """
        self.idle.pop(sock, None)
        sock.settimeout(SEND_SECONDS)
        try:
            self.answer(listener_name, req, sock, addr)
        except TimeoutError:
            raise StopIteration from None
        sock.settimeout(None)
        self.idle[sock] = time.monotonic() + self.cfg.keepalive
        gevent.sleep(TURN_SECONDS)  # others have their turn, whether there is input here or not
        if not req.unreader.buf.tell():
            req.unreader.unread(sock.recv(READ_BYTES))  # nothing, if the client has left
        self.idle[sock] = time.monotonic() + HEADER_SECONDS

    def answer(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        """Call the app and send its response. After a long or chunked body it closes.

        gunicorn would discard a body of any length, and nobody would have a turn meanwhile.
        """
        if unread(req) > MAX_BODY_BYTES:
            req.force_close()
        response = OnePiece(sock, req.unreader)
        try:
            super().handle_request(listener_name, req, response, addr)
        finally:
            response.flush()
            if unread(req) and (req.should_close() or not self.alive):
                drain(sock)


def unread(req: Any) -> float:
    """How many bytes of the body are still to come; for a chunked body this is not known."""
    return getattr(req.body.reader, "length", math.inf)


def speed_up(cfg: Any) -> None:
    """Spare gunicorn work that it would do for each request, 20 % of a request in all.

    And limit the header: gunicorn searches all of it again whenever a part arrives. The property
    ignores the limit that gunicorn sets for each request.
    """
    gc.freeze()  # what the start has made is not searched for garbage again and again
    cfg.__dict__.update({name: getattr(cfg, name) for name in cfg.settings})
    date = lru_cache(maxsize=1)(util.http_date)
    util.http_date = lambda: date(int(time.time()))
    http.message.Message.max_buffer_headers = property(lambda _: HEADER_BYTES, lambda *_: None)
    http.wsgi.WSGIErrorsWrapper = lru_cache(maxsize=1)(http.wsgi.WSGIErrorsWrapper)


class OnePiece:
    """A client's socket that sends a response in one piece: 12 % of a request.

    gunicorn sends the header and the body each by itself. `take_early_input` gives what came in
    one packet with a handshake: frames, if the handshake is accepted.
    """

    def __init__(self, sock: Any, unreader: Any) -> None:
        self._sock, self._parts = sock, list[bytes]()
        self.sendall, self.take_early_input = self._parts.append, unreader.take_buffered

    def flush(self) -> None:
        if whole := b"".join(self._parts):
            # One send is mostly enough; sendall alone would first ask for the buffer's size.
            self._sock.sendall(whole[self._sock.send(whole) :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Listener(StreamServer):
    """Accepts what waits in the backlog before it closes; the kernel would reset it."""

    max_accept = 1  # at once; with 100, as gevent has it, all others would wait for the new ones

    def close(self) -> None:
        with suppress(OSError):  # too many open files
            while not self.closed and not self.full() and (accepted := self.do_read()):
                self.do_handle(*accepted)
        super().close()


def limit_kernel_buffers(listener: Any) -> None:
    """For the connections that it accepts; else each may take 6 MiB of the kernel's memory."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        listener.setsockopt(socket.SOL_SOCKET, option, KERNEL_BYTES)


def post_fork(arbiter: Arbiter, worker: Worker) -> None:
    """Let a stop wait until `Worker.run`; the master's handlers, until then, would ignore it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT})


def on_reload(arbiter: Arbiter) -> None:
    """Stop instead, if this SIGHUP came because the terminal was closed."""
    if arbiter.in_terminal and not os.isatty(0):
        raise StopIteration


def restart_worker(arbiter: Arbiter) -> None:
    """At SIGHUP with SQLite: gunicorn would start a worker beside the old one, and both count."""
    on_reload(arbiter)
    arbiter.kill_workers(signal.SIGTERM)


def respect_nohup() -> None:
    """Let a service that was started with nohup ignore SIGHUP; gunicorn would handle it."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        Arbiter.SIGNALS = [number for number in Arbiter.SIGNALS if number != signal.SIGHUP]


def hang_up(client: Any) -> None:
    """Make an idle connection end as if its client had closed it."""
    with suppress(OSError):
        client._sock.shutdown(socket.SHUT_RD)
