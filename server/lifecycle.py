"""The life of the service: what happens before the first request, beside requests, and at a stop.

It is read from top to bottom: what gunicorn's master does, which serves no request, then what each
worker does, which is forked from it. gunicorn calls these functions as the end of gunicorn.conf.py
says. What signals do is in server/signals.py.
"""

import gc
import logging
import os
import socket
import sys

import gevent
from gevent.server import StreamServer
from gunicorn.arbiter import Arbiter

from commands import demo
from models import database
from server import gunicorn_patches, signals
from server.worker import Worker
from service import Service
from settings import MAKE_SECRET, SettingsError, load, misspelled, raise_file_limit
from storage.database import create_tables
from storage.outage import is_outage, log_outage, once_per_minute

log = logging.getLogger(__name__)
log.addFilter(once_per_minute)

MAX_ACCEPT = 16  # new connections that are accepted before others have their turn
KERNEL_BYTES = 65_536  # size of the kernel's buffers for input and output of a connection
SYNC_SECONDS = 0.5
# gunicorn takes up to 1 s to notice a stop. Requests then have GRACEFUL_SECONDS; ending idle
# connections takes 1 s, the last save 1 s: together less than the graceful_timeout of the master.
GRACEFUL_SECONDS = 1


class Master:
    """gunicorn's master, which serves no request; these are its hooks."""

    def __init__(self) -> None:
        """Load the settings; raises SettingsError."""
        raise_file_limit()
        self.settings = load()
        if not self.settings.secret_key:
            raise SettingsError(f"SECRET_KEY is not set; {MAKE_SECRET}")

    def prepare(self, arbiter: Arbiter) -> None:
        """Refuse options that would break a promise, and a database that cannot be used."""
        cfg = arbiter.cfg
        if cfg.worker_class != Worker:
            raise SettingsError("--worker-class must be gevent")
        if cfg.workers < 1 or (self.settings.sqlite and cfg.workers > 1):
            raise SettingsError(
                f"--workers must be {'1 with SQLite' if self.settings.sqlite else '1 or more'}"
            )
        # TLS is for a router in front; the environment has been read before `--env`.
        for option in ("certfile", "keyfile", "statsd_host", "raw_env"):
            if getattr(cfg, option):
                raise SettingsError(f"{cfg.settings[option].cli[-1]} is not supported")
        if self.settings.sqlite and cfg.uid != os.geteuid():  # the file belongs to this user
            raise SettingsError("--user is not supported with SQLite; start gunicorn as that user")
        create_tables(self.settings, is_service=True)

    def announce(self, arbiter: Arbiter) -> None:
        """Once the port is bound, say what is served, and take over the signals."""
        arbiter.log.info("Database: %s", self.settings.sqlite or "PostgreSQL")
        if self.settings.sqlite and self.settings.web_concurrency > 1:
            arbiter.log.warning("WEB_CONCURRENCY: with SQLite, only one process serves")
        for warning in misspelled():
            arbiter.log.warning(warning)
        signals.handle_in_master(serves_alone=self.settings.sqlite is not None)

    def keep_one_worker(self, arbiter: Arbiter, number: int, before: int | None) -> None:
        """With SQLite, whenever a signal asks for another worker."""
        if self.settings.sqlite and number > 1:
            arbiter.num_workers = 1

    def restart(self, arbiter: Arbiter, worker: Worker) -> None:
        """With --reload, when a worker has ended: a new one would have the master's modules.

        If the edited files cannot be imported, gunicorn forks one nevertheless, which waits for the
        next edit. At a stop, the listeners are closed, and nothing is started.
        """
        if not arbiter.cfg.reload or not arbiter.LISTENERS:
            return
        signals.hold_back()
        command = [sys.executable, "-m", "gunicorn", *sys.argv[1:]]
        if os.spawnv(os.P_WAIT, sys.executable, [*command, "--check-config"]) == 0:
            for listener in arbiter.LISTENERS:
                listener.close()
            os.execv(sys.executable, command)
        signals.let_through()


def start(worker: Worker) -> None:
    """In a worker that has loaded the application, before it accepts connections."""
    signals.handle_in_worker(worker.handle_exit)
    for listener in worker.sockets:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # else the kernel may keep 6 MiB
            listener.setsockopt(socket.SOL_SOCKET, option, KERNEL_BYTES)
    StreamServer.max_accept = MAX_ACCEPT
    # With more workers, gunicorn would accept one connection at a time. It calls `worker_exit` when
    # the worker ends; the one set here belongs to this worker and its service.
    changed: dict[str, object] = {"workers": 1, "graceful_timeout": GRACEFUL_SECONDS}
    if isinstance(worker.wsgi, Service):  # and not a page that says that an edit failed
        changed["worker_exit"] = RunningService(worker, worker.wsgi).stop
    gunicorn_patches.apply(worker.cfg, **changed)


class RunningService:
    """What runs in a worker beside its requests, and the demo's first user."""

    def __init__(self, worker: Worker, service: Service) -> None:
        self._worker = worker  # whose `alive` is False as soon as a stop begins
        self._service = service
        gevent.spawn(self._close_sockets)
        self._flushing = gevent.spawn(self._flush_loop)
        if service.is_demo and worker.age == 1:  # the first worker; the port is bound by now
            demo.welcome(service.settings.port)

    def _flush_loop(self) -> None:
        while self._worker.alive:
            flush(self._service)
            gevent.sleep(SYNC_SECONDS)

    def _close_sockets(self) -> None:
        """Close the WebSockets as soon as a stop begins."""
        while self._worker.alive:
            gevent.sleep(0.1)
        gc.freeze()  # a search for garbage in the memory of 5,000 sockets would take 0.3 s
        self._service.sockets.shut_down()

    def stop(self, *_: object) -> None:
        """When all requests have ended: save what was counted since the last time."""
        self._flushing.join(timeout=1)  # a save that is in progress
        self._service.store.close()
        database.close_all()


def flush(service: Service) -> None:
    """Save counts, then close the sockets of keys that have ended, even if saving fails."""
    file = service.settings.sqlite
    if file and not file.exists():
        log.error("%s is missing: put it back, or all of it is lost at the next stop", file)
    for step in (service.store.save, lambda: service.sockets.close_ended(service.store.ended)):
        try:
            step()
        except Exception as error:  # of any kind, or nothing would be saved any more
            if is_outage(error):
                log_outage(error)
            else:
                log.exception("bug in the background")
