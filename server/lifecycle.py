"""The life of the service: what happens before the first request, beside requests, and at a stop.

Read it from top to bottom: first what gunicorn's master does, which serves no request, then what
each worker does, which is forked from it. What signals do is in server/signals.py.
"""

import gc
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import gevent
from gevent.server import StreamServer
from gunicorn.arbiter import Arbiter
from gunicorn.workers.ggevent import GeventWorker

from models import db
from server import demo, gunicorn_patches, signals
from server.options import check_options
from service.application import Service
from settings import MAKE_SECRET, Settings, SettingsError, load, misspelled, raise_file_limit
from storage.database import prepare_database
from storage.outage import is_outage, log_outage, once_per_minute
from ws.open_sockets import open_sockets_of

log = logging.getLogger(__name__)
log.addFilter(once_per_minute)

MAX_ACCEPT = 16  # new connections that are accepted before others have their turn
KERNEL_BYTES = 65_536  # size of the kernel's buffers for input and output of a connection
SAVE_SECONDS = 0.5  # between two saves
# gunicorn takes up to 1 s to notice a stop. Then requests have GRACEFUL_SECONDS, ending idle
# connections takes 1 s, and the last save 1 s. That is less than the master's graceful_timeout.
GRACEFUL_SECONDS = 1


def load_settings() -> Settings:
    """The settings for gunicorn.conf.py; raises SettingsError."""
    raise_file_limit()
    settings = load()
    if not settings.secret_key:
        raise SettingsError(f"SECRET_KEY is not set; {MAKE_SECRET}")
    check_options(settings)
    return settings


class Master:
    """gunicorn's master, which serves no request; these are its hooks."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def prepare(self, arbiter: Arbiter) -> None:
        """Prepare the database; raises SettingsError if it cannot be used."""
        prepare_database(self._settings, is_service=True)

    def announce(self, arbiter: Arbiter) -> None:
        """Once the port is bound, say what is served, and take over the signals."""
        arbiter.log.info("Database: %s", self._settings.sqlite or "PostgreSQL")
        if self._settings.sqlite and self._settings.web_concurrency > 1:
            arbiter.log.warning("WEB_CONCURRENCY: with SQLite, only one process serves")
        for warning in misspelled():
            arbiter.log.warning(warning)
        signals.handle_in_master(serves_alone=self._settings.sqlite is not None)

    def keep_one_worker(self, arbiter: Arbiter, number: int, before: int | None) -> None:
        """Undo it when a signal adds a worker: SQLite allows only one."""
        if self._settings.sqlite and number > 1:
            arbiter.num_workers = 1


@contextmanager
def serving(worker: GeventWorker, service: Service) -> Iterator[None]:
    """Run what a worker does beside requests; inside this context, it serves until a stop."""
    signals.handle_in_worker(worker.handle_exit)
    for listener in worker.sockets:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # else the kernel may keep 6 MiB
            listener.setsockopt(socket.SOL_SOCKET, option, KERNEL_BYTES)
    StreamServer.max_accept = MAX_ACCEPT
    worker.cfg.set("workers", 1)  # with more, gunicorn would accept one connection at a time
    worker.cfg.set("graceful_timeout", GRACEFUL_SECONDS)
    gunicorn_patches.patch_gunicorn(worker.cfg)  # after this, `cfg.set` has no effect
    gevent.spawn(close_sockets_at_stop, worker, service)
    flushing = gevent.spawn(flush_until_stop, worker, service)
    if service.is_demo and worker.age == 1:  # the first worker; the port is bound by now
        demo.welcome(service.settings.port)
    yield
    flushing.join(timeout=1)  # a save that is in progress
    service.store.close()
    db.close_all()


def close_sockets_at_stop(worker: GeventWorker, service: Service) -> None:
    """Close the WebSockets as soon as a stop begins."""
    while worker.alive:
        gevent.sleep(0.1)
    gc.freeze()  # a search for garbage in the memory of 5,000 sockets would take 0.3 s
    open_sockets_of(service).shut_down()


def flush_until_stop(worker: GeventWorker, service: Service) -> None:
    while worker.alive:
        flush(service)
        gevent.sleep(SAVE_SECONDS)


def flush(service: Service) -> None:
    """Save counts, then close the sockets of keys that have ended, even if saving fails."""
    file = service.settings.sqlite
    if file and not file.exists():
        log.error("%s is missing: put it back, or all of it is lost at the next stop", file)
    store, sockets = service.store, open_sockets_of(service)
    for step in (store.save, lambda: sockets.close_ended(store.ended_digests)):
        try:
            step()
        except Exception as error:  # of any kind: otherwise this greenlet would end
            if is_outage(error):
                log_outage(error)
            else:
                log.exception("bug in the background")
