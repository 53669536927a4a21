"""Twice a second: saves counts, and closes the sockets of keys that have ended."""

from gevent.event import Event
from peewee import PeeweeException

from services import Services

SYNC_SECONDS = 0.5


class Background:
    """Keeps memory and database in step."""

    def __init__(self, services: Services) -> None:
        self._store, self._sockets = services.store, services.sockets
        self._outage = services.outage
        self._failures = 0  # consecutive
        self.stopping = Event()

    def run(self) -> None:
        """Sync until `stopping` is set."""
        while not self.stopping.is_set():  # it may be set before this begins
            self.sync()  # the first is immediate, so the file is open before it can be moved away
            self.stopping.wait(SYNC_SECONDS)

    def sync(self) -> None:
        """Sync once. A single failure may be a lock that a command holds, so it is not logged."""
        error = None
        steps = [self._end_sockets, self._store.save]  # if one fails, the others are done
        for step in [*steps, self._store.check] if self._outage.failed_at else steps:
            try:
                step()
            except PeeweeException as failed:
                error = failed
        self._failures = self._failures + 1 if error else 0
        if error and self._failures > 1:
            self._outage.note(error)
        elif not error:
            self._outage.over()

    def _end_sockets(self) -> None:
        self._sockets.end(self._store.ended(self._sockets.keys()))
