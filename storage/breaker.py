"""What leaves connections for others while something fails or floods: a bulkhead, and a breaker."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import monotonic

from gevent.lock import BoundedSemaphore
from peewee import OperationalError

from storage.connections import PAUSE_SECONDS

MANY = 10_000  # failed keys that are remembered


class NoPlace(OperationalError):
    """Others used all places for so long that nothing was asked."""


class Bulkhead:
    """Lets only so many queries of one kind run at the same time. The others wait in order."""

    def __init__(self, places: int) -> None:
        self._places = BoundedSemaphore(places)

    @contextmanager
    def place(self, deadline: float) -> Iterator[None]:
        """Around a query; raises NoPlace if there is none by then, by `monotonic`."""
        if not self._places.acquire(timeout=max(0, deadline - monotonic())):
            raise NoPlace("others use all connections")
        try:
            yield
        finally:
            self._places.release()


class Breaker:
    """A circuit breaker for each key, so that keys whose queries fail keep no other key waiting.

    After a failure, because its row is locked, say, the circuit of a key is open: for PAUSE_SECONDS
    nothing is asked. Then it is half-open: until a query succeeds, the key shares a few places with
    all keys that are in the same state. A key that got no place has not failed.
    """

    def __init__(self, places: int) -> None:
        self._half_open = Bulkhead(places)
        self._failed: dict[str, tuple[float, str]] = {}  # when, by `monotonic`, and why

    @contextmanager
    def circuit(self, key_id: str, deadline: float) -> Iterator[None]:
        """Around a query for this key; raises OperationalError."""
        failed_at, why = self._failed.get(key_id, (-math.inf, ""))
        if monotonic() < failed_at + PAUSE_SECONDS:
            raise OperationalError(why)
        try:
            with self._half_open.place(deadline) if why else nullcontext():
                yield
        except NoPlace:
            raise
        except OperationalError as error:
            if len(self._failed) > MANY:  # made-up keys during an outage
                self._failed.clear()
            self._failed[key_id] = monotonic(), str(error)
            raise
        self._failed.pop(key_id, None)
