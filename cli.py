"""Administration from a shell: `flask user ...`, `flask key ...` and `flask db ...`."""

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import click
from flask import Flask, current_app
from flask.cli import AppGroup
from peewee import PeeweeException

import accounts
import auth
import models
from models import ApiKey, User, database
from protocol.timestamps import date_time
from server.log import redact
from storage import copy

SECONDS = {"s": 1, "m": 60, "h": models.HOUR, "d": models.DAY}


class Commands(AppGroup):
    """Commands with a connection to the database, which fail with one line."""

    def invoke(self, ctx: click.Context) -> Any:
        database.obj.timeout = models.COMMAND_SECONDS
        try:
            with database.connection_context():
                return super().invoke(ctx)
        except PeeweeException as error:
            fail(f"DATABASE_URL: {models.reason(error)}")
        except ValueError as error:  # accounts.Invalid, UnicodeError, or of storage.copy
            fail(str(error))
        except click.ClickException as error:  # somebody may have given a key in place of an ID
            error.message = redact(error.message)  # type: ignore[misc]
            raise


users = Commands("user", help="Create, list, change and delete users.")
keys = Commands("key", help="Create, list, change, rotate and revoke API keys.")
databases = Commands("db", help="Move from SQLite to PostgreSQL.")
password_stdin = click.option("--password-stdin", is_flag=True, help="Read it from standard input.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")


def register(app: Flask) -> None:
    for commands in (users, keys, databases):
        app.cli.add_command(commands)


def duration(text: str) -> int:
    """The seconds of `90d`, `24h`, `15m`, `5s` or `0`."""
    found = re.fullmatch("([0-9]{1,5})([smhd])|0", text)
    if not found:
        raise click.BadParameter("use a number and a unit, like 90d, 24h, 15m or 5s")
    return int(found[1] or 0) * SECONDS[found[2] or "s"]


@users.command("create")
@click.argument("username")
@click.argument("email")
@password_stdin
def create_user(username: str, email: str, password_stdin: bool) -> None:
    """Create a user; the password is asked for."""
    accounts.create(username, email, read_password(password_stdin))


@users.command("list")
@as_json
def list_users(as_json: bool) -> None:
    """List users: id, name, email, created."""
    columns = (User.id, User.username, User.email, User.created_at)
    print_rows(User.select(*columns).order_by(User.id).dicts(), as_json)


@users.command("password")
@click.argument("username")
@password_stdin
def set_password(username: str, password_stdin: bool) -> None:
    """Set a user's password, and end all sessions of this user."""
    user, password = user_named(username), read_password(password_stdin)
    accounts.check(password=password)
    user.password_hash = accounts.hash_password(password)
    accounts.save(user)


@users.command("delete")
@click.argument("username")
def delete_user(username: str) -> None:
    """Delete a user with all keys; a running server notices within two seconds."""
    accounts.delete(user_named(username))


@keys.command("create")
@click.argument("username")
@click.argument("name")
@click.option("--type", type=click.Choice(list(models.PREFIXES)), required=True)
@click.option("--tier", default="free", show_default=True)
@click.option("--expires", type=duration, help="For example 90d; never, if not given.")
def create_key(username: str, name: str, type: str, tier: str, expires: int | None) -> None:
    """Create a key and print it, alone and once."""
    end = None if expires is None else models.now() + expires
    with database.atomic():
        print_secret(auth.create_key(user_named(username), name, type, known(tier), end)[1])


@keys.command("rotate")
@click.argument("key_id", metavar="ID")
@click.option("--grace", default="24h", type=duration, show_default=True)
def rotate_key(key_id: str, grace: int) -> None:
    """Create a successor and print it; the old key ends after the grace."""
    with database.atomic():
        print_secret(auth.rotate_key(live_key(key_id), grace)[1])


@keys.command("list")
@click.argument("username", required=False)
@as_json
def list_keys(username: str | None, as_json: bool) -> None:
    """List keys: id, owner, name, type, tier, state, last used; as JSON, also the end."""
    query = ApiKey.select(ApiKey, User.username).join(User).order_by(User.id, ApiKey.created_at)
    if username is not None:
        query = query.where(ApiKey.user == user_named(username))
    names = ["id", "username", "name", "type", "tier", "state", "last_used_at", "expires_at"]
    shown = names if as_json else names[:-1]
    print_rows([{name: getattr(key, name) for name in shown} for key in query.objects()], as_json)


@keys.command("tier")
@click.argument("key_id", metavar="ID")
@click.argument("tier")
def set_tier(key_id: str, tier: str) -> None:
    """Give a key another tier; a running server notices within two seconds."""
    models.change_key(live_key(key_id).id, tier=known(tier))


@keys.command("revoke")
@click.argument("key_id", metavar="ID")
def revoke_key(key_id: str) -> None:
    """Revoke a key for good; a running server notices within two seconds."""
    models.revoke_key(live_key(key_id).id)


@databases.command("copy")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def copy_database(file: Path) -> None:
    """Copy a SQLite file into the empty PostgreSQL database of DATABASE_URL.

    Stop the service first, or the counts of its last second are not in the file.
    """
    for table, rows in copy.copy(file, database.obj, models.TABLES).items():
        click.echo(f"{table}: {rows} rows")


def read_password(from_stdin: bool) -> str:
    source = sys.stdin or fail("standard input is closed, so there is no password to read")
    if from_stdin:
        return source.readline().rstrip("\r\n")
    return str(click.prompt("Password", hide_input=True, confirmation_prompt=True))


def print_secret(text: str) -> None:
    """Print it, or end the program, so that the caller's transaction stores nothing."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except (AttributeError, OSError):  # stdout is None when it is closed
        if sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        raise SystemExit("the key cannot be printed, so it was not created") from None


def print_rows(rows: Iterable[dict[str, Any]], as_json: bool) -> None:
    """Print rows with tabs or as JSON; times, whose names end in `_at`, in ISO 8601."""
    rows = [
        {name: date_time(x) if x and name.endswith("_at") else x for name, x in row.items()}
        for row in rows
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo("\t".join("never" if x is None else str(x) for x in row.values()))


def user_named(username: str) -> User:
    return accounts.find(username) or fail(f"There is no user {username!r}.")


def live_key(key_id: str) -> ApiKey:
    key: ApiKey | None = ApiKey.get_or_none(ApiKey.id == key_id, ApiKey.live())
    return key or fail("There is no live key with this ID.")


def known(tier: str) -> str:
    tiers = current_app.extensions["settings"].quotas
    if tier not in tiers:
        fail(f"RATE_LIMITS has no tier {tier!r}, only {', '.join(tiers)}.")
    return tier


def fail(message: str) -> NoReturn:
    raise click.ClickException(message)
