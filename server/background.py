"""Twice a second: saves counts, deletes old rows, closes the sockets of keys that have ended."""

import logging

from peewee import PeeweeException

from service import Service
from storage.outage import report

log = logging.getLogger(__name__)

SYNC_SECONDS = 0.5


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
