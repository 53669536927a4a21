"""The tables (users, API keys, hourly usage), and the rules for what may be typed in a field."""

import re
import time

import peewee
from peewee import SQL, AutoField, BigIntegerField, CharField, ForeignKeyField, NodeList, fn

from ratelimit import DEFAULT_TIER, Usage

HOUR, DAY = 3600, 86400
CHART_HOURS = 24  # hours of usage to keep and show
PREFIXES = {"production": "sk_live_", "development": "sk_test_"}  # key prefixes, by type
DEFAULT_TYPE = next(iter(PREFIXES))

# The connections of pages and commands; the store of keys and counts has its own.
# `connection_context` may be nested: only the outermost one closes.
db = peewee.DatabaseProxy()


def now() -> int:
    """The current time in Unix seconds, which is how all times are stored."""
    return int(time.time())


def chart_hours() -> list[int]:
    """When the hours of the chart begin; the current one is last."""
    this_hour = now() // HOUR * HOUR
    return [this_hour - age * HOUR for age in reversed(range(CHART_HOURS))]


class Table(peewee.Model):
    class Meta:
        database = db
        legacy_table_names = False


class NumberField(AutoField):
    """A primary key whose values are never used again; SQLite needs AUTOINCREMENT for that."""

    def ddl(self, ctx: peewee.Context) -> NodeList:
        ddl = super().ddl(ctx)
        is_sqlite = ctx.state.field_types[self.field_type] == "INTEGER"  # in PostgreSQL, SERIAL
        return NodeList((ddl, SQL("AUTOINCREMENT"))) if is_sqlite else ddl


class User(Table):
    id = NumberField()
    username = CharField(max_length=32)
    email = CharField(max_length=254)
    password_hash = CharField()
    created_at = BigIntegerField(default=now)


# User names and addresses are unique, ignoring case.
User.add_index(User.index(fn.LOWER(User.username), unique=True, name="user_username"))
User.add_index(User.index(fn.LOWER(User.email), unique=True, name="user_email"))


class ApiKey(Table):
    """A key and its usage: in total, and in the window that ends at `reset`.

    `digest` is the SHA-256 of the key, which is not stored. `nonce` identifies the form that
    created the key, so that sending it twice creates one key. Rotating a key sets `rotated_at`, and
    `expires_at` to the end of the grace period; the id of the old key is the successor's
    `predecessor`. Revoking a key deletes its row. The schema has the defaults, too: in a rolling
    deployment, the previous version inserts rows without new columns.
    """

    id = CharField(max_length=8, primary_key=True)
    user = ForeignKeyField(User, backref="keys")
    name = CharField(max_length=64)
    type = CharField(max_length=32)
    tier = CharField(max_length=32, default=DEFAULT_TIER, constraints=[SQL("DEFAULT 'free'")])
    digest = CharField(max_length=64)
    nonce = CharField(max_length=8, null=True)
    created_at = BigIntegerField(default=now)
    expires_at = BigIntegerField(null=True, index=True)
    rotated_at = BigIntegerField(null=True)
    predecessor = CharField(max_length=8, null=True)
    last_used_at = BigIntegerField(null=True)
    total = BigIntegerField(default=0, constraints=[SQL("DEFAULT 0")])
    reset = BigIntegerField(default=0, constraints=[SQL("DEFAULT 0")])
    used = BigIntegerField(default=0, constraints=[SQL("DEFAULT 0")])

    # One rule in three forms: for KeyStore's SQL, for peewee's queries, and for a row. The ? is the
    # current time; it has to come before the other values of a query.
    VALID = "(expires_at IS NULL OR expires_at > ?)"

    @classmethod
    def valid(cls) -> peewee.Expression:
        """The condition that a key has not expired, for peewee's queries."""
        return cls.expires_at.is_null() | (cls.expires_at > now())

    @property
    def has_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= now()

    @property
    def usage(self) -> Usage:
        return Usage(self.total, self.reset, self.used)


class HourlyUsage(Table):
    """Requests per key and hour of the last day.

    There is no foreign key: counts may arrive after the key was deleted.
    """

    hour = BigIntegerField()
    key_id = CharField(max_length=8)
    requests = BigIntegerField()

    class Meta:
        primary_key = peewee.CompositeKey("hour", "key_id")


TABLES = Table.__subclasses__()  # in the order in which they are defined

MAX_PASSWORD = 256  # characters
# What people type, although str.isprintable rejects it: spaces that don't break, or are wide;
# emoji, which may be newer than this Python; and what joins their parts, or the letters of Persian
# and Malayalam.
JOINER = "[\u200c\u200d\U000e0020-\U000e007f]"
PRINTABLE_TOO = re.compile(f"[\xa0\u2000-\u200a\u202f\u205f\u3000\U0001f000-\U0001faff]|{JOINER}")
FIELD_RULES = {
    "username": (
        r"[A-Za-z0-9][A-Za-z0-9_.-]{1,31}",
        "Use 2 to 32 letters, digits, dots, dashes or underscores; start with a letter or digit.",
    ),
    "email": (
        # Only ASCII, because SQLite's LOWER leaves other letters as they are.
        r"(?=[!-~]{3,254}$)[^@]{1,64}@[^@.]+(\.[^@.]+)+",
        "Enter an address like ada@example.com.",
    ),
    "password": (
        rf"[^\ud800-\udfff]{{10,{MAX_PASSWORD}}}",  # without lone surrogates
        f"Use 10 to {MAX_PASSWORD} characters.",
    ),
    "name": (
        # Somebody may paste a key here, which must be stored nowhere.
        rf"(?!{JOINER}|.*({'|'.join(PREFIXES.values())})\w{{20}})\S.{{0,63}}",
        "Use 1 to 64 printable characters, and no API key.",
    ),
    "type": ("|".join(PREFIXES), f"Choose {' or '.join(map(str.capitalize, PREFIXES))}."),
}


class InvalidInput(ValueError):
    """Wrong input; `errors` has a message for each wrong field, or one for the `key` as a whole."""

    def __init__(self, **errors: str) -> None:
        # The text that commands print, such as `username: This is already taken.`
        super().__init__(" ".join(map(": ".join, errors.items())).removeprefix("key: "))
        self.errors = errors


class Changed(ValueError):
    """A row was changed or deleted after it had been read, so nothing was done."""


def check_fields(**fields: str) -> None:
    """Raises InvalidInput unless every field that has a rule matches it."""
    errors = {
        field: FIELD_RULES[field][1]
        for field, text in fields.items()
        if field in FIELD_RULES and not _matches(field, text)
    }
    if errors:
        raise InvalidInput(**errors)


def _matches(field: str, text: str) -> bool:
    is_printable = PRINTABLE_TOO.sub("", text).isprintable() or field == "password"
    return bool(is_printable and re.fullmatch(FIELD_RULES[field][0], text))
