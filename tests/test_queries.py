"""With many rows, every query is a search."""

import logging
import re
import secrets
import sqlite3
from contextlib import closing

import pytest

import accounts
import api_keys
import models
from models import ApiKey
from paths import PROFILE, SECURITY
from server.lifecycle import flush
from service import Service
from settings import Settings
from storage.sqlite import SAVE, SAVE_HOUR
from test_cors import ENDPOINTS

NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {})"
USERS, KEYS = NUMBERS.format(1000), NUMBERS.format(20_000)
FILL = [
    f"""INSERT INTO user (id, username, email, password_hash, created_at)
    {USERS} SELECT i, 'user' || i, 'user' || i, '', 0 FROM n""",
    f"""INSERT INTO api_key (id, user_id, name, type, digest, created_at, expires_at)
    {KEYS} SELECT 10000000 + i, i % 1000 + 1, 'k', 'production', '', 0, 9000000000 FROM n""",
    f"INSERT INTO hourly_usage {USERS} SELECT i, 'a', 1 FROM n",
]
# What an index finds: a row, the rows of a user, an hour of a key; what is old.
ROW = {"id=?", "rowid=?", "<expr>=?", "hour=? AND key_id=?"}
FEW = {"user_id=?", "hour=?", "hour<?", "expires_at<?"}


@pytest.mark.parametrize("analyzed", [False, True])
def test_no_query_of_pages_commands_and_background_scans(
    app: Service, config: Settings, caplog: pytest.LogCaptureFixture, analyzed: bool
) -> None:
    with models.database.connection_context():
        for statement in FILL:
            models.database.execute_sql(statement)
    caplog.set_level(logging.DEBUG, "peewee")
    with closing(sqlite3.connect(config.database_url)) as other:
        if analyzed:
            other.execute("ANALYZE")
        walk(app)
        asked = [record.msg for record in caplog.records if isinstance(record.msg, tuple)]
        queries = {sql: values or () for sql, values in asked if "sqlite_master" not in sql}
        queries[SAVE] = (None,) * SAVE.count("?")
        queries[SAVE_HOUR] = ("", "", "")  # peewee does not make or log these two
        steps = {
            (sql, row[3])
            for sql, values in queries.items()
            if re.match("SELECT|INSERT|UPDATE|DELETE", sql)
            for row in other.execute(f"EXPLAIN QUERY PLAN {sql}", values)
        }
    assert len(queries) >= 30
    assert max(map(len, queries.values())) <= 999, "more than SQLite allows before 3.32"
    assert not [step for step in steps if re.match("SCAN (?!CONSTANT)", step[1])]
    conditions = {step.rpartition("(")[2].rstrip(")") for _, step in steps if "SEARCH" in step}
    assert conditions <= ROW | FEW


def walk(app: Service) -> None:
    """Everything that pages, the API, a sync and commands do, but lists of all rows."""
    password, run = secrets.token_urlsafe(), app.test_cli_runner().invoke
    with app.app_context():

        def command(line: str) -> None:
            result = run(args=line.split(), input=password)
            assert result.exit_code == 0, result.output

        command("user create bob bob@example.com --password-stdin")
        bob, _ = new_key("bob")  # `key create` and `key rotate` write to the terminal itself
        for line in ("key list bob", f"key tier {bob} pro"):
            command(line)
        for line in (f"key revoke {bob}", "user password bob --password-stdin", "user delete bob"):
            command(line)
    browser = app.test_client()
    ada, security = {"username": "ada", "email": "ada@example.com"}, SECURITY

    def post(path: str, **form: str) -> None:
        assert browser.post(path, data=form).status_code in (200, 303)

    post("/sign-up", password=password, **ada)
    post("/log-out")
    post("/log-in", password=password, username="ada")
    post(PROFILE, **ada)
    post(f"{security}/password", current=password, password=password)
    post(f"{security}/keys", name="ci", type="production", expires="never")
    key_id, key = new_key("ada")
    path = f"{security}/keys/{key_id}"
    for page in ("/", "/settings", security, f"{path}/rotate"):
        assert browser.get(page).status_code == 200
    for asked in ENDPOINTS:
        assert browser.get(asked, headers={"X-API-Key": key}).status_code == 200
    post(f"{path}/successor", grace="in 5 minutes")
    post(f"{path}/revoke")
    flush(app)
    keys = [ApiKey(id=f"{number:08}", digest=f"{number}") for number in range(1200)]
    assert len(app.store.ended(keys)) == 1200


def new_key(username: str) -> tuple[str, str]:
    user = accounts.find_user(username)
    assert user
    row, key = api_keys.create_key(user, "ci", "production")
    return row.id, key
