"""gunicorn's settings; `gunicorn` in this folder finds this file by itself."""

import signal

# Until gunicorn handles it, Ctrl-C ends a start without a traceback; commands/demo.py blocks it.
if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

from gevent import monkey

monkey.patch_all()  # before anything else is imported, in the master, too

import os
import sys
from pathlib import Path

from gunicorn.arbiter import Arbiter
from gunicorn.workers import SUPPORTED_WORKERS

chdir = str(Path(__file__).parent)  # even when it is started from another folder
sys.path.insert(0, chdir)

import server.start_checks  # noqa: F401 - first, because it says which Python is needed

# isort: split
from commands import demo
from server import background
from server.log import RedactingLogger
from server.worker import Worker
from settings import MAKE_SECRET, SettingsError, load, max_connections, misspelled, raise_file_limit
from storage.database import create_tables

raise_file_limit()
settings = load()
if not settings.secret_key:
    raise SettingsError(f"SECRET_KEY is not set; {MAKE_SECRET}")

wsgi_app = "app:create_app()"
bind = f"0.0.0.0:{settings.port}"
worker_class = Worker
SUPPORTED_WORKERS["gevent"] = "server.worker.Worker"  # so that `-k gevent` leads to it, too
# With SQLite, each worker would keep its own counts, and double every limit.
workers = 1 if settings.sqlite else settings.web_concurrency
logger_class = RedactingLogger
# Without query and referrer, which may hold keys.
access_log_format = '%(h)s "%(m)s %(U)s" %(s)s %(B)s %(L)ss'
worker_connections = max_connections()
# Long enough for thousands of WebSockets that reconnect at once, and short enough for a new client
# that waits behind one that opens and closes connections in a loop.
backlog = 1024
# Seconds for which a connection may be idle, and which a header may take to arrive. Routers keep
# connections open for up to 90 s.
keepalive = 100 if settings.proxy_hops else 5
# Seconds, after which gunicorn kills a worker. The worker takes less than 5, but more on a machine
# that is busy.
graceful_timeout = 20
control_socket_disable = True  # two services of the same user would share one socket
sendfile = False  # it would send a file before the header, which waits for the body
http_parser = "python"  # "auto" takes a less strict one where that is installed
# Only PROXY_HOPS says whom to trust. To trust every address is safe here, because gunicorn knows no
# forwarding headers, and HTTP/2 without TLS, which it would allow to these addresses, is off. With
# a list of addresses, gunicorn would compare that of each client.
forwarder_headers = ""
secure_scheme_headers: dict[str, str] = {}
forwarded_allow_ips = "*"
http2_cleartext = "off"
ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # it was started with nohup


def on_starting(arbiter: Arbiter) -> None:
    """Refuse options that would break a promise, and a database that cannot be used."""
    cfg = arbiter.cfg
    if cfg.worker_class != Worker:
        raise SettingsError("--worker-class must be gevent")
    allowed = "1 with SQLite" if settings.sqlite else "1 or more"
    if cfg.workers < 1 or (settings.sqlite and cfg.workers > 1):
        raise SettingsError(f"--workers must be {allowed}")
    for option in ("certfile", "keyfile", "statsd_host"):  # TLS is for a router in front
        if getattr(cfg, option):
            raise SettingsError(f"--{option.replace('_', '-')} is not supported")
    if settings.sqlite and cfg.uid != os.geteuid():  # the file belongs to this user
        raise SettingsError("--user is not supported with SQLite; start gunicorn as that user")
    create_tables(settings, is_service=True)


def when_ready(arbiter: Arbiter) -> None:
    """Say what is served; decide what signals do, in place of gunicorn."""
    arbiter.log.info("Database: %s", settings.sqlite or "PostgreSQL")
    if settings.sqlite and settings.web_concurrency > 1:
        arbiter.log.warning("WEB_CONCURRENCY: with SQLite, only one process serves")
    for warning in misspelled():
        arbiter.log.warning(warning)
    # These signals stop the service as SIGTERM does. gunicorn would stop its workers at once, or
    # kill them after two seconds, if it is stopping already.
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, terminate)
    if settings.sqlite:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores_hangup else terminate)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a second master would keep its own counts


def nworkers_changed(arbiter: Arbiter, number: int, before: int | None) -> None:
    """With SQLite, keep one worker, whenever SIGTTIN asks for another."""
    if settings.sqlite and number > 1:
        arbiter.num_workers = 1


def child_exit(arbiter: Arbiter, worker: Worker) -> None:
    """With --reload, start anew: a forked worker would go on with the master's modules."""
    if arbiter.cfg.reload and arbiter.LISTENERS:  # a stop has closed them
        for listener in arbiter.LISTENERS:
            listener.close()
        os.execv(sys.executable, [sys.executable, "-m", "gunicorn", *sys.argv[1:]])


def terminate(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def post_worker_init(worker: Worker) -> None:
    """Prepare a worker, which serves after this."""
    for number in (signal.SIGINT, signal.SIGQUIT):  # Ctrl-C reaches the worker, too
        signal.signal(number, worker.handle_exit)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the master gets it, too, and decides
    worker.set_bounds()
    background.start(worker)
    if worker.wsgi.config["IS_DEMO"]:
        demo.welcome(settings.port)  # the port is taken by now


def worker_exit(arbiter: Arbiter, worker: Worker) -> None:
    background.finish(worker)
