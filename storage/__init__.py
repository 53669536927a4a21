"""Where keys and counts are stored: SQLite or PostgreSQL, behind the methods of a Store."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from peewee import PostgresqlDatabase

import models
from models import ApiKey, User
from ratelimit import Allowance, Limiter, Quota


@contextmanager
def transaction() -> Iterator[None]:
    """A transaction for whatever stores or ends a key, a user or a password; may be nested.

    PostgreSQL confirms it once it is on the disk, whatever was set for the session or the role.
    """
    with models.database.connection_context(), models.database.atomic():
        if isinstance(models.database.obj, PostgresqlDatabase):
            models.database.execute_sql("SET LOCAL synchronous_commit = on")
        yield


class Store(ABC):
    """What the rest of the service asks of a database; each method may raise PeeweeException.

    It remembers the rows that were found until they are forgotten. Background.sync does so twice a
    second, so what is known of a key is never older.

    A window ends at `(now // seconds + 1) * seconds`. A row with another `reset` has used nothing
    of the current window. `Limiter.hit`, SAVE in sqlite.py and count.sql all follow this rule.
    """

    def __init__(self) -> None:
        self._rows: dict[str, ApiKey] = {}  # by id
        self._limiter = Limiter()  # with PostgreSQL, it only computes windows

    def find(self, key_id: str) -> ApiKey | None:
        """The key with this id, ended or not.

        An unknown id is not remembered: made-up keys take no memory, and a new key works at once.
        """
        # A row that is found while another greenlet calls `forget` may be old. It goes into the
        # dictionary from before the query, so it is forgotten with the others.
        rows = self._rows
        key = rows.get(key_id)
        if key is None:
            key = self._look_up(key_id)
            if key:
                rows[key_id] = key
        return key

    def forget(self) -> None:
        """Look up every key again, because its row may have changed."""
        self._rows = {}

    @abstractmethod
    def _look_up(self, key_id: str) -> ApiKey | None:
        """The row with this id."""

    def left(self, key: ApiKey, quota: Quota) -> Allowance:
        """What is left for the key according to this row, to be shown; counts nothing."""
        return self._limiter.hit(key.id, quota, key.usage, cost=0)

    @abstractmethod
    def hit(self, key_id: str, quota: Quota) -> Allowance | None:
        """Count a request if the window's allowance is not used up; None if the key is deleted."""

    @abstractmethod
    def owner(self, key: ApiKey) -> tuple[User, int] | None:
        """The key's user, and how many live keys they have; None if the key has just ended."""

    @abstractmethod
    def ended(self, key_ids: set[str]) -> set[str]:
        """Which of these keys have ended."""

    @abstractmethod
    def save(self) -> None:
        """Save what has been counted, and delete rows that are too old."""

    @abstractmethod
    def close(self) -> None:
        """Save what is left, and close the database."""
