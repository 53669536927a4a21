"""With many rows, every query is a search, and none is repeated for each row."""

import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import peewee
import pytest
from peewee import AutoField

from accounts import api_keys, users
from helpers import sample
from helpers.commands import run_commands
from helpers.described import OPERATIONS
from helpers.paths import KEYS, PROFILE, SECURITY, pages
from helpers.stored import change, fields, stored_secrets
from models import DEFAULT_TYPE, HOUR, TABLES, ApiKey, HourlyUsage, User, db, now
from service.application import Service
from settings import Settings
from storage.postgres import ANSWER_SECONDS, CONNECTION_SECONDS
from storage.sqlite import SAVE, SAVE_HOUR
from ws.open_sockets import open_sockets_of

pytestmark = pytest.mark.usefixtures("with_sample")

ALL = [*OPERATIONS, *sample.OPERATIONS]
NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {})"
USERS, MANY_KEYS = NUMBERS.format(1000), NUMBERS.format(20_000)
FILL = [
    f"""INSERT INTO user (id, username, email, password_hash, created_at)
    {USERS} SELECT i, 'user' || i, 'user' || i, '', 0 FROM n""",
    f"""INSERT INTO api_key (id, user_id, name, type, digest, created_at, expires_at)
    {MANY_KEYS} SELECT 10000000 + i, i % 1000 + 1, 'k', 'production', '', 0, i % 2 * 9000000000
    FROM n""",
    f"INSERT INTO hourly_usage {USERS} SELECT 0, i, 1 FROM n",
]
# What an index finds: a row, the rows of a user, an hour of a key; what is old.
ROW = {"id=?", "rowid=?", "<expr>=?"} | {
    f"{each.column_name}=?" for each in fields(peewee.Field) if each.unique
}
LISTS = {"user list", "key list", "usage", "backup"}  # commands that read all rows
STATEMENT = re.compile("(?!.*sqlite_master)(SELECT|INSERT|UPDATE|DELETE)")
FEW = {"user_id=?", "key_id=?", "api_key_id=?", "hour=?", "hour<?", "expires_at<?"}


@pytest.fixture
def commands(
    app: Service, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Iterator[tuple[str, str]]:
    """Runs all commands, one after another."""
    return run_commands(app, tmp_path, capfd)


@pytest.mark.parametrize("analyzed", [False, True])
def test_no_query_of_pages_commands_and_background_scans(
    app: Service,
    config: Settings,
    asked: list[tuple[str, Any]],
    commands: Iterator[tuple[str, str]],
    analyzed: bool,
) -> None:
    if not config.sqlite:
        pytest.skip("PostgreSQL scans a small table, even if it has an index")
    with db.connection_context():
        for statement in FILL:
            db.execute_sql(statement)
    asked[:] = [(SAVE, (None,) * SAVE.count("?")), (SAVE_HOUR, ("", "", ""))]  # by sqlite3 itself
    seen = set()
    with closing(sqlite3.connect(config.database_url)) as other:
        if analyzed:
            other.execute("ANALYZE")
        for page in walk(app, commands):
            for sql, values in [each for each in asked if STATEMENT.match(each[0])]:
                assert len(values or ()) <= 999, f"{page}: more values than SQLite allows"
                for step in other.execute(f"EXPLAIN QUERY PLAN {sql}", values or ()):
                    if is_slow(step[3]) and page.removeprefix("the command ") not in LISTS:
                        pytest.fail(
                            f"{page}: name the user, use an index, or add it to FEW if that is few "
                            "or rare, or the command to LISTS if it prints all rows: "
                            f"{step[3]}: {sql}",
                            pytrace=False,
                        )
                seen.add(sql)
            asked.clear()
    assert len(seen) >= 25


def test_everything_works_with_30_rows_and_asks_seldom_enough(
    app: Service,
    asked: list[tuple[str, Any]],
    commands: Iterator[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No query is repeated for each row. With --postgres, one that only SQLite accepts is found.

    The waits of a page with PostgreSQL, each of which has its own limit, add up to less than 15
    seconds. With each connection, a transaction may begin and end.
    """
    connect = peewee.Database.connect
    opened = mock.create_autospec(connect, side_effect=connect)
    monkeypatch.setattr(peewee.Database, "connect", opened)
    app.before_request(opened.reset_mock)
    for name in walk(app, commands):
        repeated = [sql for sql, times in Counter(sql for sql, _ in asked).items() if times > 9]
        assert not repeated or name == "the rows", (
            f"{name}: ask for all rows in one, for example with join(): {repeated}"
        )
        statements = len(asked) + 2 * opened.call_count
        seconds = opened.call_count * CONNECTION_SECONDS + statements * ANSWER_SECONDS
        assert name.startswith("the ") or seconds < 15, f"{name}: {opened.call_count} connections"
        asked.clear()


def is_slow(step: str) -> bool:
    if step.startswith("SEARCH"):
        return (ROW | FEW).isdisjoint(step.rpartition("(")[2].partition(")")[0].split(" AND "))
    return bool(re.match("SCAN (?!CONSTANT)", step)) and step not in FEW


def walk(app: Service, commands: Iterator[tuple[str, str]]) -> Iterator[str]:
    """Everything that pages, the API, a sync and commands do for a user who has 30 of each row."""
    browser = app.test_client()
    password = "long enough"
    ada = {"username": "ada", "email": "ada@example.com"}

    def post(path: str, **form: str) -> str:
        assert browser.post(path, data=form).status_code in (200, 303)
        return path

    yield post("/sign-up", password=password, **ada)
    user = users.find_user("ada")
    assert user
    made, key = api_keys.create_key(user, "ci")
    fill(user, made.id, range(1, 31))
    # As if a row was edited by hand.
    change(key, type="odd\n\u20ac", created_at=10**13, last_used_at=-1)
    yield "the rows"
    for path, form in {
        "/log-out": {},
        "/log-in": {"username": "ada", "password": password},
        PROFILE: ada,
        f"{SECURITY}/password": {"current": password, "password": password},
        KEYS: {"name": "ci", "type": "production", "expires": "never"},
    }.items():
        yield post(path, **form)
    for path in pages(app, "GET", "ada", made.id):
        assert browser.get(path).status_code in (200, 303, 404), (
            f"{path} has a bug, see the log below"
        )
        yield path
    for operation in sorted(ALL, key=lambda each: each.method == "DELETE"):
        how = operation.sent(operation.example) | {"headers": {"X-API-Key": key}}
        answer = browser.open(  # with the largest numbers in its query
            operation.url(changes=operation.largest), method=operation.method, **how
        )
        # More than 30 rows may be more than a user may have.
        is_full = operation.method == "POST" and answer.status_code in (403, 409, 422)
        assert answer.status_code < 300 or is_full, f"{operation} has a bug: {answer.text}"
        yield str(operation)
    app.store.flush()
    sockets: Any = {
        mock.Mock(): ApiKey(id=f"{number:08}", digest=f"{number}")
        for number in (*range(1200), 0, 0)  # one key has three
    }
    open_sockets_of(app).open = sockets
    open_sockets_of(app).close_ended(app.store.ended_digests)
    yield "the background"
    yield post(f"{KEYS}/{made.id}/successor", grace="in 5 minutes")
    yield post(f"{KEYS}/{made.id}/revoke")
    for name, _ in commands:
        yield f"the command {name}"


def test_no_command_shows_a_secret_or_a_key_that_has_ended(
    commands: Iterator[tuple[str, str]], owner: User
) -> None:
    """Its row is still there, with its requests."""
    with db.connection_context():
        key = ApiKey.create(
            id="HASENDED", user=owner, name="ci", type="", digest="0123456789abcdef", expires_at=1
        )
        HourlyUsage.create(hour=now() // HOUR * HOUR, key_id=key.id, requests=1)
    for name, printed in commands:
        assert key.id not in printed, f"flask {name} shows a key that has ended: ApiKey.valid()"
        assert not stored_secrets() & {*re.findall(r"[\w:$]+", printed)}, (
            f"flask {name} shows the digest of a key, or a hash"
        )


@db.connection_context()
def fill(user: User, key_id: str, numbers: range) -> None:
    """Store a row for each number in each table; what belongs to a user or key, to these."""
    known = {
        "user": user,
        "type": DEFAULT_TYPE,
        "hour": now() // HOUR * HOUR,
        "last_used_at": now(),
    }
    for table, number in product(TABLES, numbers):
        row = {
            # Some rows are changed only by the key that has made them.
            name: key_id if "key" in name and table in TABLES[3:] else known.get(name, number)
            for name, field in table._meta.fields.items()
            if name in known or not (field.null or field.default is not None)
            if not isinstance(field, AutoField)
        }
        table.insert(row).on_conflict_ignore().execute()
