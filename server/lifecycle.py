"""The life of the service: before the first request, alongside requests, and at a stop.

Read it from top to bottom: first what gunicorn's master does, which serves no request, then what
each worker does, which is forked from it.
"""

import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gevent
from gevent.server import StreamServer
from gunicorn.arbiter import Arbiter
from gunicorn.config import Config
from gunicorn.workers.ggevent import GeventWorker

from models import db
from server import demo, gunicorn_patches
from service.application import Service
from settings import MAKE_SECRET, Settings, SettingsError, load, misspelled, raise_file_limit
from storage.database import prepare_database
from storage.outage import is_outage, log_outage, once_per_minute
from ws.open_sockets import open_sockets_of

log = logging.getLogger(__name__)
log.addFilter(once_per_minute)

SAVE_SECONDS = 0.5  # between two saves
PING_ROUND_SECONDS = 0.15  # between two rounds, each of which looks at every socket
# A stop takes less than 5 s: gunicorn notices it within 1 s, requests then have GRACEFUL_SECONDS,
# ending idle connections takes up to 1 s, a save that is in progress 1 s, and the last one 1 s.
GRACEFUL_SECONDS = 1
STOPS = (signal.SIGINT, signal.SIGQUIT)  # these stop the service as SIGTERM does
# Whether the service was started with nohup; read before gunicorn sets its own handler.
IGNORES_HANGUP = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

# A closed list, because an option that nobody has thought of, known or new, could break a promise.
# docs/deploying.md describes these.
SUPPORTED_OPTIONS = {
    "accesslog",
    "bind",
    "check_config",
    "config",
    "errorlog",
    "loglevel",
    "pidfile",
    "preload_app",
    "print_config",
    "proc_name",
    "worker_class",
    "worker_tmp_dir",
    "workers",
}


def load_settings() -> Settings:
    """Raise the limit on open files, and read and check the settings; raises SettingsError."""
    raise_file_limit()
    settings = load()
    if not settings.secret_key:
        raise SettingsError(f"SECRET_KEY is not set; {MAKE_SECRET}")
    check_options(settings)
    return settings


def check_options(settings: Settings) -> None:
    """Raises SettingsError for an option that is not supported, wherever it was given.

    gunicorn calls this while it reads its settings, before it daemonizes or logs.
    """
    config = Config()
    for arguments in (config.get_cmd_args_from_env(), sys.argv[1:]):
        given = vars(config.parser().parse_args(arguments))
        for name, value in given.items():
            if value is not None and name not in {*SUPPORTED_OPTIONS, "args"}:  # args: the app
                raise SettingsError(
                    f"gunicorn: {config.settings[name].cli[-1]} is not supported; "
                    "docs/deploying.md lists what is"
                )
        # Without parentheses, each worker would fail, and gunicorn would start another one.
        if given["worker_class"] not in (None, "gevent") or "app:create_app" in given["args"]:
            raise SettingsError(
                "gunicorn: --worker-class must be gevent, and the application app:app"
            )
        workers = given["workers"]
        if workers is not None and (workers < 1 or (settings.sqlite and workers > 1)):
            raise SettingsError(
                "gunicorn: --workers must be 1 with SQLite, and at least 1 with PostgreSQL"
            )


def prepare(arbiter: Arbiter) -> None:
    """Prepare the database, before the port is bound; raises SettingsError.

    It may wait: for the service before, or for PostgreSQL. Ctrl-C then ends it without a traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prepare_database(load(), is_service=True)


def announce(arbiter: Arbiter) -> None:
    """Once the port is bound, say what is served."""
    settings = load()
    arbiter.log.info("Database: %s", settings.sqlite or "PostgreSQL")
    for warning in misspelled():
        arbiter.log.warning(warning)
    handle_signals_in_master(settings)


def handle_signals_in_master(settings: Settings) -> None:
    """Replace gunicorn's handlers, which stop workers at once, or kill them after two seconds.

    With SQLite, no other process may use the same file, so no signal may start one.
    """
    for number in STOPS:
        signal.signal(number, terminate)
    if settings.sqlite:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if IGNORES_HANGUP else terminate)
        for number in (signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)


def terminate(*_: object) -> None:
    signal.raise_signal(signal.SIGTERM)


def handle_signals_in_worker(worker: GeventWorker) -> None:
    """Stop a worker at SIGINT and SIGQUIT, too: a terminal sends these to all processes.

    A terminal that is closed sends SIGHUP to all processes; the master decides what that means.
    """
    for number in STOPS:
        signal.signal(number, worker.handle_exit)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextmanager
def serving(worker: GeventWorker, service: Service) -> Iterator[None]:
    """Run what a worker does alongside requests; inside this context, it serves until a stop.

    The steps before `yield` may come in any order; those after it end what needs the database,
    before its connections are closed.
    """
    handle_signals_in_worker(worker)
    for listener in worker.sockets:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # else the kernel may keep 6 MiB
            listener.setsockopt(socket.SOL_SOCKET, option, 65_536)
    StreamServer.max_accept = 16  # new connections at once; then other greenlets run
    # With more workers, gunicorn would accept one connection at a time.
    gunicorn_patches.patch_gunicorn(worker.cfg, workers=1, graceful_timeout=GRACEFUL_SECONDS)
    gevent.spawn(ping_sockets_until_stop, worker, service)
    flushing = gevent.spawn(flush_until_stop, worker, service)
    if service.is_demo and worker.age == 1:  # the first worker; the port is bound by now
        demo.welcome(service.settings)
    try:
        yield
    finally:
        flushing.join(timeout=1)  # a save that is in progress
        service.store.save_and_close()
        db.close_all()


def ping_sockets_until_stop(worker: GeventWorker, service: Service) -> None:
    """Ping the clients of WebSockets in time, and close all as soon as a stop begins."""
    sockets = open_sockets_of(service)
    while worker.alive:
        attempt(sockets.ping)
        gevent.sleep(PING_ROUND_SECONDS)
    sockets.shut_down()


def flush_until_stop(worker: GeventWorker, service: Service) -> None:
    """Save counts, and close the sockets of keys that have ended."""
    while worker.alive:
        attempt(service.store.flush)
        attempt(lambda: open_sockets_of(service).close_ended(service.store.ended_digests))
        gevent.sleep(SAVE_SECONDS)


def attempt(step: Callable[[], object]) -> None:
    """Call a step of the background; an exception doesn't end the greenlet.

    It is logged, but at most one a minute.
    """
    try:
        step()
    except Exception as error:
        if is_outage(error):
            log_outage(error)
        else:
            log.exception("bug in the background")
