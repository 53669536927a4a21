"""Administration: what each command does, prints, and refuses in one line."""

import contextlib
import os
import secrets
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import Result
from flask import Flask
from flask.testing import FlaskClient, FlaskCliRunner

import accounts
import auth
import cli as commands
import models
from models import ApiKey, User
from serving import clean_environment
from settings import HERE, Settings
from storage import database

PASSWORD = secrets.token_urlsafe()
NO_KEY = "There is no live key with this ID."


@pytest.fixture
def cli(app: Flask) -> Iterator[FlaskCliRunner]:
    """Runs commands in this process, and in the context that `flask` makes."""
    with app.app_context():
        yield app.test_cli_runner()


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


def create_user(runner: FlaskCliRunner, *arguments: str, input: str = f"{PASSWORD}\n") -> Result:
    return runner.invoke(args=["user", "create", *arguments, "--password-stdin"], input=input)


def stored(key: str) -> ApiKey:
    with models.database.connection_context():
        row: ApiKey = ApiKey.get_by_id(key[8:16])
    return row


def count() -> int:
    with models.database.connection_context():
        keys: int = ApiKey.select().count()
    return keys


# Users


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_user_is_created_with_the_password_from_stdin(cli: FlaskCliRunner, end: str) -> None:
    assert done(create_user(cli, "ada", "ada@example.com", input=f" {PASSWORD} {end}")) == ""
    assert accounts.verify_password(accounts.find("ada"), f" {PASSWORD} ")


def test_password_is_asked_for_twice_and_hidden(cli: FlaskCliRunner) -> None:
    arguments = ["user", "create", "ada", "ada@example.com"]
    for repeated, status in (("mistyped", 1), (PASSWORD, 0)):
        result = cli.invoke(args=arguments, input=f"{PASSWORD}\n{repeated}\n")
        assert (result.exit_code, PASSWORD in result.output) == (status, False)
        assert bool(accounts.find("ada")) == (status == 0)


def test_new_password_ends_all_sessions(cli: FlaskCliRunner, client: FlaskClient) -> None:
    accounts.create("ada", "ada@example.com", "the old password")
    client.post("/log-in", data={"username": "ada", "password": "the old password"})
    assert client.get("/settings/profile").status_code == 200
    arguments = ["user", "password", "ADA", "--password-stdin"]
    assert done(cli.invoke(args=arguments, input=f"{PASSWORD}\n")) == ""
    assert accounts.verify_password(accounts.find("ada"), PASSWORD)
    assert client.get("/settings/profile").location.startswith("/log-in")


@pytest.mark.usefixtures("ada")
@pytest.mark.parametrize(
    "command",
    ["user password bob", "user delete bob", "key list bob", "key create bob ci"],
)
def test_unknown_user_is_one_line(cli: FlaskCliRunner, command: str) -> None:
    assert refused(cli.invoke(args=command.split())) == "There is no user 'bob'."


# Lists


def test_lists_have_all_columns_and_no_secret(cli: FlaskCliRunner, ada: User, key: str) -> None:
    successor = auth.rotate_key(stored(key))[1]
    with models.database.connection_context():
        User.update(created_at=1).execute()
        ended = {"revoked_at": 3, "last_used_at": 2, "total": 7, "name": "my ci"}
        ApiKey.update(created_at=1, expires_at=5, rotated_at=4, **ended).where(
            ApiKey.id == key[8:16]
        ).execute()
    assert done(cli.invoke(args=["user", "list"])).splitlines() == [
        "\t".join([str(ada.id), "ada", "ada@example.com", "1970-01-01T00:00:01Z"])
    ]
    printed = done(cli.invoke(args=["key", "list"]))
    rows = [
        dict(zip(commands.KEY_COLUMNS, line.split("\t"), strict=True))
        for line in printed.splitlines()
    ]
    assert rows[0] == {
        "id": key[8:16],
        "username": "ada",
        "name": "my ci",
        "type": "production",
        "tier": "free",
        "state": "revoked",
        "created_at": "1970-01-01T00:00:01Z",
        "last_used_at": "1970-01-01T00:00:02Z",
        "expires_at": "1970-01-01T00:00:05Z",
        "rotated_at": "1970-01-01T00:00:04Z",
        "revoked_at": "1970-01-01T00:00:03Z",
        "total": "7",
    }
    assert (rows[1]["id"], rows[1]["state"]) == (successor[8:16], "live")
    assert [rows[1][name] for name in ("last_used_at", "expires_at")] == ["never", "never"]
    assert not any(secret[17:] in printed for secret in (key, successor))
    accounts.create("bob", "bob@example.com", PASSWORD)
    lists = [done(cli.invoke(args=["key", "list", name])) for name in ("Ada", "bob")]
    assert lists == [printed, ""]


def test_list_has_a_header_on_a_terminal(shell: "Shell", key: str) -> None:
    in_a_terminal = "import pty, sys; pty.spawn([sys.executable, '-m', 'flask', 'key', 'list'])"
    printed = shell.run(sys.executable, "-c", in_a_terminal).stdout
    header, row = printed.splitlines()
    assert (header, row[:8]) == ("\t".join(commands.KEY_COLUMNS), key[8:16])


# Keys


@pytest.fixture
def print_key(cli: FlaskCliRunner, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that writes a key, to the descriptor of standard output itself."""

    def run(*arguments: str) -> str:
        cli.app.cli.main(["key", *arguments], standalone_mode=False)
        return capfd.readouterr().out

    return run


@pytest.mark.parametrize(
    ("options", "type", "tier", "lifetime"),
    [
        ([], "production", "free", None),
        (["--type", "development", "--tier", "pro"], "development", "pro", None),
        (["--expires", "90d"], "production", "free", 90 * 86_400),
    ],
)
def test_created_key_is_printed_alone(
    print_key: Callable[..., str],
    ada: User,
    options: list[str],
    type: str,
    tier: str,
    lifetime: int | None,
) -> None:
    printed = print_key("create", "ADA", "my ci", *options)
    key, row = printed.removesuffix("\n"), stored(printed)
    assert row.digest == auth.digest(key)
    assert (row.user_id, row.name, row.type, row.tier) == (ada.id, "my ci", type, tier)
    assert (row.expires_at and row.expires_at - row.created_at) == lifetime


@pytest.mark.parametrize(("grace", "seconds"), [([], 86_400), (["--grace", "5s"], 5)])
def test_successor_is_printed_alone_and_the_old_key_ends_after_the_grace(
    print_key: Callable[..., str], key: str, grace: list[str], seconds: int
) -> None:
    printed = print_key("rotate", key[8:16], *grace)
    assert stored(printed).digest == auth.digest(printed.removesuffix("\n"))
    old = stored(key)
    assert old.expires_at - old.rotated_at == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("5s", 5), ("15m", 900), ("24h", 86_400), ("99999d", 99_999 * 86_400)],
)
def test_duration_is_a_number_with_a_unit(text: str, seconds: int) -> None:
    assert commands.duration(text) == seconds
    for wrong in ("", "90", "d", "-1d", "1.5d", "1w", "1 d", "1d2h", "1D", "\u0661d", "999999d"):
        with pytest.raises(click.BadParameter):
            commands.duration(wrong)


def test_tier_is_changed_to_one_that_is_listed(cli: FlaskCliRunner, key: str) -> None:
    assert done(cli.invoke(args=["key", "tier", key[8:16], "pro"])) == ""
    assert "no tier 'gold'" in refused(cli.invoke(args=["key", "tier", key[8:16], "gold"]))
    assert stored(key).tier == "pro"


def test_revoked_key_is_bad_for_good(app: Flask, cli: FlaskCliRunner, key: str) -> None:
    assert done(cli.invoke(args=["key", "revoke", key[8:16]])) == ""
    assert app.extensions["guard"].find(key) is None
    assert refused(cli.invoke(args=["key", "revoke", key[8:16]])) == NO_KEY


@pytest.mark.parametrize("command", ["revoke ID", "tier ID pro", "rotate ID"])
def test_only_a_live_key_can_be_changed(cli: FlaskCliRunner, key: str, command: str) -> None:
    with models.database.connection_context():
        auth.change_key(key[8:16], expires_at=1)
    for key_id in ("nobody's", key[8:16], key):
        arguments = [part.replace("ID", key_id) for part in command.split()]
        assert refused(cli.invoke(args=["key", *arguments])) == NO_KEY
    assert count() == 1


# What goes wrong


@pytest.mark.parametrize("arguments", [["key", "list", "\udcff"], ["key", "revoke", "\udcff"]])
def test_bytes_that_are_not_utf_8_are_one_line(cli: FlaskCliRunner, arguments: list[str]) -> None:
    assert "utf-8" in refused(cli.invoke(args=arguments))


@pytest.mark.usefixtures("key")
def test_locked_database_is_one_line(
    cli: FlaskCliRunner, config: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "COMMAND_SECONDS", 0.1)
    with contextlib.closing(sqlite3.connect(config.database_url, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        result = cli.invoke(args=["key", "list"])
    assert result.exit_code == 1
    assert result.output == f"DATABASE_URL: {config.database_url}: database is locked\n"


class Shell:
    """Runs commands in processes of their own on one database."""

    def __init__(self, config: Settings) -> None:
        self.url = f"sqlite:///{config.database_url}"

    def run(self, *command: str, cwd: Path = HERE) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            cwd=cwd,
            env=clean_environment(DATABASE_URL=self.url, PYTHONUNBUFFERED=""),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def flask(
        self, *arguments: str, redirect: str = "", cwd: Path = HERE
    ) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "flask", *arguments]
        return self.run("sh", "-c", f'exec "$@" {redirect}', "sh", *command, cwd=cwd)


@pytest.fixture
def shell(config: Settings) -> Shell:
    return Shell(config)


@pytest.mark.parametrize(
    ("command", "redirect"), [("create ada ci", ">&-"), ("rotate ID", ">/dev/full")]
)
def test_key_that_cannot_be_printed_is_not_made(
    shell: Shell, key: str, command: str, redirect: str
) -> None:
    result = shell.flask("key", *command.replace("ID", key[8:16]).split(), redirect=redirect)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "the key cannot be printed, so it was not created" in result.stderr
    assert (count(), stored(key).expires_at) == (1, None)


@pytest.mark.usefixtures("ada")
def test_command_from_any_folder_uses_the_same_database(shell: Shell, tmp_path: Path) -> None:
    shell.url = f"sqlite:///{os.path.relpath(tmp_path, HERE)}/test.db"
    result = shell.flask("--app", str(HERE / "app.py"), "user", "list", cwd=tmp_path)
    assert (result.returncode, result.stdout.split("\t")[1:2]) == (0, ["ada"]), result.stderr
