"""The queries for both databases, in SQL where building them with peewee would take longer."""

import peewee

from models import CHART_HOURS, DAY, HOUR, ApiKey, User, now

COLUMNS = list(ApiKey._meta.columns)
# The user may have been deleted by hand, without foreign keys. EXISTS, because for IN and for JOIN
# SQLite may search all keys of each user.
OWNED = 'EXISTS (SELECT 1 FROM "user" WHERE "user".id = api_key.user_id)'
FIND = f"SELECT {', '.join(COLUMNS)} FROM api_key WHERE {OWNED} AND id "
KEEP_DAYS = 30  # for which keys are kept after they have ended
# Some rows at a time, so that nobody waits for long.
DELETE_HOURS = """DELETE FROM hourly_usage WHERE {row} IN (
    SELECT {row} FROM hourly_usage WHERE hour < {before} LIMIT 2000 {lock})"""
DELETE_KEYS = """DELETE FROM api_key WHERE {row} IN (
    SELECT {row} FROM api_key WHERE revoked_at < {before} OR expires_at < {before}
    LIMIT 100 {lock})"""


def made_of(row: tuple[object, ...]) -> ApiKey:
    """The key of a row of FIND."""
    return ApiKey(**dict(zip(COLUMNS, row, strict=True)))


def ended_keys(ids: set[str], database: peewee.Database) -> set[str]:
    """Those of the ids that belong to no live key of a user; raises PeeweeException."""
    owned = peewee.fn.EXISTS(User.select(1).where(User.id == ApiKey.user))
    query = ApiKey.select(ApiKey.id).where(ApiKey.id.in_(ids), ApiKey.live(), owned)
    return ids - {key_id for (key_id,) in query.tuples().bind(database)} if ids else ids


def delete_old_rows(database: peewee.Database, row: str = "rowid", lock: str = "") -> None:
    """Delete hours of more than a day ago, and keys that ended long ago.

    `row` is the column that identifies a row: `rowid` or `ctid`. Several processes may do this at
    once: with `lock`, each skips the rows that another deletes.
    """
    for query, seconds in (
        (DELETE_HOURS, (CHART_HOURS + 1) * HOUR),
        (DELETE_KEYS, KEEP_DAYS * DAY),
    ):
        database.execute_sql(query.format(before=now() - seconds, row=row, lock=lock))
