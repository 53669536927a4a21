"""Twice a second: saves counts, and closes the sockets of keys that have ended."""

from gevent.event import Event
from peewee import PeeweeException

from services import Services
from storage.outage import outage

SYNC_SECONDS = 0.5


class Background:
    """Keeps memory and database in step."""

    def __init__(self, services: Services) -> None:
        self._store, self._sockets = services.store, services.sockets
        self._failures = 0  # consecutive
        self.stopping = Event()

    def run(self) -> None:
        """Sync until `stopping` is set."""
        while not self.stopping.is_set():  # it may be set before this begins
            self.sync()  # at first at once: it connects to a file that somebody might move away
            self.stopping.wait(SYNC_SECONDS)

    def sync(self) -> None:
        """Sync once. A single failure may be a lock that a command holds, so it is not logged."""
        try:
            self._sockets.end(self._store.ended(self._sockets.keys()))
            self._store.save()
        except PeeweeException as error:
            self._failures += 1
            if self._failures > 1:
                outage.note(error)
        else:
            self._failures = 0
            outage.over()
