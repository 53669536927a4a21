"""The queries of both stores, in SQL where building them with peewee would take long."""

import peewee

from models import CHART_HOURS, DAY, HOUR, ApiKey, HourlyUsage, User, now

COLUMNS = ApiKey._meta.columns
FIELDS = [field.name for field in COLUMNS.values()]
# The user may have been deleted by hand, without foreign keys. EXISTS, because with IN or JOIN
# SQLite may go through all keys of each user.
OWNED = 'EXISTS (SELECT 1 FROM "user" WHERE "user".id = api_key.user_id)'
FIND = f"SELECT {', '.join(COLUMNS)} FROM api_key WHERE {OWNED} AND id "  # add `= ...`
LIVE = "revoked_at IS NULL AND (expires_at IS NULL OR expires_at > {now})"
# A join and no subquery that counts, because Citus refuses that.
OWNER = f"""SELECT "user".id, username, email, "user".created_at, count(*)
    FROM "user" JOIN api_key ON api_key.user_id = "user".id
    WHERE "user".id = {{user_id}} AND {LIVE}
    GROUP BY "user".id, username, email, "user".created_at"""
KEEP_DAYS = 30  # how long ended keys are kept
# Rows that are deleted at each sync, which takes 5 ms. That is 1,000 a second; a million keys in
# use make about 280 a second.
SOME = 500


def made_of(row: tuple[object, ...]) -> ApiKey:
    """The key in a row that FIND has returned; given to the constructor, it would take 10 µs."""
    key = ApiKey()
    key.__data__.update(zip(FIELDS, row, strict=True))
    return key


def owner(key: ApiKey, database: peewee.Database) -> tuple[User, int] | None:
    """As Store.owner; raises PeeweeException."""
    query = OWNER.format(user_id=key.user_id, now=now())
    row = database.execute_sql(query).fetchone()
    if row is None:
        return None
    *columns, count = row
    names = ("id", "username", "email", "created_at")
    return User(**dict(zip(names, columns, strict=True))), count


def ended_keys(ids: set[str], database: peewee.Database) -> set[str]:
    """Those of the ids that belong to no live key of a user; raises PeeweeException."""
    if not ids:
        return ids
    places = ", ".join([database.param] * len(ids))
    live = LIVE.format(now=now())
    query = f"SELECT id FROM api_key WHERE {OWNED} AND {live} AND id IN ({places})"
    return ids - {key_id for (key_id,) in database.execute_sql(query, tuple(ids))}


def delete_old_rows(database: peewee.Database) -> None:
    """Delete some hours of more than a day ago, and some keys that ended long ago.

    Called at each sync. If nothing is old, it only reads: a DELETE takes a lock even if it finds no
    row. Raises PeeweeException.
    """
    hour, key_id = HourlyUsage.hour, HourlyUsage.key_id
    past = hour < now() - (CHART_HOURS + 1) * HOUR
    oldest = HourlyUsage.select(peewee.fn.MIN(hour)).where(past).bind(database).scalar()
    if oldest is not None:
        some = HourlyUsage.select(key_id).where(hour == oldest).limit(SOME)
        HourlyUsage.delete().where(hour == oldest, key_id.in_(some)).bind(database).execute()
    long_ago = now() - KEEP_DAYS * DAY
    ended = (ApiKey.revoked_at < long_ago) | (ApiKey.expires_at < long_ago)
    some = ApiKey.select(ApiKey.id).where(ended).limit(SOME)
    if some.bind(database).exists():
        ApiKey.delete().where(ApiKey.id.in_(some)).bind(database).execute()
