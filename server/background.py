"""Twice a second: saves counts, deletes old rows, closes the sockets of keys that have ended."""

import gc
import logging

import gevent
from peewee import PeeweeException

from models import database
from server.worker import Worker
from service import Service
from storage.outage import once_per_minute, report

log = logging.getLogger(__name__)
log.addFilter(once_per_minute)

SYNC_SECONDS = 0.5


def start(worker: Worker) -> None:
    """Begin what a worker does beside its requests; its `alive` is False once it is to stop."""
    gevent.spawn(close_sockets, worker)
    worker.syncing = gevent.spawn(keep_in_sync, worker)


def close_sockets(worker: Worker) -> None:
    """Close the WebSockets as soon as a stop begins."""
    while worker.alive:
        gevent.sleep(0.1)
    gc.freeze()  # a search for garbage in the memory of 5,000 sockets would take 0.3 s
    worker.wsgi.sockets.shut_down()


def keep_in_sync(worker: Worker) -> None:
    while worker.alive:
        sync(worker.wsgi)
        gevent.sleep(SYNC_SECONDS)


def finish(worker: Worker) -> None:
    """Save what was counted since the last time, when all requests have ended.

    gunicorn asks for this also when a worker could not start, and in the master when one has
    vanished: neither has begun anything.
    """
    if worker.syncing is not None:  # a greenlet that has ended is false
        worker.syncing.join(timeout=1)  # a save that is in progress
        worker.wsgi.store.close()
        database.close_all()


def sync(service: Service) -> None:
    """Keep memory and database in step. If one step fails, the others are done."""
    store = service.store
    for step in (store.save, lambda: service.sockets.close_ended(store.ended)):
        try:
            step()
        except PeeweeException as error:
            report(error)
        except Exception:  # or nothing would be saved any more
            log.exception("bug in the background")
