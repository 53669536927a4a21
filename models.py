"""Users, their API keys and their usage: the peewee models and the database."""

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import peewee
from peewee import BigIntegerField, CharField, ForeignKeyField, fn
from playhouse.pool import PooledSqliteDatabase

from ratelimit import DEFAULT_TIER
from settings import Settings, SettingsError
from storage import postgres, upgrade

log = logging.getLogger(__name__)

HOUR, DAY = 3600, 86400
CHART_HOURS = 24  # of usage that are kept and shown
PREFIXES = {"production": "sk_live_", "development": "sk_test_"}  # of keys, by their type
NO_ROLLBACK = ("no transaction is active", "no such savepoint")
IDS_PER_QUERY = 1000
QUIET_SYNCS = 5  # without a failure, after which an outage is over: two seconds at least
BUSY_SECONDS = 0.1  # to wait for a lock of SQLite, because the whole process waits
COMMAND_SECONDS = 10  # the same, where only one command waits

PRAGMAS = {
    "journal_mode": "wal",
    "synchronous": "normal",
    "wal_autocheckpoint": 4000,  # pages; with the default, busy saves would checkpoint each time
    "foreign_keys": 1,
}
# A query without a connection_context is a mistake, so it fails. A transaction that reads and then
# writes locks from its start, so it never has to be retried.
SQLITE_OPTIONS = {"autoconnect": False, "lock_type": "IMMEDIATE", "uri": True, "pragmas": PRAGMAS}
database = peewee.DatabaseProxy()


def now() -> int:
    return int(time.time())


def has_come(moment: int | None) -> bool:
    return moment is not None and moment <= now()


class Table(peewee.Model):
    class Meta:
        database = database
        legacy_table_names = False
        only_save_dirty = True  # saving a profile does not write the old password again


class User(Table):
    username = CharField(max_length=32)
    email = CharField(max_length=254)
    password_hash = CharField()
    created_at = BigIntegerField(default=now)


for name in ("username", "email"):  # unique, ignoring case
    User.add_index(User.index(fn.LOWER(getattr(User, name)), unique=True, name=f"user_{name}"))


class ApiKey(Table):
    """A key and its usage, in total and in the window that ends at `reset`.

    Only a digest of the key is stored. A key is good until `expires_at` or `revoked_at`.
    Revoking sets both to now, rotating sets both to the end of the grace.
    """

    id = CharField(max_length=8, primary_key=True)
    user = ForeignKeyField(User, backref="keys")
    name = CharField(max_length=64)
    type = CharField(max_length=11)
    tier = CharField(max_length=32, default=DEFAULT_TIER)
    digest = CharField(max_length=64)
    created_at = BigIntegerField(default=now)
    expires_at = BigIntegerField(null=True)
    revoked_at = BigIntegerField(null=True)
    last_used_at = BigIntegerField(null=True)
    total = BigIntegerField(default=0)
    reset = BigIntegerField(default=0)
    used = BigIntegerField(default=0)

    @classmethod
    def live(cls) -> peewee.Expression:
        """The condition that a key has not ended."""
        not_revoked = cls.revoked_at.is_null() | (cls.revoked_at > now())
        return not_revoked & (cls.expires_at.is_null() | (cls.expires_at > now()))

    @property
    def state(self) -> str:
        """`live`, `revoked` or `expired`."""
        if has_come(self.revoked_at):
            return "revoked"
        return "expired" if has_come(self.expires_at) else "live"


class HourlyUsage(Table):
    """Requests per key and hour of the last day; no foreign key, so that saving never fails."""

    hour = BigIntegerField()
    key_id = CharField(max_length=8)
    requests = BigIntegerField()

    class Meta:
        primary_key = peewee.CompositeKey("hour", "key_id")


TABLES = [User, ApiKey, HourlyUsage]


class Key(NamedTuple):
    """The columns of a key that a request needs; 10 µs cheaper to make than an ApiKey."""

    id: str
    user_id: int
    name: str
    type: str
    tier: str
    digest: str
    expires_at: int | None
    revoked_at: int | None
    total: int
    reset: int
    used: int

    def has_ended(self) -> bool:
        return has_come(self.expires_at) or has_come(self.revoked_at)


def init(settings: Settings, must_answer: bool = True) -> None:
    """Open the database and bring its tables up to date; raises SettingsError.

    Unless it `must_answer`, PostgreSQL may be away: gunicorn's master has seen to the tables.
    """
    url, name = settings.postgres, "PostgreSQL" if settings.postgres else settings.sqlite
    try:
        database.initialize(postgres.Postgres(url) if url else _open_sqlite(settings.sqlite))
        if url:
            database.obj.timeout = COMMAND_SECONDS
            upgrade.create_or_upgrade(database.obj, TABLES)
    except (OSError, peewee.PeeweeException, ValueError) as error:
        if must_answer or not (url and isinstance(error, peewee.OperationalError)):
            raise SettingsError(f"DATABASE_URL: {name}: {reason(error)}") from None
    database.obj.timeout = postgres.ANSWER_SECONDS if url else BUSY_SECONDS


def _open_sqlite(file: Path) -> PooledSqliteDatabase:
    """Upgrade the file, then open it. A file that is refused stays as it was."""
    file.touch(mode=0o600)
    uri = f"{file.as_uri()}?mode=rw"  # rw: a file that was deleted is not silently replaced
    first = peewee.SqliteDatabase(uri, uri=True, timeout=COMMAND_SECONDS, lock_type="IMMEDIATE")
    upgrade.create_or_upgrade(first, TABLES)
    with suppress(PermissionError):  # it has another owner, who chose its mode
        file.chmod(0o600)
    with first.connection_context():
        first.execute_sql("PRAGMA journal_mode = wal")  # stays in the file
    return PooledSqliteDatabase(uri, **SQLITE_OPTIONS)


def reason(error: BaseException) -> str:
    """What went wrong, in one line, without the values that PostgreSQL quotes in further lines."""
    # SQLite ends a transaction by itself when the disk is full; peewee's rollback then fails, too.
    while error.__context__ and any(text in str(error) for text in NO_ROLLBACK):
        error = error.__context__
    return str(error).partition("\n")[0]


def find_key(key_id: str) -> Key | None:
    """The key with this id, ended or not; raises PeeweeException."""
    return find_keys([key_id])[0]


def find_keys(ids: list[str], source: Any = database) -> list[Key | None]:
    """The keys with these ids, ended or not, None where there is none; raises PeeweeException.

    In SQL, because peewee takes 150 µs to build this query, and SQLite 5 µs to answer it. The user
    may have been deleted by hand, without foreign keys.
    """
    places = ", ".join([database.param] * len(ids))
    query = f"""SELECT {", ".join(Key._fields)} FROM api_key
        WHERE id IN ({places}) AND user_id IN (SELECT id FROM "user")"""
    with source.connection_context():
        found = {row[0]: Key(*row) for row in source.execute_sql(query, ids).fetchall()}
    return [found.get(key_id) for key_id in ids]


def ended_keys(ids: set[str], source: peewee.Database) -> set[str]:
    """Those of the ids that belong to no live key of a user; raises PeeweeException."""
    ended = set(ids)
    for part in peewee.chunked(ids or [""], IDS_PER_QUERY):  # one query at least finds an outage
        query = ApiKey.select(ApiKey.id).join(User).where(ApiKey.id.in_(part), ApiKey.live())
        ended.difference_update(key_id for (key_id,) in query.tuples().bind(source))
    return ended


def change_key(key_id: str, **changes: object) -> bool:
    """Change a live key; False if there is none with this id."""
    return bool(ApiKey.update(**changes).where(ApiKey.id == key_id, ApiKey.live()).execute())


def revoke_key(key_id: str) -> bool:
    """End a live key for good; False if there is none with this id."""
    moment = now()
    return change_key(key_id, expires_at=moment, revoked_at=moment)


def lock(user: User) -> None:
    """Let nobody else lock this user until the transaction ends; needed in PostgreSQL."""
    User.update(id=User.id).where(User.id == user.id).execute()


class Outage:
    """Logs once that the database is unavailable, and once that it is available again."""

    quiet_syncs = QUIET_SYNCS  # since the last failure

    def note(self, error: Exception | None) -> None:
        """Note an error, or (None) that the background could use the database."""
        if error:
            database.close_idle()  # a connection that failed may go on failing
            if self.quiet_syncs == QUIET_SYNCS:
                log.error("database unavailable: %s", reason(error))
            self.quiet_syncs = 0
        elif self.quiet_syncs < QUIET_SYNCS:
            self.quiet_syncs += 1
            if self.quiet_syncs == QUIET_SYNCS:
                log.warning("database available again")


outage = Outage()
