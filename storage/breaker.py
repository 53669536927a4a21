"""A circuit breaker, which keeps what fails from taking the connections of what works."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from gevent.lock import BoundedSemaphore
from peewee import OperationalError

from storage.connections import PAUSE_SECONDS, NoneFree

MANY = 10_000  # failed keys that are remembered


class Breaker:
    """A circuit breaker for each key.

    After a query for a key has failed, because its row is locked, say, the circuit is open: for
    PAUSE_SECONDS nothing is asked. Then it is half-open until a query succeeds. One such query
    runs at a time, over all keys in this state; the others fail.
    """

    def __init__(self) -> None:
        self._half_open = BoundedSemaphore()
        self._failed: dict[str, tuple[float, str]] = {}  # when, by `monotonic`, and why

    @contextmanager
    def circuit(self, key_id: str) -> Iterator[None]:
        """Around a query for this key; raises OperationalError."""
        failed_at, why = self._failed.get(key_id, (-math.inf, ""))
        is_open = monotonic() < failed_at + PAUSE_SECONDS
        if is_open or (why and not self._half_open.acquire(blocking=False)):
            raise OperationalError(why)
        try:
            yield
            self._failed.pop(key_id, None)
        except NoneFree:  # which is not because of this key
            raise
        except OperationalError as error:
            if len(self._failed) > MANY:  # made-up keys during an outage
                self._failed.clear()
            self._failed[key_id] = monotonic(), str(error)
            raise
        finally:
            if why:
                self._half_open.release()
