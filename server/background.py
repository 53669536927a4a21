"""Twice a second: saves counts, closes the sockets of keys that have ended, deletes old rows."""

from peewee import PeeweeException

from service import Service
from storage.outage import report

SYNC_SECONDS = 0.5


def sync(service: Service) -> None:
    """Keep memory and database in step. If one step fails, the others are done."""
    for step in (service.store.save, lambda: end_sockets(service), service.store.delete_old_rows):
        try:
            step()
        except PeeweeException as error:
            report(error)


def end_sockets(service: Service) -> None:
    """Close the sockets of keys that have ended."""
    service.sockets.end(service.store.ended(service.sockets.keys()))
