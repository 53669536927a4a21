"""How keys and counts are looked up and stored, whichever database holds them."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection
from time import monotonic, time
from typing import Any, ClassVar

from peewee import PeeweeException, chunked

from models import CHART_HOURS, HOUR, ApiKey, now
from ratelimit import Allowance, Quota, Usage
from storage.outage import reason_of

log = logging.getLogger(__name__)

CACHE_SECONDS = 0.5  # how long a row that was found is remembered
# How many rows a query names at most; SQLite before 3.32 allows 999. Each save also deletes up to
# 500 old rows, which takes 5 ms. With two saves a second that is 1,000 rows a second; a million
# keys in use add 280 rows a second.
MAX_ROWS = 500
# These queries are SQL, because peewee would take too long to build them.
COLUMNS = ApiKey._meta.columns
FIND = f"SELECT {', '.join(COLUMNS)} FROM api_key WHERE id = ?"
# A join instead of a subquery that counts, because Citus refuses that.
OWNER = f"""SELECT "user".id, username, email, "user".created_at, count(*)
    FROM "user" JOIN api_key ON api_key.user_id = "user".id WHERE {ApiKey.VALID} AND "user".id = ?
    GROUP BY "user".id, username, email, "user".created_at"""


class KeyStore(ABC):
    """Looks up keys, and counts requests; each method may raise PeeweeException.

    It has connections of its own, so it never waits for those of pages. A cached row is at most
    CACHE_SECONDS old, plus one query.
    """

    _rows: ClassVar[dict[str, ApiKey]] = {}  # the cache, by id
    _clear_at = 0.0

    def find(self, key_id: str) -> ApiKey | None:
        """The key with this id, expired or not.

        An unknown id is not remembered: made-up keys take no memory, and a new key works at once.
        """
        if monotonic() > self._clear_at:
            self.clear_cache()
        rows = self._rows  # if the cache is cleared during the look-up, these are not used again
        key = rows.get(key_id) or self._look_up(key_id)
        if key:
            rows[key_id] = key
        return key

    @staticmethod
    def clear_cache() -> None:
        """Discard the cached rows, because a row may have changed; `transaction` calls this."""
        KeyStore._rows = {}
        KeyStore._clear_at = monotonic() + CACHE_SECONDS

    def _look_up(self, key_id: str) -> ApiKey | None:
        rows = self._query(FIND, key_id)
        return ApiKey(**dict(zip(COLUMNS, rows[0], strict=True))) if rows else None

    @abstractmethod
    def hit(self, key_id: str, quota: Quota) -> Allowance | None:
        """Count a request if the window's allowance is not used up; None if the key is deleted."""

    def peek(self, key: ApiKey, quota: Quota) -> Allowance:
        """What is left of the window for a key that was just looked up; counts nothing."""
        moment = time()
        return self.usage_of(key).in_current_window(quota, moment).allowance(quota, moment, False)

    def usage_of(self, key: ApiKey) -> Usage:
        """What has been used of a key that was just looked up.

        No other greenlet may run in between: it could save counts, which the row would then lack.
        """
        return key.usage

    def owner(self, key: ApiKey) -> tuple[int, str, str, int, int] | None:
        """The id, name, address and creation time of the key's user, and their number of keys.

        None if the user has no valid key left.
        """
        return next(iter(self._query(OWNER, now(), key.user_id)), None)

    def ended_digests(self, keys: list[ApiKey]) -> set[str]:
        """The digests of those keys that have ended, or whose row was given another digest."""
        digests = {key.digest for key in keys}
        for ids in chunked({key.id for key in keys}, MAX_ROWS):
            query = (
                f"SELECT digest FROM api_key WHERE {ApiKey.VALID} AND id IN ({placeholders(ids)})"
            )
            digests -= {digest for (digest,) in self._query(query, now(), *ids)}
        return digests

    def flush(self) -> None:
        """Save what was counted; if anything was, delete some old rows, too."""
        if self.save():
            self.delete_old_rows()

    @abstractmethod
    def save(self) -> bool:
        """Save what was counted, or a part of it.

        If nothing was, this returns False, and the database is not asked, so that it can sleep.
        """

    def save_to_keys(self) -> None:
        """Save what was counted and is not in the rows of keys yet."""
        self.save()

    def delete_old_rows(self) -> None:
        """Delete some hours of more than a day ago, and some keys that have expired."""
        query = "SELECT hour, key_id FROM hourly_usage WHERE hour < ? ORDER BY hour LIMIT ?"
        # One hour more than the chart shows, in case the clock of another process is behind.
        if hours := self._query(query, now() - (CHART_HOURS + 1) * HOUR, MAX_ROWS):
            oldest = hours[0][0]
            ids = [key_id for hour, key_id in hours if hour == oldest]
            query = f"DELETE FROM hourly_usage WHERE hour = ? AND key_id IN ({placeholders(ids)})"
            self._query(query, oldest, *ids)
        query = "SELECT id FROM api_key WHERE expires_at <= ? LIMIT ?"
        if keys := [key_id for (key_id,) in self._query(query, now(), MAX_ROWS)]:
            self._query(f"DELETE FROM api_key WHERE id IN ({placeholders(keys)})", *keys)

    def save_and_close(self) -> None:
        """Save what is left, and close the database."""
        try:
            while self.save():
                pass
        except PeeweeException as error:
            log.error("could not save the last counts: %s", reason_of(error))

    @abstractmethod
    def _query(self, query: str, *values: object) -> list[Any]:
        """The rows that answer a query, in which ? stands for a value."""


def placeholders(values: Collection[object]) -> str:
    """A placeholder in a query for each of the values."""
    return ", ".join("?" * len(values))
