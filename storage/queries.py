"""The queries of both stores, in SQL where building them with peewee would take long."""

from collections.abc import Callable, Iterable
from typing import Any

from models import CHART_HOURS, DAY, HOUR, ApiKey, now

Ask = Callable[..., list[Any]]  # Store._ask

COLUMNS = ApiKey._meta.columns
FIELDS = [field.name for field in COLUMNS.values()]
FIND = f"SELECT {', '.join(COLUMNS)} FROM api_key WHERE id = ?"
# A join, and no subquery that counts, because Citus refuses that.
OWNER = f"""SELECT "user".id, username, email, "user".created_at, count(*)
    FROM "user" JOIN api_key ON api_key.user_id = "user".id WHERE {ApiKey.LIVE} AND "user".id = ?
    GROUP BY "user".id, username, email, "user".created_at"""
KEEP_DAYS = 30  # how long ended keys are kept
# How many rows a query names at most; SQLite before 3.32 allows 999. At each sync, so many old rows
# are deleted, which takes 5 ms. That is 1,000 a second; a million keys in use make 280 a second.
SOME = 500


def made_of(row: Iterable[object]) -> ApiKey:
    """The key in a row that FIND has returned; given to the constructor, it would take 10 µs."""
    key = ApiKey()
    key.__data__.update(zip(FIELDS, row, strict=True))
    return key


def ended_keys(ask: Ask, ids: set[str]) -> set[str]:
    """Those of the ids that belong to no live key."""
    waiting, live = list(ids), set[str]()
    while some := waiting[:SOME]:
        query = f"SELECT id FROM api_key WHERE {ApiKey.LIVE} AND id IN ({places(some)})"
        live |= {key_id for (key_id,) in ask(query, now(), *some)}
        del waiting[:SOME]
    return ids - live


def delete_old_rows(ask: Ask) -> bool:
    """Delete some hours of more than a day ago, and some keys that ended long ago.

    Returns whether there were any. If not, it has only read: a DELETE takes a lock in any case.
    """
    query = f"SELECT hour, key_id FROM hourly_usage WHERE hour < ? ORDER BY hour LIMIT {SOME}"
    if hours := ask(query, now() - (CHART_HOURS + 1) * HOUR):
        oldest = hours[0][0]
        ids = [key_id for hour, key_id in hours if hour == oldest]
        ask(f"DELETE FROM hourly_usage WHERE hour = ? AND key_id IN ({places(ids)})", oldest, *ids)
    long_ago = now() - KEEP_DAYS * DAY
    query = f"SELECT id FROM api_key WHERE revoked_at < ? OR expires_at < ? LIMIT {SOME}"
    if keys := [key_id for (key_id,) in ask(query, long_ago, long_ago)]:
        ask(f"DELETE FROM api_key WHERE id IN ({places(keys)})", *keys)
    return bool(hours or keys)


def places(values: Iterable[object]) -> str:
    """A place in a query for each of the values."""
    return ", ".join("?" for _ in values)
