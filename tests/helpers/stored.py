"""Stored rows, as another process sees and changes them: nothing is forgotten in this one."""

import re
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import product, zip_longest
from typing import Any
from unittest import mock

import peewee
from peewee import AutoField, BooleanField, CharField, Field, ForeignKeyField, TextField, fn

from accounts import api_keys, users
from helpers.described import ANY_TIME
from models import DAY, HOUR, TABLES, ApiKey, HourlyUsage, User, db, now

HIDDEN = re.compile(r"HIDDEN|\b777,?[78]\d\d\b")  # in rows of others, whose counts may grow
NAME = "theirs"  # a text in rows of others, for pages and endpoints that find a row by a text
OWN = re.compile(r"\b(?:ada|ci)\b|~\w+")  # in Ada's rows, until `rename`
ORDERED = re.compile(
    r"^((?!.* UNION ).* ORDER BY )((?:[^()]|\([^()]*\))*?)( LIMIT .*)?$", re.DOTALL
)
TERM = re.compile(r"((?:[^(),]|\([^()]*\))+?)( ASC| DESC)?(?=,|$)")  # of an order
TEXTS = (CharField, TextField)
NEEDED = {"id", "digest", "type"}  # so that a key is valid
UPDATED = {"changed_at", "edited_at", "modified_at", "updated_at"}  # columns of added tables
KEPT: set[str] = set()  # the names of added tables whose rows outlive their key, such as a log
COUNTS = {"total", "reset", "used", "last_used_at"}


def rotate_key(user: User, key_id: str, grace: int = DAY) -> tuple[ApiKey, ApiKey, str]:
    """Rotate a key whose counts are saved."""
    return api_keys.rotate_key(user, key_id, grace, save_counts=list)


@db.connection_context()
def row(key: str) -> ApiKey:
    return ApiKey.get_by_id(key[8:16])


@db.connection_context()
def change(key: str, **columns: object) -> bool:
    return bool(ApiKey.update(**columns).where(ApiKey.id == key[8:16], ApiKey.valid()).execute())


@db.connection_context()
def count() -> int:
    return int(ApiKey.select().count())


@db.connection_context()
def add_hidden_user() -> str:
    """Store a user with a row in each table, and return the key; what others see has no HIDDEN.

    All texts are HIDDEN but those that the key needs, and one of each row that is found by NAME.
    """
    user = users.create("HIDDEN", "HIDDEN@example.com", "long enough")
    hour = now() // HOUR * HOUR
    key, secret = api_keys.create_key(
        user,
        "HIDDEN",
        created_at=0,
        last_used_at=hour,
        total=777_777,
        reset=hour + HOUR,
        used=777_777,
    )
    HourlyUsage.create(hour=hour, key_id=key.id, requests=777_777)
    owned = {User: user.id, ApiKey: key.id}
    for field in fields(*TEXTS):
        if field.model in owned and field.name not in NEEDED:
            write(field, "HIDDEN", field.model.id == owned[field.model])
    add_rows(key, "HIDDEN", 777_777, parents=add_rows(key, "HIDDEN", 777_777))
    add_rows(key, "HIDDEN", 777_777, is_full=True)
    for number, name in enumerate(
        sorted({field.name for field in fields(*TEXTS) if field.model in TABLES[3:]})
    ):
        add_rows(key, f"HIDDEN{number}", 777_701 + 2 * number, named=name)
    return secret


@db.connection_context()
def add_rows(
    key: ApiKey,
    text: str,
    number: int,
    is_full: bool = False,
    tables: Any = None,
    named: str = "",
    parents: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Store a row of the key's user in each table that was added to the first three, or in these.

    With `parents`, which an earlier call has returned, it stores only rows that belong to a row of
    another added table. They belong to the rows of that call, which may be another user's.

    It has this text in each column of texts but the named one, and this number wherever one is
    needed, or, if is_full, in all that aren't made for each row, as an UUID is. A boolean is True
    if is_full, or else False, whatever its default is. Times are 90 minutes ago, and come in the
    order of their columns; with an odd number, expires_at, and those that may be null, are
    tomorrow.
    """
    owners: dict[str, Any] = (parents or {}) | {"user": key.user_id, "api_key": key.id}
    for table in tables or [
        each for each in TABLES[3:] if not parents or {*each._meta.refs.values()} & {*TABLES[3:]}
    ]:
        row: dict[str, object] = {}
        for name, field in table._meta.fields.items():
            if isinstance(field, ForeignKeyField):
                row[name] = owners.get(field.rel_model._meta.table_name)
            elif isinstance(field, TEXTS):
                row[name] = (key.id if name == "key_id" else NAME if name == named else text)[
                    : getattr(field, "max_length", None)
                ]
            elif name.endswith("_at") and (is_full or not field.null):
                # Such as an end that is to come, so that a POST which cleans up leaves the row.
                is_ahead = (field.null or name == "expires_at") and number % 2
                row[name] = now() - 5400 + len(row) + (DAY if is_ahead else 0)
            elif not (callable(field.default) or isinstance(field, AutoField)) and (
                is_full
                or isinstance(field, BooleanField)
                or not (field.null or field.default is not None)
            ):
                row[name] = is_full if isinstance(field, BooleanField) else number
        made = table.insert(row).on_conflict_ignore().execute()  # a number may be unique
        # A row of a table that comes later may belong to this one.
        owners[table._meta.table_name] = row.get(table._meta.primary_key.name, made)
    return owners


@db.connection_context()
def add_many_rows(key: ApiKey, first: int = 4, last: int = 104) -> None:
    """More than a page shows, each with a text of its own; one of the first has no nulls."""
    hour = now() // HOUR * HOUR
    for number in range(first, last + 1):
        letters = "".join("abcdefghij"[int(digit)] for digit in str(1000 + number))
        add_rows(key, f"~{letters}", number % 3 + 1, is_full=number == min(4, last))
        HourlyUsage.insert(
            hour=hour - number * HOUR, key_id=key.id, requests=1
        ).on_conflict_ignore().execute()  # an hour may have begun since the last call


def rename() -> None:
    """Replace the texts that match OWN, as another process may; they stay different."""
    for field in fields(*TEXTS):
        is_own = field.in_(("ada", "ada@example.com", "ci")) | field.startswith("~")
        write(field, fn.REPLACE(fn.UPPER(field), "~", "="), is_own)


def fields(*types: type[Field]) -> list[Field]:
    """The columns of these types, of all tables."""
    return [
        field for table in TABLES for field in table._meta.sorted_fields if isinstance(field, types)
    ]


@db.connection_context()
def write(field: Field, value: object, where: object = True) -> bool:
    """Give a column another value."""
    return bool(field.model.update({field: value}).where(where).execute())


def reorder(query: re.Match[str]) -> str:
    """The query with nulls on the other side, and with what is equal in a random order."""
    terms = TERM.sub(
        lambda term: f"{term[0]} NULLS {'FIRST' if term[2] == ' DESC' else 'LAST'}", query[2]
    )
    return f"{query[1]}{terms}, random(){query[3] or ''}"


@contextmanager
def turned() -> Iterator[None]:
    """Meanwhile, rows come in another order, as they may, unless a query has a full ORDER BY.

    Nulls come where PostgreSQL has them: at the end, or with DESC at the beginning.
    """
    execute = peewee.SqliteDatabase.execute_sql

    def turn(database: Any, sql: str, *values: Any) -> Any:
        execute(database, "PRAGMA reverse_unordered_selects = 1")
        return execute(database, ORDERED.sub(reorder, sql), *values)

    with mock.patch.object(peewee.SqliteDatabase, "execute_sql", turn):
        yield


@db.connection_context()
def snapshot(counts: Collection[str] = COUNTS) -> dict[Any, list[dict[str, Any]]]:
    """All rows by table, without what counting a request changes.

    The driver itself is asked, so `outage` and the tests of queries don't see it.
    """
    return {
        table: sorted(
            (
                {
                    name: value
                    for name, value in zip(table._meta.sorted_field_names, row, strict=True)
                    if name not in counts
                }
                for row in db.cursor().execute(*table.select().sql()).fetchall()
            ),
            key=str,
        )
        for table in TABLES
        if table is not HourlyUsage or not counts
    }


def neglected(before: dict[Any, list[dict[str, Any]]], value: object) -> set[str]:
    """The columns of changed rows that have another new value than this one, or than now.

    And those of the time of a change that are still the same. False may take a time back, and a
    text, such as a currency, may be stored in capital or in small letters.
    """
    wanted = [
        *((value.upper(), value.lower()) if isinstance(value, str) else ()),
        *(value, None if value is False else value, *range(now() - 30, now() + 2)),
    ]
    return {
        column
        for table, rows in snapshot().items()
        for old, new in product(before[table], rows)
        if new != old and "id" in new and new["id"] == old["id"]
        for column in new
        if (new[column] not in wanted if new[column] != old[column] else column in UPDATED)
    }


def remarked(before: dict[Any, list[dict[str, Any]]]) -> list[str]:
    """Advice for each time that was there, and is another one now; or an end that had passed."""
    return [
        f"moves {column}, when it is sent again: add {column}.is_null() to where(), or that it is "
        f"to come, or call the column last_{column} if the last time counts"
        for table, rows in snapshot().items()
        for old, new in product(before[table], rows)
        if old.get("id", new) == new.get("id")
        for column, field in table._meta.fields.items()
        if column.endswith("_at") and column[:5] != "last_" and column not in UPDATED
        if None not in (old[column], new[column]) and old[column] != new[column]
        if field.null or (column == "expires_at" and max(old[column], new[column]) <= now())
    ]


def left_behind() -> list[str]:
    """Advice for each added table with rows whose key is gone."""
    stored = snapshot()
    return [
        f"leaves rows of {table.__name__} behind: delete those of a key where it is deleted, in "
        "revoke_key, rotate_key and delete_old_rows, or see KEPT in tests/helpers/stored.py"
        for table, rows in stored.items()
        if table in TABLES[3:] and table.__name__ not in KEPT
        if not {each.get("key_id") for each in rows}
        <= {None, *(key["id"] for key in stored[ApiKey])}
    ]


def stored_secrets() -> set[str]:
    """Digests of keys and hashes of passwords, which nothing shows."""
    return {
        each[name]
        for kept in snapshot().values()
        for each in kept
        for name in ("digest", "password_hash")
        if len(each.get(name) or "") > 2  # those of rows that a test stores may be numbers
    }


def hidden_rows(counts: Collection[str] = COUNTS) -> list[dict[str, Any]]:
    """Those that are HIDDEN, and those that belong to them."""
    found: list[dict[str, Any]] = []
    hidden: set[tuple[Any, Any]] = set()
    for table, row in [(table, row) for table, rows in snapshot(counts).items() for row in rows]:
        owners = {(model, row[field.name]) for field, model in table._meta.refs.items()}
        if HIDDEN.search(str([*row.values()])) or owners & hidden:
            found.append(row)
            hidden.add((table, row.get("id")))
    return found


def check_beside_others(
    send: Callable[[], dict[str, str]],
    key: str,
    values: list[Any],
    parents: dict[str, Any] | None = None,
) -> None:
    """Where two texts are the same, a third one is, too, when another user has more rows.

    Some of these belong to the `parents`, which an earlier call of add_rows has returned.
    """
    send()  # some pages leave a message for the next one
    first, second = send(), send()
    add_rows(
        api_keys.create_key(users.create("eve", "eve@example.com", "long enough"), "another")[0],
        *("=guest", 1),
        parents=parents,
    )
    add_many_rows(row(key), 200, 210)
    for value in values:
        add_rows(row(key), str(value), value if isinstance(value, int) else 777_778, is_full=True)
    change(key, total=888_888, used=888_888)
    for what, text in send().items():
        texts = [  # their numbers, and what is between them
            re.findall(r"\d+|\D+", re.sub(ANY_TIME, "", each))
            for each in (first[what], second[what], text)
        ]
        changes = [each for each in zip_longest(*texts) if each[0] == each[1] != each[2]]
        assert not changes, (
            f"{what} shows or counts rows of others: name the user in each query, or see TOTALS: "
            f"{changes}"
        )


@contextmanager
def outage(after: int = 0) -> Iterator[list[str]]:
    """Let SQLite fail after so many statements, as a broken disk does; gives the statements."""
    made: list[str] = []
    execute = peewee.SqliteDatabase.execute_sql

    def fail(database: Any, sql: str, *values: Any) -> Any:
        made.append(sql)
        if len(made) <= after:
            return execute(database, sql, *values)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise peewee.OperationalError(error, str(error))

    with mock.patch.object(peewee.SqliteDatabase, "execute_sql", fail):
        yield made
