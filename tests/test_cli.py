"""Administration: what each command does, prints, and refuses in one line."""

import contextlib
import re
import secrets
import sqlite3

import pytest
from click.testing import Result
from flask import Flask
from flask.testing import FlaskCliRunner

import accounts
import models
from conftest import NewKey
from models import ApiKey, User
from settings import Settings

SECONDS = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
PASSWORD = secrets.token_urlsafe()


def done(result: Result) -> str:
    """What a command printed that must have succeeded."""
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def refused(result: Result) -> str:
    """The one line that a command printed that must have failed."""
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip("\n")


def create_user(cli: FlaskCliRunner, *arguments: str, input: str = f"{PASSWORD}\n") -> Result:
    return cli.invoke(args=["user", "create", *arguments, "--password-stdin"], input=input)


def create_key(cli: FlaskCliRunner, *arguments: str) -> Result:
    return cli.invoke(args=["key", "create", *arguments])


def rows(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()]


def stored_user(username: str) -> User | None:
    with models.database.connection_context():
        return accounts.find(username)


def stored_key(key_id: str) -> ApiKey:
    with models.database.connection_context():
        row: ApiKey = ApiKey.get_by_id(key_id)
    return row


def stored_keys() -> int:
    with models.database.connection_context():
        count: int = ApiKey.select().count()
    return count


# Users


def test_user_create_reads_the_password_from_stdin(cli: FlaskCliRunner) -> None:
    assert done(create_user(cli, "ada", "ada@example.com")) == ""
    assert accounts.verify_password(stored_user("ada"), PASSWORD)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_line_end_is_no_part_of_the_password(cli: FlaskCliRunner, end: str) -> None:
    done(create_user(cli, "ada", "ada@example.com", input=f" {PASSWORD} {end}"))
    assert accounts.verify_password(stored_user("ada"), f" {PASSWORD} ")


def test_user_create_asks_for_the_password_twice_and_hides_it(cli: FlaskCliRunner) -> None:
    result = cli.invoke(
        args=["user", "create", "ada", "ada@example.com"], input=f"{PASSWORD}\n{PASSWORD}\n"
    )
    assert result.exit_code == 0
    assert PASSWORD not in result.output
    assert accounts.verify_password(stored_user("ada"), PASSWORD)


def test_mistyped_repetition_makes_no_user(cli: FlaskCliRunner) -> None:
    result = cli.invoke(
        args=["user", "create", "ada", "ada@example.com"], input=f"{PASSWORD}\nother\n"
    )
    assert result.exit_code == 1
    assert stored_user("ada") is None


@pytest.mark.parametrize(
    ("arguments", "password", "message"),
    [
        (("a", "ada@example.com"), "long enough", "username: Use 2 to 32 letters"),
        (("ada", "nowhere"), "long enough", "email: Enter an address like ada@example.com."),
        (("ada", "ada@example.com"), "short", "password: Use 10 to 256 characters."),
        (("ada", "ada@example.com"), "", "password: Use 10 to 256 characters."),
    ],
)
def test_user_create_refuses_what_is_wrong(
    cli: FlaskCliRunner, arguments: tuple[str, str], password: str, message: str
) -> None:
    assert refused(create_user(cli, *arguments, input=f"{password}\n")).startswith(message)
    assert stored_user("ada") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ADA", "bob@example.com"), "username: This is taken already."),
        (("bob", "ADA@example.com"), "email: This is taken already."),
    ],
)
def test_user_create_refuses_what_is_taken(
    cli: FlaskCliRunner, ada: User, arguments: tuple[str, str], message: str
) -> None:
    assert refused(create_user(cli, *arguments)) == message


def test_user_list_without_users_is_empty(cli: FlaskCliRunner) -> None:
    assert done(cli.invoke(args=["user", "list"])) == ""


def test_user_list_has_a_row_for_each(cli: FlaskCliRunner, ada: User) -> None:
    done(create_user(cli, "bob", "bob@example.com"))
    first, second = rows(done(cli.invoke(args=["user", "list"])))
    assert first[:3] == [str(ada.id), "ada", "ada@example.com"]
    assert re.fullmatch(SECONDS, first[3])
    assert second[1:3] == ["bob", "bob@example.com"]


# Creating keys


@pytest.mark.parametrize(("type", "prefix"), [("production", "live"), ("development", "test")])
def test_key_create_prints_the_key_alone(
    app: Flask, cli: FlaskCliRunner, ada: User, type: str, prefix: str
) -> None:
    printed = done(create_key(cli, "ada", "ci", "--type", type))
    assert re.fullmatch(rf"sk_{prefix}_\w{{8}}_\w{{38}}\n", printed)
    found = app.extensions["guard"].find(printed.rstrip("\n"))
    assert found
    assert (found.user_id, found.name, found.type, found.tier) == (ada.id, "ci", type, "free")


def test_key_create_gives_the_tier(cli: FlaskCliRunner, ada: User) -> None:
    key = done(create_key(cli, "ADA", "ci", "--type", "production", "--tier", "pro"))
    assert stored_key(key[8:16]).tier == "pro"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bob", "ci"), "There is no user 'bob'."),
        (("ada", ""), "name: Give the key a name of 1 to 64 printable characters."),
        (("ada", "  "), "name: Give the key a name of 1 to 64 printable characters."),
        (("ada", "a" * 65), "name: Give the key a name of 1 to 64 printable characters."),
        (("ada", "two\nlines"), "name: Give the key a name of 1 to 64 printable characters."),
        (
            ("ada", "ci", "--tier", "gold"),
            "RATE_LIMITS has no tier 'gold', only free, pro, five, blink.",
        ),
    ],
)
def test_key_create_refuses_what_is_wrong(
    cli: FlaskCliRunner, ada: User, arguments: tuple[str, ...], message: str
) -> None:
    assert refused(create_key(cli, *arguments, "--type", "production")) == message
    assert stored_keys() == 0


@pytest.mark.parametrize("arguments", [(), ("--type", "live"), ("--type", "")])
def test_key_create_wants_one_of_the_two_types(
    cli: FlaskCliRunner, ada: User, arguments: tuple[str, ...]
) -> None:
    result = create_key(cli, "ada", "ci", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--type" in result.stderr
    assert stored_keys() == 0


def test_key_create_refuses_the_twenty_sixth(
    cli: FlaskCliRunner, ada: User, new_key: NewKey
) -> None:
    for _ in range(25):
        new_key()
    result = create_key(cli, "ada", "ci", "--type", "production")
    assert refused(result) == "name: There are 25 live keys already. Revoke one first."


# Listing keys


def test_key_list_shows_everything_but_the_secret(cli: FlaskCliRunner, new_key: NewKey) -> None:
    key = new_key(name="my ci", tier="pro")
    printed = done(cli.invoke(args=["key", "list"]))
    assert rows(printed) == [[key[8:16], "ada", "my ci", "production", "pro", "live", "never"]]
    assert key[17:] not in printed


def test_key_list_shows_when_a_key_was_used(cli: FlaskCliRunner, key: str) -> None:
    with models.database.connection_context():
        ApiKey.update(last_used_at=1).execute()
    ((*_, last),) = rows(done(cli.invoke(args=["key", "list"])))
    assert last == "1970-01-01T00:00:01Z"


def test_key_list_keeps_revoked_keys(cli: FlaskCliRunner, key: str) -> None:
    done(cli.invoke(args=["key", "revoke", key[8:16]]))
    ((*_, state, _),) = rows(done(cli.invoke(args=["key", "list"])))
    assert state == "revoked"


def test_key_list_of_one_user_has_that_users_keys(cli: FlaskCliRunner, key: str) -> None:
    done(create_user(cli, "bob", "bob@example.com"))
    bobs = done(create_key(cli, "bob", "ci", "--type", "production"))
    assert [row[0] for row in rows(done(cli.invoke(args=["key", "list", "Bob"])))] == [bobs[8:16]]
    assert len(rows(done(cli.invoke(args=["key", "list"])))) == 2


def test_key_list_of_nobody_is_refused(cli: FlaskCliRunner) -> None:
    assert refused(cli.invoke(args=["key", "list", "bob"])) == "There is no user 'bob'."


# Changing keys


def test_key_tier_changes_the_tier(cli: FlaskCliRunner, key: str) -> None:
    assert done(cli.invoke(args=["key", "tier", key[8:16], "pro"])) == ""
    assert stored_key(key[8:16]).tier == "pro"


def test_key_tier_refuses_one_that_is_not_listed(cli: FlaskCliRunner, key: str) -> None:
    assert "no tier 'gold'" in refused(cli.invoke(args=["key", "tier", key[8:16], "gold"]))
    assert stored_key(key[8:16]).tier == "free"


def test_key_revoke_is_for_good(app: Flask, cli: FlaskCliRunner, key: str) -> None:
    assert done(cli.invoke(args=["key", "revoke", key[8:16]])) == ""
    assert app.extensions["guard"].find(key) is None


def test_changes_leave_their_time_for_running_servers(cli: FlaskCliRunner, key: str) -> None:
    assert stored_key(key[8:16]).changed_at is None
    done(cli.invoke(args=["key", "tier", key[8:16], "pro"]))
    assert stored_key(key[8:16]).changed_at


@pytest.mark.parametrize("command", [["revoke"], ["tier"]])
@pytest.mark.parametrize("which", ["unknown", "revoked", "the whole key"])
def test_only_a_live_key_can_be_changed(
    cli: FlaskCliRunner, key: str, command: list[str], which: str
) -> None:
    key_id = {"unknown": "nobody's", "revoked": key[8:16], "the whole key": key}[which]
    if which == "revoked":
        done(cli.invoke(args=["key", "revoke", key_id]))
    arguments = [key_id] if command == ["revoke"] else [key_id, "pro"]
    told = refused(cli.invoke(args=["key", *command, *arguments]))
    assert told == "There is no live key with this ID."


@pytest.mark.parametrize("command", [["key", "list"], ["key", "revoke"]])
def test_what_is_no_utf_8_is_refused_in_one_line(cli: FlaskCliRunner, command: list[str]) -> None:
    assert "utf-8" in refused(cli.invoke(args=[*command, "\udcff"]))
    create = ["user", "create", "ada", "ada@example.com", "--password-stdin"]
    assert "utf-8" in refused(cli.invoke(args=create, input=b"pass\xe4word1234\n"))


def test_no_user_is_not_every_user(cli: FlaskCliRunner, key: str) -> None:
    assert refused(cli.invoke(args=["key", "list", ""])) == "There is no user ''."


def test_a_locked_database_is_one_line(cli: FlaskCliRunner, config: Settings, ada: User) -> None:
    with contextlib.closing(sqlite3.connect(config.sqlite, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        told = refused(create_key(cli, ada.username, "ci", "--type", "production"))
    assert told == "DATABASE_URL: database is locked"
