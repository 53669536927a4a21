"""Where keys and counts are stored: SQLite or PostgreSQL, behind the methods of a Store."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic, time
from typing import Any

import gevent
from peewee import PeeweeException, PostgresqlDatabase

import models
from models import CHART_HOURS, DAY, HOUR, ApiKey, User, now
from ratelimit import Allowance, Quota
from storage.outage import one_line

log = logging.getLogger(__name__)

KNOWN_SECONDS = 0.5  # how long a row that was found is remembered
LAST_SECONDS = 1.0  # how long the last save is retried during a stop
TIDY_SECONDS = 60  # between two looks for old rows
KEEP_DAYS = 30  # how long ended keys are kept
# How many rows a query names at most; SQLite before 3.32 allows 999. At each sync, so many old rows
# are deleted, which takes 5 ms. That is 1,000 a second; a million keys in use make 280 a second.
MAX_ROWS = 500
# In SQL where building a query with peewee would take long.
COLUMNS = ApiKey._meta.columns
FIND = f"SELECT {', '.join(COLUMNS)} FROM api_key WHERE id = ?"
# A join, and no subquery that counts, because Citus refuses that.
OWNER = f"""SELECT "user".id, username, email, "user".created_at, count(*)
    FROM "user" JOIN api_key ON api_key.user_id = "user".id WHERE {ApiKey.LIVE} AND "user".id = ?
    GROUP BY "user".id, username, email, "user".created_at"""
# For a transaction of PostgreSQL: its COMMIT waits for the disk, whatever was set for the session.
# On a Citus cluster, it may change "user", which all nodes have, after the keys.
ON_DISK = "set_config('synchronous_commit', 'on', true)"
USERS_AFTER_KEYS = "set_config('citus.multi_shard_modify_mode', 'sequential', true)"


@contextmanager
def transaction() -> Iterator[None]:
    """A transaction for whatever stores or ends a key, a user or a password; may be nested."""
    with models.database.connection_context(), models.database.atomic():
        if isinstance(models.database.obj, PostgresqlDatabase):
            models.database.execute_sql(f"SELECT {ON_DISK}, {USERS_AFTER_KEYS}")
        yield


class Store(ABC):
    """What the rest of the service asks of a database; each method may raise PeeweeException.

    It has connections of its own, so it never waits for those of pages. What it knows of a key is
    never older than KNOWN_SECONDS and one query.
    """

    lost: str  # what it means that the last save has failed; %s are the requests

    def __init__(self) -> None:
        self._rows: dict[str, ApiKey] = {}  # by id
        self._generation = 0  # of these rows; each `forget` begins another
        self._forget_at = self._tidy_at = 0.0  # by `monotonic`
        self._is_used = True  # since the last look for old rows

    def find(self, key_id: str) -> ApiKey | None:
        """The key with this id, ended or not.

        An unknown id is not remembered: made-up keys take no memory, and a new key works at once.
        """
        if monotonic() > self._forget_at:
            self.forget()
        key = self._rows.get(key_id)
        if key is None:
            generation = self._generation
            key = self._look_up(key_id)
            if key and generation == self._generation:  # else the row may be older than `forget`
                self._rows[key_id] = key
        return key

    def forget(self) -> None:
        """Look up every key again, because its row may have changed."""
        self._rows, self._forget_at = {}, monotonic() + KNOWN_SECONDS
        self._generation += 1

    def open(self) -> None:  # noqa: B027
        """Prepare for requests, before the first one comes."""

    def _look_up(self, key_id: str) -> ApiKey | None:
        for row in self._ask(FIND, key_id):
            return ApiKey(**dict(zip(COLUMNS, row, strict=True)))
        return None

    def allowance(self, key: ApiKey, quota: Quota) -> Allowance:
        """What is left for the key according to this row, to be shown; counts nothing."""
        moment = time()
        return key.usage.within(quota, moment).allowance(quota, moment, True)

    @abstractmethod
    def hit(self, key_id: str, quota: Quota) -> Allowance | None:
        """Count a request if the window's allowance is not used up; None if the key is deleted."""

    def owner(self, key: ApiKey) -> tuple[User, int] | None:
        """The key's user, and how many live keys they have; None if the key has just ended."""
        for *columns, count in self._ask(OWNER, now(), key.user_id):
            names = ("id", "username", "email", "created_at")
            return User(**dict(zip(names, columns, strict=True))), count
        return None

    def ended(self, key_ids: set[str]) -> set[str]:
        """Which of these keys have ended."""
        waiting, live = list(key_ids), set[str]()
        while some := waiting[:MAX_ROWS]:
            query = f"SELECT id FROM api_key WHERE {ApiKey.LIVE} AND id IN ({places(some)})"
            live |= {key_id for (key_id,) in self._ask(query, now(), *some)}
            del waiting[:MAX_ROWS]
        return key_ids - live

    def save(self) -> None:
        """Save what has been counted, and delete rows that are too old.

        If nothing is counted, nothing is asked: a database that sleeps while it is idle may do so.
        """
        self._is_used |= bool(self._unsaved())
        self._save()
        if self._is_used and monotonic() > self._tidy_at and not self._delete_old_rows():
            self._tidy_at, self._is_used = monotonic() + TIDY_SECONDS, False

    def _delete_old_rows(self) -> bool:
        """Delete some hours of more than a day ago, and some keys that ended long ago.

        Returns whether there were any. If not, it has only read: a DELETE takes a lock in any case.
        """
        query = "SELECT hour, key_id FROM hourly_usage WHERE hour < ? ORDER BY hour LIMIT ?"
        if hours := self._ask(query, now() - (CHART_HOURS + 1) * HOUR, MAX_ROWS):
            oldest = hours[0][0]
            ids = [key_id for hour, key_id in hours if hour == oldest]
            query = f"DELETE FROM hourly_usage WHERE hour = ? AND key_id IN ({places(ids)})"
            self._ask(query, oldest, *ids)
        long_ago = now() - KEEP_DAYS * DAY
        query = "SELECT id FROM api_key WHERE revoked_at < ? OR expires_at < ? LIMIT ?"
        if keys := [key_id for (key_id,) in self._ask(query, long_ago, long_ago, MAX_ROWS)]:
            self._ask(f"DELETE FROM api_key WHERE id IN ({places(keys)})", *keys)
        return bool(hours or keys)

    def check(self) -> None:
        """Raises PeeweeException unless the database answers."""
        self._ask("SELECT 1")

    def close(self) -> None:
        """Save what is left, within LAST_SECONDS, and close the database."""
        why = "no answer"
        with gevent.Timeout(LAST_SECONDS, False):  # False: raises nothing
            while self._unsaved():
                try:
                    self._save()
                except PeeweeException as error:
                    why = one_line(error)
                    gevent.sleep(0.1)
        if counted := self._unsaved():
            requests = counted_as(sum(counted.values()), "request")
            log.error("%s: %s", self.lost % f"{requests} of {counted_as(len(counted), 'key')}", why)

    @abstractmethod
    def _ask(self, query: str, *values: object) -> list[Any]:
        """The rows that answer a query, in which ? stands for a value."""

    @abstractmethod
    def _unsaved(self) -> Mapping[str, int]:
        """How many requests of each key are not saved yet."""

    @abstractmethod
    def _save(self) -> None:
        """Save them all, or none."""


def places(values: Iterable[object]) -> str:
    """A place in a query for each of the values."""
    return ", ".join("?" for _ in values)


def counted_as(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
