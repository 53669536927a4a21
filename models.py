"""Users, their API keys, what the keys have used: peewee models and the database."""

import logging
import time
from typing import Any, NamedTuple

import peewee
from peewee import BigIntegerField, CharField, ForeignKeyField, fn
from playhouse.pool import PooledSqliteDatabase

from ratelimit import DEFAULT_TIER, Usage
from settings import Settings, SettingsError

log = logging.getLogger(__name__)

HOUR = 3600
HOURS = 24  # of usage that are kept, and shown in the chart

OPTIONS = {
    "autoconnect": False,  # a query outside a connection_context is a mistake: fail loudly
    "lock_type": "IMMEDIATE",  # read-then-write loses nothing when two processes do it
    "uri": True,
    "pragmas": {
        "busy_timeout": 100,  # ms; a locked database holds up the whole process, so not for long
        "journal_mode": "wal",
        "synchronous": "normal",
        "wal_autocheckpoint": 4000,  # pages; the default would be a checkpoint for every save
        "foreign_keys": 1,
    },
}
database = peewee.DatabaseProxy()


def now() -> int:
    return int(time.time())


class Table(peewee.Model):
    class Meta:
        database = database
        legacy_table_names = False
        only_save_dirty = True  # a profile that is saved brings back no old password


class User(Table):
    username = CharField(max_length=32)
    email = CharField(max_length=254)
    password_hash = CharField()
    created_at = BigIntegerField(default=now)


for name in ("username", "email"):  # unique, whatever the capitals
    User.add_index(User.index(fn.LOWER(getattr(User, name)), unique=True, name=f"user_{name}"))


class ApiKey(Table):
    """Of the secret only a digest is kept. `changed_at` is how other processes notice."""

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
    """One row per used key; no foreign key, so that no row deleted by hand stops the saving."""

    key_id = CharField(max_length=8, primary_key=True)
    total = BigIntegerField()
    reset = BigIntegerField()
    used = BigIntegerField()
    last_used_at = BigIntegerField()

    class Meta:
        without_rowid = True  # a third less to do when saving


class HourlyUsage(Table):
    """Requests per key and hour, for the last day."""

    hour = BigIntegerField()
    key_id = CharField(max_length=8)
    requests = BigIntegerField()

    class Meta:
        primary_key = peewee.CompositeKey("hour", "key_id")
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
    try:
        settings.database.touch()  # the last time: a file that vanishes is not silently replaced
        uri = f"{settings.database.absolute().as_uri()}?mode=rw"
        # Connections are renewed, so that a file that was put in another's place is noticed.
        database.initialize(PooledSqliteDatabase(uri, stale_timeout=2, **OPTIONS))
        with database.connection_context():
            database.create_tables([User, ApiKey, KeyUsage, HourlyUsage])
    except (OSError, peewee.DatabaseError) as error:
        raise SettingsError(f"DATABASE_URL: {settings.database}: {error}") from None


def live_keys(user: User | int) -> peewee.ModelSelect:
    return ApiKey.select().where(ApiKey.user == user, ApiKey.revoked_at.is_null())


def change_key(key_id: str, **changes: object) -> bool:
    """Change a live key so that every process notices; False if there is no such key."""
    query = ApiKey.update(changed_at=now(), **changes)
    return bool(query.where(ApiKey.id == key_id, ApiKey.revoked_at.is_null()).execute())


# The request path: peewee takes 150 µs to build these queries and SQLite 5 to answer, hence SQL.


def find_key(key_id: str) -> Key | None:
    """The live key with this id; raises DatabaseError."""
    columns = ", ".join(Key._fields)
    row = _row(f"SELECT {columns} FROM api_key WHERE id = ? AND revoked_at IS NULL", key_id)
    return Key(*row) if row else None


def load_usage(key_id: str) -> Usage:
    """What the key had used when that was last saved; raises DatabaseError."""
    row = _row("SELECT total, reset, used FROM key_usage WHERE key_id = ?", key_id)
    return Usage(*row) if row else Usage()


def _row(query: str, key_id: str) -> tuple[Any, ...] | None:
    with database.connection_context():
        row: tuple[Any, ...] | None = database.execute_sql(query, (key_id,)).fetchone()
    return row


class Outage:
    """Says once that the database went away, and once that it is back."""

    ongoing = False

    def note(self, error: Exception | None) -> None:
        """Tell how the database was just found: failing, or well (None)."""
        if error:
            database.close_idle()  # a connection that saw a broken file stays broken
        if error and not self.ongoing:
            log.error("database unavailable: %s", error)
        elif self.ongoing and not error:
            log.warning("database available again")
        self.ongoing = bool(error)


outage = Outage()
