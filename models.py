"""Users, their API keys, what the keys have used: peewee models and the database."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from peewee import (
    BigIntegerField,
    CharField,
    CompositeKey,
    DatabaseError,
    DatabaseProxy,
    ForeignKeyField,
    Model,
    fn,
)
from playhouse.pool import PooledSqliteDatabase

from ratelimit import DEFAULT_TIER, Usage
from settings import Settings, SettingsError

log = logging.getLogger(__name__)

MAX_LIVE_KEYS = 25
BUSY_SECONDS = 0.2  # a locked database holds up the whole process that long, so not long
OPTIONS = {
    "autoconnect": False,  # a query outside a connection_context is a mistake: fail loudly
    "lock_type": "IMMEDIATE",  # read-then-write loses nothing when two processes do it
    "timeout": BUSY_SECONDS,
    "pragmas": {"journal_mode": "wal", "synchronous": "normal", "foreign_keys": 1},
}
database = DatabaseProxy()


def now() -> int:
    return int(time.time())


class Table(Model):
    class Meta:
        database = database
        legacy_table_names = False


class User(Table):
    username = CharField(max_length=32)
    email = CharField(max_length=254)
    password_hash = CharField()
    created_at = BigIntegerField(default=now)


for _field in (User.username, User.email):  # unique, whatever the capitals
    User.add_index(User.index(fn.LOWER(_field), unique=True, name=f"user_{_field.name}"))


class ApiKey(Table):
    """Of the secret only a digest is kept. `changed_at` lets other processes notice."""

    id = CharField(max_length=8, primary_key=True)
    user = ForeignKeyField(User, backref="keys")
    name = CharField(max_length=64)
    type = CharField(max_length=11)
    tier = CharField(max_length=32, default=DEFAULT_TIER)
    digest = CharField(max_length=64)
    created_at = BigIntegerField(default=now)
    revoked_at = BigIntegerField(null=True)
    changed_at = BigIntegerField(null=True, index=True)


class KeyUsage(Table):
    """One row per used key. No foreign keys here: a row deleted by hand must not stop the saving."""

    key_id = CharField(max_length=8, primary_key=True)
    total = BigIntegerField()
    reset = BigIntegerField()
    used = BigIntegerField()
    last_used_at = BigIntegerField()


class HourlyUsage(Table):
    """Requests per key and hour, for the last day."""

    hour = BigIntegerField()
    key_id = CharField(max_length=8)
    requests = BigIntegerField()

    class Meta:
        primary_key = CompositeKey("hour", "key_id")
        without_rowid = True


class Key(NamedTuple):
    """A live key as the request path needs it."""

    id: str
    user_id: int
    name: str
    type: str
    tier: str
    digest: str


def init(settings: Settings) -> None:
    """Bind the models to the database and create what is missing; raises SettingsError."""
    database.initialize(PooledSqliteDatabase(settings.database_path, **OPTIONS))
    try:
        with database.connection_context():
            database.create_tables([User, ApiKey, KeyUsage, HourlyUsage])
    except DatabaseError as error:
        raise SettingsError(f"DATABASE_URL: {settings.database_path}: {error}") from None


def live_keys(user: User | int) -> int:
    return ApiKey.select().where(ApiKey.user == user, ApiKey.revoked_at.is_null()).count()


def change_key(key_id: str, **changes: object) -> bool:
    """Change a live key so that every process notices; False if there is no such key."""
    query = ApiKey.update(changed_at=now(), **changes)
    return bool(query.where(ApiKey.id == key_id, ApiKey.revoked_at.is_null()).execute())


# The request path. peewee takes 150 µs to build these queries and SQLite 5 to answer: hence SQL.

FIND_KEY = """SELECT id, user_id, name, type, tier, digest
              FROM api_key WHERE id = ? AND revoked_at IS NULL"""
LOAD_USAGE = "SELECT total, reset, used FROM key_usage WHERE key_id = ?"


def find_key(key_id: str) -> Key | None:
    """The live key with this id; raises DatabaseError."""
    with database.connection_context():
        row = database.execute_sql(FIND_KEY, (key_id,)).fetchone()
    return Key(*row) if row else None


def load_usage(key_id: str) -> Usage:
    """What the key had used when that was last saved; raises DatabaseError."""
    with database.connection_context():
        row = database.execute_sql(LOAD_USAGE, (key_id,)).fetchone()
    return Usage(*row) if row else Usage()



class Outage:
    """Says once that the database went away, and once that it is back."""

    def __init__(self) -> None:
        self._ongoing = False

    def began(self, error: Exception) -> None:
        if not self._ongoing:
            log.error("database unavailable: %s", error)
        self._ongoing = True

    def ended(self) -> None:
        if self._ongoing:
            log.warning("database available again")
        self._ongoing = False


outage = Outage()
