"""Twice a second: saves counts, closes the sockets of keys that have ended, deletes old rows."""

from peewee import PeeweeException

from service import Service
from storage.outage import report

SYNC_SECONDS = 0.5


def sync(service: Service) -> None:
    """Keep memory and database in step. If one step fails, the others are done."""
    store = service.store
    for step in (
        store.save,
        lambda: service.sockets.close_ended(store.ended),
        store.delete_old_rows,
    ):
        try:
            step()
        except PeeweeException as error:
            report(error)
