"""How the service is served: worker, limits, logging, clean stop."""

import gc
import logging
import re
import resource
import signal
import socket
import time
from contextlib import suppress
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import gevent
from gunicorn import util
from gunicorn.arbiter import Arbiter
from gunicorn.errors import AppImportError
from gunicorn.glogging import Logger
from gunicorn.workers import ggevent

import settings

GOODBYE_SECONDS = 1.2  # for requests under way, and then for counts that cannot be saved at once
RECEIVE_BYTES = 64 * 1024  # of a connection; a flood beyond it waits at the client


class Worker(ggevent.GeventWorker):
    """gunicorn's gevent worker with fair turns, a background, and a stop that loses nothing."""

    def load_wsgi(self) -> None:
        try:
            super().load_wsgi()
        except settings.SettingsError as error:
            raise AppImportError(str(error)) from None

    def run(self) -> None:
        # Imported here because in the master, before gevent's patches, it would be too early.
        from background import Background

        self.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self.clients: WeakSet[Any] = WeakSet()  # gevent sockets
        # For every request gunicorn asks for 22 settings, of a slow __getattr__ without this.
        self.cfg.__dict__.update({name: getattr(self.cfg, name) for name in self.cfg.settings})
        gc.freeze()  # what was made until now stays: no need to look at it again and again
        gc.set_threshold(700, 10, 1000)  # a full look at 100,000 known keys stops all for 80 ms
        background = Background(self.wsgi)
        saving = gevent.spawn(background.run)
        gevent.spawn(self.say_goodbye)
        try:
            super().run()
        finally:
            background.stopping.set()
            if not gevent.wait([saving], timeout=GOODBYE_SECONDS):
                self.log.error("the last counts could not be saved")

    def say_goodbye(self) -> None:
        """Once the worker is to stop, close the WebSockets, and later the idle connections."""
        while self.alive:
            gevent.sleep(0.1)
        crowd = self.wsgi.extensions["crowd"]
        crowd.limit = 0  # let no more in
        crowd.end()
        gevent.sleep(GOODBYE_SECONDS)
        for client in self.clients:
            with suppress(OSError):  # whose answer is under way still gets it
                client._sock.shutdown(socket.SHUT_RD)  # gevent's own would raise in the reader

    # SIGINT and SIGQUIT stop as carefully as SIGTERM; some platforms stop with SIGINT.
    handle_quit = ggevent.GeventWorker.handle_exit

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        self.clients.add(client)
        # The listener is only asked for its address; after the stop it would have none any more.
        super().handle(client, client, addr)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        answer = Answer(sock)
        try:
            super().handle_request(listener_name, req, answer, addr)
        finally:
            answer.flush()
        gevent.sleep(0)  # a busy connection would keep the turn as long as it has requests


class Listener(ggevent.StreamServer):
    """gevent's, but who is waiting when it closes is let in; the kernel would reset them."""

    def close(self) -> None:
        with suppress(OSError):  # no file left for one more
            while not (self.closed or self.full()) and (arrived := self.do_read()):
                self.do_handle(*arrived)
        super().close()


ggevent.StreamServer = Listener


class Answer:
    """A socket that sends an answer in one piece; gunicorn would send head and body each alone."""

    def __init__(self, sock: Any) -> None:
        self._sock, self._parts = sock, list[bytes]()
        self.sendall = self._parts.append

    def flush(self) -> None:
        if self._parts:
            whole = b"".join(self._parts)
            # One send is enough for most; sendall alone would first ask for the buffer's size.
            self._sock.sendall(whole[self._sock.send(whole) :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Redacting(logging.Formatter):
    """Cuts API keys out of every line, for gunicorn quotes request lines that it cannot parse.

    A percent escape may be the beginning of a key, too; or of a control character, to forge a line.
    """

    SECRET = re.compile(r"(sk_(?:live|test)_|api_key=|%[0-9a-f]{2})[^\s&'\"]+", re.IGNORECASE)
    CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

    def format(self, record: logging.LogRecord) -> str:
        return self.SECRET.sub(r"\1[redacted]", super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        return self.CONTROL.sub(lambda found: ascii(found[0])[1:-1], super().formatMessage(record))


class Log(Logger):
    """gunicorn's log, redacted, and with the service's own lines in it."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        for handler in self.error_log.handlers + self.access_log.handlers:
            handler.setFormatter(Redacting(self.error_fmt, self.datefmt))
        logging.root.handlers = list(self.error_log.handlers)
        logging.root.setLevel(self.loglevel)


def on_starting(server: Arbiter) -> None:
    if (server.cfg.workers, server.cfg.worker_class) != (1, Worker):
        raise settings.SettingsError(
            "--workers and --worker-class cannot be set: one worker of our own keeps the counts"
        )
    # A reload would start a second one beside it, so here the first ends before; TTOU does nothing.
    server.handle_hup = lambda: server.kill_workers(signal.SIGTERM)
    server.handle_ttin = server.handle_usr2 = server.handle_ttou


def post_fork(server: Arbiter, worker: Worker) -> None:
    """Let a stop end the worker while it boots; the handlers of the master would swallow it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def when_ready(server: Arbiter) -> None:
    address, database = ", ".join(map(str, server.LISTENERS)), service.database
    tiers = ", ".join(f"{q.tier} {q.limit} per {q.seconds} s" for q in service.quotas.values())
    server.log.info("serving %s, database %s, 1 worker, tiers: %s", address, database, tiers)
    if service.web_concurrency != 1:
        server.log.warning("WEB_CONCURRENCY is ignored: each worker would count for itself")
    if service.platform:
        hint = "%s is set, and platforms lose %s at every restart unless it is on a mounted volume"
        server.log.warning(hint + "; see DATABASE_URL", service.platform, database)


# gunicorn formats the date anew for every answer, which takes a thirtieth of the whole request.
date_of = lru_cache(maxsize=1)(util.http_date)
util.http_date = lambda: date_of(int(time.time()))

hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for files in (10_240, hard_limit):  # macOS calls its limit infinite, and then refuses infinity
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard_limit))
service = settings.load()
if not service.secret_key:
    raise settings.SettingsError(
        "SECRET_KEY is not set; make one: python3 -c 'import secrets; print(secrets.token_hex())'"
    )

wsgi_app = "app:create_app()"
bind = f"0.0.0.0:{service.port}"
worker_class = Worker
workers = 1
logger_class = Log
access_log_format = '%(h)s "%(m)s %(U)s" %(s)s %(B)s %(L)ss'  # no query, no referrer: no keys
# Well above the sockets: clients beyond it would hang. Well below the files: so would everything.
worker_connections = min(service.max_sockets + 1000, settings.file_limit() - 64)
backlog = 4096  # thousands of sockets may come back at once
keepalive = 75 if service.proxy_hops else 5  # routers keep connections long; also limits a header
graceful_timeout = 4  # then the master kills; Fly waits 5 s
control_socket_disable = True  # two services of one user would take each other's
http_parser = "python"  # "auto" takes a laxer one where it is installed
sendfile = False  # it would overtake what an Answer holds
# Whom to trust is PROXY_HOPS' business alone: nothing is taken from anybody, so nobody is checked.
forwarded_allow_ips, forwarder_headers = "*", ""
secure_scheme_headers: dict[str, str] = {}
