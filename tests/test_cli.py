"""Administration: what each command does, prints, and refuses in one line."""

import contextlib
import json
import os
import re
import secrets
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from flask import Flask
from flask.testing import FlaskClient, FlaskCliRunner

import accounts
import app as service
import models
from conftest import NewKey
from models import ApiKey, User
from serving import clean_environment
from settings import HERE, Settings
from web import people

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
def test_line_end_is_not_part_of_the_password(cli: FlaskCliRunner, end: str) -> None:
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
def test_user_create_refuses_wrong_fields(
    cli: FlaskCliRunner, arguments: tuple[str, str], password: str, message: str
) -> None:
    assert refused(create_user(cli, *arguments, input=f"{password}\n")).startswith(message)
    assert stored_user("ada") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ADA", "bob@example.com"), "username: This is already taken."),
        (("bob", "ADA@example.com"), "email: This is already taken."),
    ],
)
def test_user_create_refuses_taken_names(
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


def test_user_list_as_json_is_one_array(cli: FlaskCliRunner, ada: User) -> None:
    (row,) = json.loads(done(cli.invoke(args=["user", "list", "--json"])))
    assert re.fullmatch(SECONDS, row.pop("created_at"))
    assert row == {"id": ada.id, "username": "ada", "email": "ada@example.com"}


@pytest.mark.parametrize("kind", ["user", "key"])
def test_json_of_nothing_is_an_empty_array(cli: FlaskCliRunner, kind: str) -> None:
    assert json.loads(done(cli.invoke(args=[kind, "list", "--json"]))) == []


def set_password(cli: FlaskCliRunner, name: str, password: str = PASSWORD) -> Result:
    return cli.invoke(args=["user", "password", name, "--password-stdin"], input=f"{password}\n")


@pytest.mark.parametrize("name", ["ada", "ADA", "ada@example.com"])
def test_user_password_sets_the_password(cli: FlaskCliRunner, ada: User, name: str) -> None:
    assert done(set_password(cli, name)) == ""
    assert accounts.verify_password(stored_user("ada"), PASSWORD)


def test_user_password_asks_twice(cli: FlaskCliRunner, ada: User) -> None:
    result = cli.invoke(args=["user", "password", "ada"], input=f"{PASSWORD}\n{PASSWORD}\n")
    assert (result.exit_code, PASSWORD in result.output) == (0, False)
    assert accounts.verify_password(stored_user("ada"), PASSWORD)


def test_user_password_ends_the_sessions(
    cli: FlaskCliRunner, client: FlaskClient, ada: User
) -> None:
    with client.session_transaction() as session:
        session.update(user=ada.id, mark=people.mark(ada))
    assert client.get("/settings/profile").status_code == 200
    done(set_password(cli, "ada"))
    assert client.get("/settings/profile").location.startswith("/log-in")


def test_user_password_refuses_a_short_one(cli: FlaskCliRunner, ada: User) -> None:
    message = refused(set_password(cli, "ada", "short"))
    assert message == "password: Use 10 to 256 characters."
    found = stored_user("ada")
    assert found
    assert found.password_hash == ada.password_hash


def test_user_delete_takes_the_keys_along(app: Flask, cli: FlaskCliRunner, new_key: NewKey) -> None:
    key = new_key()
    assert done(cli.invoke(args=["user", "delete", "ada"])) == ""
    assert (stored_user("ada"), stored_keys()) == (None, 0)
    assert app.extensions["guard"].find(key) is None


@pytest.mark.parametrize("command", ["password", "delete"])
def test_unknown_user_cannot_be_changed(cli: FlaskCliRunner, ada: User, command: str) -> None:
    assert refused(cli.invoke(args=["user", command, "bob"])) == "There is no user 'bob'."


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
def test_key_create_refuses_wrong_arguments(
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
    assert refused(result) == "name: You have 25 keys, the maximum."


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90d", 90 * 86_400), ("24h", 86_400), ("15m", 900), ("5s", 5), ("99999d", 99_999 * 86_400)],
)
def test_key_create_sets_the_end(cli: FlaskCliRunner, ada: User, text: str, seconds: int) -> None:
    before = models.now()
    key = done(create_key(cli, "ada", "ci", "--type", "production", "--expires", text))
    assert before <= stored_key(key[8:16]).expires_at - seconds <= models.now()


@pytest.mark.parametrize("command", ["create --expires", "rotate --grace"])
@pytest.mark.parametrize(
    "text", ["", "90", "d", "-1d", "1.5d", "1w", "1 d", "1d2h", "1D", "\u0661d", "999999d"]
)
def test_wrong_duration_is_refused(cli: FlaskCliRunner, key: str, command: str, text: str) -> None:
    name, option = command.split()
    arguments = {"create": ["ada", "ci", "--type", "production"], "rotate": [key[8:16]]}[name]
    result = cli.invoke(args=["key", name, *arguments, option, text])
    assert (result.exit_code, result.stdout, stored_keys()) == (2, "", 1)
    assert f"Invalid value for '{option}'" in result.stderr


# Rotating keys


def test_key_rotate_prints_the_successor_alone(
    app: Flask, cli: FlaskCliRunner, new_key: NewKey
) -> None:
    key = new_key(name="my ci", tier="pro")
    printed = done(cli.invoke(args=["key", "rotate", key[8:16]]))
    found = app.extensions["guard"].find(printed.rstrip("\n"))
    assert found
    assert (found.name, found.tier) == ("my ci", "pro")


@pytest.mark.parametrize(
    ("grace", "seconds"), [([], 86_400), (["--grace", "5s"], 5), (["--grace", "0"], 0)]
)
def test_rotated_key_ends_after_the_grace(
    cli: FlaskCliRunner, key: str, grace: list[str], seconds: int
) -> None:
    before = models.now()
    done(cli.invoke(args=["key", "rotate", key[8:16], *grace]))
    assert before <= stored_key(key[8:16]).expires_at - seconds <= models.now()


def test_expired_key_cannot_be_rotated(cli: FlaskCliRunner, key: str) -> None:
    done(cli.invoke(args=["key", "rotate", key[8:16], "--grace", "0"]))
    result = cli.invoke(args=["key", "rotate", key[8:16]])
    assert refused(result) == "There is no live key with this ID."
    assert stored_keys() == 2


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


def test_key_list_shows_that_a_rotated_key_has_ended(cli: FlaskCliRunner, key: str) -> None:
    done(cli.invoke(args=["key", "rotate", key[8:16], "--grace", "0"]))
    states = {row[0]: row[5] for row in rows(done(cli.invoke(args=["key", "list"])))}
    assert states.pop(key[8:16]) == "revoked"
    assert list(states.values()) == ["live"]


def test_key_list_as_json_is_one_array(cli: FlaskCliRunner, new_key: NewKey) -> None:
    key = new_key(name="my ci \u00e4", tier="pro")
    with models.database.connection_context():
        ApiKey.update(expires_at=4_102_444_800).execute()
    printed = done(cli.invoke(args=["key", "list", "ada", "--json"]))
    assert key[17:] not in printed
    assert json.loads(printed) == [
        {
            "id": key[8:16],
            "username": "ada",
            "name": "my ci \u00e4",
            "type": "production",
            "tier": "pro",
            "state": "live",
            "last_used_at": None,
            "expires_at": "2100-01-01T00:00:00Z",
        }
    ]


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


@pytest.mark.parametrize("command", ["revoke", "tier", "rotate"])
@pytest.mark.parametrize("which", ["unknown", "revoked", "the whole key"])
def test_only_a_live_key_can_be_changed(
    cli: FlaskCliRunner, key: str, command: str, which: str
) -> None:
    key_id = {"unknown": "nobody's", "revoked": key[8:16], "the whole key": key}[which]
    if which == "revoked":
        done(cli.invoke(args=["key", "revoke", key_id]))
    arguments = [key_id, "pro"] if command == "tier" else [key_id]
    message = refused(cli.invoke(args=["key", command, *arguments]))
    assert message == "There is no live key with this ID."
    assert stored_keys() == 1


@pytest.mark.parametrize("command", [["key", "list"], ["key", "revoke"]])
def test_bytes_that_are_no_utf_8_are_refused_in_one_line(
    cli: FlaskCliRunner, command: list[str]
) -> None:
    assert "utf-8" in refused(cli.invoke(args=[*command, "\udcff"]))
    create = ["user", "create", "ada", "ada@example.com", "--password-stdin"]
    assert "utf-8" in refused(cli.invoke(args=create, input=b"pass\xe4word1234\n"))


def test_empty_user_name_does_not_list_all_keys(cli: FlaskCliRunner, key: str) -> None:
    assert refused(cli.invoke(args=["key", "list", ""])) == "There is no user ''."


def test_a_locked_database_is_one_line(cli: FlaskCliRunner, config: Settings, ada: User) -> None:
    with contextlib.closing(sqlite3.connect(config.sqlite, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        message = refused(create_key(cli, ada.username, "ci", "--type", "production"))
    assert message == "DATABASE_URL: database is locked"


def test_a_full_disk_is_one_line(
    config: Settings, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.database.close_all()
    limits = {"journal_mode": "wal", "max_page_count": 1}  # so no more than there are already
    monkeypatch.setitem(models.SQLITE_OPTIONS, "pragmas", limits)
    cli = service.create_app(config).test_cli_runner()
    results = [create_key(cli, "ada", "x" * 64, "--type", "production") for _ in range(25)]
    message = refused(next(result for result in results if result.exit_code))
    assert message == "DATABASE_URL: database or disk is full"


PLACES = {
    "user": "key list KEY",
    "user of a new key": "key create KEY ci --type production",
    "user to delete": "user delete KEY",
    "id": "key revoke KEY",
    "type": "key create ada ci --type KEY",
    "tier": "key tier ID KEY",
    "tier of a new key": "key create ada ci --type production --tier KEY",
    "expires": "key create ada ci --type production --expires KEY",
    "grace": "key rotate ID --grace KEY",
    "one argument more": "key revoke ID KEY",
    "command": "key KEY",
}


@pytest.mark.parametrize("command", PLACES.values(), ids=PLACES)
def test_a_key_in_the_wrong_place_is_not_repeated(
    cli: FlaskCliRunner, key: str, command: str
) -> None:
    arguments = command.replace("KEY", key).replace("ID", key[8:16]).split()
    result = cli.invoke(args=arguments)
    assert (result.exit_code > 0, result.stdout) == (True, "")
    assert key not in result.stderr
    assert key[17:] not in result.stderr


# Real processes


class Shell:
    """Runs commands in processes of their own on one database."""

    def __init__(self, config: Settings) -> None:
        self.url = f"sqlite:///{config.sqlite}"

    def flask(
        self, *arguments: str, redirect: str = "", cwd: Path = HERE
    ) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "flask", *arguments]
        return subprocess.run(
            ["sh", "-c", f'exec "$@" {redirect}', "sh", *command],
            cwd=cwd,
            env=clean_environment(DATABASE_URL=self.url, PYTHONUNBUFFERED=""),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )


@pytest.fixture
def shell(config: Settings) -> Shell:
    return Shell(config)


@pytest.mark.parametrize("options", [["--password-stdin"], []])
def test_password_from_closed_input_is_one_line(shell: Shell, options: list[str]) -> None:
    create = ["user", "create", "ada", "ada@example.com", *options]
    result = shell.flask(*create, redirect="<&-")
    message = "standard input is closed, so there is no password to read"
    assert (result.returncode, result.stderr) == (1, f"Error: {message}\n")


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full"])
@pytest.mark.parametrize("command", ["create", "rotate"])
def test_key_that_cannot_be_printed_is_not_stored(
    shell: Shell, key: str, redirect: str, command: str
) -> None:
    create = ["create", "ada", "ci", "--type", "production"]
    arguments = create if command == "create" else ["rotate", key[8:16]]
    result = shell.flask("key", *arguments, redirect=redirect)
    message = "the key cannot be printed, so it was not created"
    assert (result.returncode, result.stderr) == (1, f"{message}\n")
    assert (stored_keys(), stored_key(key[8:16]).expires_at) == (1, None)


@pytest.mark.parametrize("target", ["app", str(HERE / "app.py"), str(HERE / "app")])
def test_commands_from_any_folder_use_the_same_database(
    shell: Shell, ada: User, tmp_path: Path, target: str
) -> None:
    shell.url = f"sqlite:///{os.path.relpath(tmp_path, HERE)}/test.db"
    cwd = HERE if target == "app" else tmp_path
    result = shell.flask("--app", target, "user", "list", cwd=cwd)
    assert (result.returncode, result.stdout.split("\t")[1:2]) == (0, ["ada"]), result.stderr


def test_commands_print_no_traceback_for_wrong_settings(shell: Shell) -> None:
    shell.url = "nonsense"
    result = shell.flask("user", "list")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert result.stderr.startswith("DATABASE_URL: must be ")
