"""gunicorn's settings; `gunicorn` in this folder finds this file by itself."""

from gevent import monkey

monkey.patch_all()  # before anything else is imported, in the master, too

import os
import signal
import sys
from pathlib import Path

from gunicorn.arbiter import Arbiter
from gunicorn.workers import SUPPORTED_WORKERS

chdir = str(Path(__file__).parent)  # even when it is started from another folder
sys.path.insert(0, chdir)

from commands import demo
from server import start
from server.log import Log, Metrics
from server.worker import Worker
from settings import MAKE_SECRET, SettingsError, load, raise_file_limit, warnings
from storage.database import create_tables

start.read_dotenv()
raise_file_limit()
settings = load()
if not settings.secret_key:
    raise SettingsError(f"SECRET_KEY is not set; {MAKE_SECRET}")

wsgi_app = "app:create_app()"
bind = f"0.0.0.0:{settings.port}"
worker_class = Worker
SUPPORTED_WORKERS["gevent"] = "server.worker.Worker"  # so that `-k gevent` leads to it, too
workers = settings.workers
logger_class = Log
# Without query and referrer, which may hold keys.
access_log_format = '%(h)s "%(m)s %(U)s" %(s)s %(B)s %(L)ss'
worker_connections = settings.connection_limit
# A client that opens and closes connections in a loop fills this queue; a new client then waits for
# 0.3 s, or 0.6 s with 2048. 2,000 WebSockets that reconnect at once are all open within 3 s.
backlog = 1024
# Seconds for which a connection may be idle, and which a header may take to arrive. Routers keep
# connections open for up to 90 s.
keepalive = 100 if settings.proxy_hops else 5
graceful_timeout = 5  # seconds; the worker takes 4.5 at most
control_socket_disable = True  # two services of the same user would share one socket
http_parser = "python"  # "auto" takes a less strict one where that is installed
sendfile = False  # it would bypass the worker's way to send a response in one piece
# Only PROXY_HOPS says whom to trust. To trust every address is safe here, because gunicorn knows no
# forwarding headers, and HTTP/2 without TLS, which it would allow to these addresses, is off. To
# compare each client's address would take 3 % of a request.
forwarder_headers = ""
secure_scheme_headers: dict[str, str] = {}
forwarded_allow_ips = "*"
http2_cleartext = "off"
ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # it was started with nohup


def on_starting(arbiter: Arbiter) -> None:
    """Refuse options that SQLite mode does not allow, and a database that cannot be used."""
    workers, user = arbiter.cfg.workers, arbiter.cfg.uid
    if arbiter.cfg.worker_class != Worker or workers < 1 or (settings.sqlite and workers > 1):
        raise SettingsError("--worker-class must be gevent, and with SQLite --workers must be 1")
    if settings.sqlite:
        if user != os.geteuid():
            raise SettingsError("--user: with SQLite, start gunicorn as the user who owns the file")
        start.lock(settings.sqlite)
        one_process(arbiter)
    if arbiter.cfg.statsd_host:  # without it, they would take 4 % of a request
        arbiter.log = Metrics(arbiter.cfg)
    create_tables(settings)


def one_process(arbiter: Arbiter) -> None:
    """With SQLite, let no signal start a second worker or master: each would keep its own counts.

    A closed terminal (SIGHUP) stops the service. gunicorn looks these methods up at each signal.
    """
    arbiter.handle_ttin = arbiter.handle_ttou = arbiter.handle_usr2 = ignore
    arbiter.handle_hup = ignore if ignores_hangup else arbiter.handle_term


def ignore() -> None:
    """Do nothing at a signal."""


def when_ready(arbiter: Arbiter) -> None:
    arbiter.log.info("Database: %s", settings.sqlite or "PostgreSQL")
    for warning in warnings(settings):
        arbiter.log.warning(warning)


def post_worker_init(worker: Worker) -> None:
    if worker.wsgi.config["IS_DEMO"]:
        demo.welcome(settings.port)  # the port is taken by now
