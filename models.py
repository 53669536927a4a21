"""Users, their API keys, what the keys have used: peewee models and the database."""

import logging
import time
from typing import NamedTuple, TypeVar

import peewee
from peewee import BigIntegerField, CharField, ForeignKeyField, fn
from playhouse.pool import PooledSqliteDatabase

from ratelimit import DEFAULT_TIER, Usage
from settings import Settings, SettingsError

log = logging.getLogger(__name__)

HOUR = 3600
HOURS = 24  # of usage that are kept, and shown in the chart

PREFIXES = {"production": "sk_live_", "development": "sk_test_"}  # of keys, by their type

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
    """A key and what it has used: all in all, and in the window that ended, or will, at `reset`.

    Of the secret only a digest is kept. `changed_at` is how other processes notice a change.
    """

    id = CharField(max_length=8, primary_key=True)
    user = ForeignKeyField(User, backref="keys")
    name = CharField(max_length=64)
    type = CharField(max_length=11)
    tier = CharField(max_length=32, default=DEFAULT_TIER)
    digest = CharField(max_length=64)
    created_at = BigIntegerField(default=now)
    revoked_at = BigIntegerField(null=True)
    changed_at = BigIntegerField(null=True, index=True)
    last_used_at = BigIntegerField(null=True)
    total = BigIntegerField(default=0)
    reset = BigIntegerField(default=0)
    used = BigIntegerField(default=0)


class HourlyUsage(Table):
    """Requests per key and hour, for the last day.

    No foreign key, so that no row deleted by hand stops the saving.
    """

    hour = BigIntegerField()
    key_id = CharField(max_length=8)
    requests = BigIntegerField()

    class Meta:
        primary_key = peewee.CompositeKey("hour", "key_id")
        without_rowid = True  # a third less to do when saving


class Key(NamedTuple):
    """A live key as the request path needs it."""

    id: str
    user_id: int
    name: str
    type: str
    tier: str
    digest: str


Row = TypeVar("Row", Key, Usage)


def init(settings: Settings) -> None:
    """Bind the models to the database and create what is missing; raises SettingsError."""
    try:
        settings.database.touch()  # the last time: a file that vanishes is not silently replaced
        uri = f"{settings.database.absolute().as_uri()}?mode=rw"
        # Connections are renewed, so that a file that was put in another's place is noticed.
        database.initialize(PooledSqliteDatabase(uri, stale_timeout=2, **OPTIONS))
        with database.connection_context():
            database.create_tables([User, ApiKey, HourlyUsage])
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
    return _read(Key, key_id)


def load_usage(key_id: str) -> Usage:
    """What the key had used when that was last saved; raises DatabaseError."""
    return _read(Usage, key_id) or Usage()


def _read(kind: type[Row], key_id: str) -> Row | None:
    columns = ", ".join(kind._fields)
    query = f"SELECT {columns} FROM api_key WHERE id = ? AND revoked_at IS NULL"
    with database.connection_context():
        row = database.execute_sql(query, (key_id,)).fetchone()
    return kind(*row) if row else None


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
