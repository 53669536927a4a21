"""Batches: requests for the same key that arrive together are answered by one query."""

from collections.abc import Callable
from typing import Any

import gevent
from gevent.event import AsyncResult
from peewee import OperationalError

from storage.connections import HIT_SECONDS


class Batches:
    """Runs one query at a time for each key.

    Items of a key that arrive during its query wait, and are all in the next one. So a key that is
    used a lot needs few queries, and keys don't wait for each other.
    """

    def __init__(self, query: Callable[[str, list[Any]], list[Any]]) -> None:
        """`query` takes a key's ID and some items, and returns as many answers."""
        self._query = query
        self._waiting: dict[str, list[tuple[Any, AsyncResult]]] = {}

    def ask(self, key_id: str, item: object = None) -> Any:
        """The answer to this item; raises PeeweeException."""
        answer = AsyncResult()
        if key_id in self._waiting:
            self._waiting[key_id].append((item, answer))
        else:
            self._waiting[key_id] = [(item, answer)]
            # In a greenlet of its own, or this request would also serve those that come later.
            gevent.spawn(self._answer_all, key_id)
        late = OperationalError(f"no answer within {HIT_SECONDS} s")
        with gevent.Timeout(HIT_SECONDS, late):
            return answer.get()

    def _answer_all(self, key_id: str) -> None:
        try:
            while batch := self._waiting[key_id]:
                self._waiting[key_id] = []
                answers = self._query(key_id, [item for item, _ in batch])
                for (_, answer), value in zip(batch, answers, strict=True):
                    answer.set(value)
        except Exception as error:
            # Those who came meanwhile fail, too, so that nobody waits twice.
            for _, answer in batch + self._waiting[key_id]:
                answer.set_exception(error)
        finally:
            del self._waiting[key_id]
