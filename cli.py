"""Administration from a shell: `flask user ...`, `flask key ...`, `flask usage`, `flask backup`."""

import os
import re
import select
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, NoReturn

import click
from flask import Flask
from flask.cli import AppGroup
from peewee import JOIN, SQL, Expression, ModelSelect, PeeweeException, fn

from accounts import api_keys, users
from models import (
    DAY,
    DEFAULT_TYPE,
    HOUR,
    PREFIXES,
    ApiKey,
    HourlyUsage,
    User,
    chart_hours,
    check_fields,
    db,
    now,
)
from ratelimit import DEFAULT_TIER
from service.application import current_service
from service.timestamps import date_time
from storage.database import command_connection, prepare_database, transaction
from storage.outage import reason_of

SECONDS = {"s": 1, "m": 60, "h": HOUR, "d": DAY}
NO_FILE = (
    "If the service has never run, start it. If it uses another database, set its DATABASE_URL. If "
    'the file was moved or deleted, see "A file that is gone" in docs/operating.md.'
)
PG_DUMP = """(umask 077 && pg_dump -Fc -f "backup-$(date +%F).dump" "$DATABASE_URL")"""
KEY_COLUMNS = (
    "id",
    "username",
    "name",
    "type",
    "tier",
    "created_at",
    "last_used_at",
    "expires_at",
    "rotated_at",
    "total",
    "predecessor",
)
USAGE_COLUMNS = ("id", "username", "name", "this_hour", "last_24_hours", "total")


class Command(click.Command):
    """A command that has a connection to the database, and reports errors in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        if not sys.stdout:
            fail("standard output is closed, so nothing was done")
        settings = current_service().settings
        try:
            if settings.sqlite and not settings.sqlite.exists() and self is not create_user:
                fail(f"{settings.sqlite} does not exist. {NO_FILE}")
            prepare_database(settings)
            with command_connection(settings):
                return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click ends quietly
        except (PeeweeException, ValueError, OSError) as error:  # ValueError: InvalidInput, Changed
            fail(reason_of(error))


class Commands(AppGroup):
    command_class = Command


user_group = Commands("user", help="Create, list, change and delete users.")
key_group = Commands("key", help="Create, list, change, rotate and revoke API keys.")
password_stdin = click.option("--password-stdin", is_flag=True, help="Read it from standard input.")


def register(app: Flask) -> None:
    for command in (user_group, key_group, usage, backup):
        app.cli.add_command(command)


def duration(text: str) -> int:
    """Convert `90d`, `24h`, `15m`, `5s` or `0` to seconds."""
    found = re.fullmatch("([0-9]{1,5})([smhd])|0", text)
    if not found:
        raise click.BadParameter("use a number and a unit, like 90d, 24h, 15m or 5s")
    return int(found[1] or 0) * SECONDS[found[2] or "s"]


@user_group.command("create")
@click.argument("username")
@click.argument("email")
@password_stdin
def create_user(username: str, email: str, password_stdin: bool) -> None:
    """Create a user; asks for the password."""
    check_fields(username=username, email=email)
    users.create(username, email, users.hash_password(read_password(password_stdin)))
    say(f"User {username} was created.")


@user_group.command("list")
def list_users() -> None:
    """List all users."""
    print_rows(("id", "username", "email", "created_at"), User.select().order_by(User.id))


@user_group.command("password")
@click.argument("username")
@password_stdin
def set_password(username: str, password_stdin: bool) -> None:
    """Set a user's password, and end all sessions of this user."""
    user = user_named(username)
    users.change(user, password_hash=users.hash_password(read_password(password_stdin)))
    say(f"The password of {user.username} was changed, and all their sessions have ended.")


@user_group.command("delete")
@click.argument("username")
def delete_user(username: str) -> None:
    """Delete a user with everything in the account; a running server notices within two seconds."""
    users.delete(user := user_named(username))
    say(f"User {user.username} was deleted, with everything in the account.")


@key_group.command("create")
@click.argument("username")
@click.argument("name")
@click.option("--type", type=click.Choice(list(PREFIXES)), default=DEFAULT_TYPE)
@click.option("--tier", default=DEFAULT_TIER, show_default=True)
@click.option("--expires", type=duration, help="For example 90d; by default, never.")
def create_key(username: str, name: str, type: str, tier: str, expires: int | None) -> None:
    """Create a key and print only the key, which cannot be shown again."""
    user = user_named(username)
    tier = existing_tier(tier)
    print_key(
        lambda: api_keys.create_key(
            user, name, type, tier=tier, expires_at=None if expires is None else now() + expires
        )
    )


@key_group.command("rotate")
@click.argument("key_id", metavar="ID")
@click.option("--grace", default="24h", type=duration, show_default=True)
def rotate_key(key_id: str, grace: int) -> None:
    """Create a successor and print it; the old key stops working after the grace period."""
    key = valid_key(key_id)
    print_key(
        lambda: api_keys.rotate_key(
            key.user, key.id, grace, save_counts=current_service().store.save_to_keys
        )[1:]
    )


@key_group.command("list")
@click.argument("username", required=False)
def list_keys(username: str | None) -> None:
    """List all keys, or those of one user."""
    print_rows(
        KEY_COLUMNS,
        ApiKey.select(ApiKey, User.username)
        .join(User)
        .where(valid_keys(username))
        .order_by(User.id, ApiKey.created_at, ApiKey.id)
        .objects(),
    )


@key_group.command("tier")
@click.argument("key_id", metavar="ID")
@click.argument("tier")
def set_tier(key_id: str, tier: str) -> None:
    """Give a key another tier; a running server notices within two seconds."""
    key = valid_key(key_id)
    api_keys.change_key(key.user, key.id, tier=existing_tier(tier))
    say(f"The tier of key {key.id} is {tier}.")


@key_group.command("revoke")
@click.argument("key_id", metavar="ID")
def revoke_key(key_id: str) -> None:
    """Revoke a key for good; a running server notices within two seconds."""
    key = valid_key(key_id)
    api_keys.revoke_key(key.user, key.id, current_service().store.save_to_keys)
    say(f"Key {key.id} was revoked.")


@click.command(cls=Command)
@click.argument("username", required=False)
def usage(username: str | None) -> None:
    """List the requests of all keys, or of one user's, those with most in 24 hours first.

    They are counted for this hour (UTC), for this one and the 23 before it, and in total.
    """
    hours = chart_hours()
    requests = fn.SUM(HourlyUsage.requests)
    recent = (
        HourlyUsage.select(
            HourlyUsage.key_id,
            requests.alias("last_24_hours"),
            requests.filter(HourlyUsage.hour == hours[-1]).alias("this_hour"),
        )
        .where(HourlyUsage.hour.in_(hours))
        .group_by(HourlyUsage.key_id)
        .alias("recent")
    )
    counts = [fn.COALESCE(recent.c[name], 0).alias(name) for name in ("this_hour", "last_24_hours")]
    print_rows(
        USAGE_COLUMNS,
        ApiKey.select(ApiKey.id, User.username, ApiKey.name, *counts, ApiKey.total)
        .join(User)
        .join_from(ApiKey, recent, JOIN.LEFT_OUTER, on=(recent.c.key_id == ApiKey.id))
        .where(valid_keys(username))
        .order_by(SQL("last_24_hours").desc(), ApiKey.id)
        .objects(),
    )


@click.command(cls=Command)
@click.argument("file", type=click.Path())
def backup(file: str) -> None:
    """Copy the SQLite database to FILE, also while the service is running."""
    if not current_service().settings.sqlite:
        fail(f"with PostgreSQL, run: {PG_DUMP}")
    path = Path.cwd() / file  # an absolute path, which SQLite does not take for a URI
    # A hidden folder beside the file has the copy at first, so what a kill -9 leaves behind is not
    # mistaken for a backup.
    with TemporaryDirectory(prefix=".", suffix=".unfinished", dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        unfinished.touch(mode=0o600)  # SQLite fills an empty file, and keeps its mode
        db.execute_sql("VACUUM INTO ?", (str(unfinished),))
        if os.path.lexists(path):
            fail(f"{path} exists, and is not replaced")
        unfinished.rename(path)  # some file systems have no hard links
    say(f"The database was copied to {path}.")


def read_password(from_stdin: bool) -> str:
    if not sys.stdin:
        fail("standard input is closed, so there is no password to read")
    if from_stdin:
        return sys.stdin.buffer.readline().decode("utf-8-sig").rstrip("\r\n")  # without a BOM
    return str(
        click.prompt("Password (10 or more characters)", hide_input=True, confirmation_prompt=True)
    )


def print_key(make: Callable[[], tuple[ApiKey, str]]) -> None:
    """Make a key and print it; if it cannot be printed, nothing is changed.

    The transaction begins only when the output can take a line: a full pipe would otherwise hold
    the lock. `print` would keep what it could not write, and fail again at the exit.
    """
    select.select([], [sys.stdout], [])
    # In this order, so that the key is written before the transaction is committed.
    with transaction(), open(sys.stdout.fileno(), "w", closefd=False) as output:
        output.write(f"{make()[1]}\n")


def print_rows(columns: tuple[str, ...], query: ModelSelect) -> None:
    """Print rows with tabs, and a header on a terminal; columns named `_at` are times."""
    if os.isatty(1):
        click.echo("\t".join(columns))
    with TemporaryFile() as lines:  # all rows are read before a reader, who may pause, gets one
        for row in query.iterator():  # keeps no row in memory
            line = "\t".join(format_value(name, getattr(row, name)) for name in columns)
            lines.write(f"{line}\n".encode(sys.stdout.encoding, "backslashreplace"))
        lines.seek(0)
        for written in lines:
            click.echo(written, nl=False)


def format_value(column: str, value: Any) -> str:
    if value is None:
        return "never" if column.endswith("_at") else ""
    return date_time(value) if column.endswith("_at") else str(value)


def user_named(username: str) -> User:
    return users.find_user(username) or fail(
        f"There is no user {username!r} in {current_service().settings.sqlite or 'PostgreSQL'}. "
        "To create one: flask user create USERNAME EMAIL"
    )


def valid_keys(username: str | None) -> Expression:
    """The condition that a key is valid, and belongs to this user, if a name is given."""
    return ApiKey.valid() & (username is None or ApiKey.user == user_named(username))


def valid_key(key_id: str) -> ApiKey:
    """The valid key with this ID; a whole key, or its beginning, is accepted, too."""
    key_id = api_keys.id_in(key_id) or key_id
    query = ApiKey.select(ApiKey, User).join(User).where(ApiKey.id == key_id, ApiKey.valid())
    return query.get_or_none() or fail("There is no valid key with this ID.")


def existing_tier(tier: str) -> str:
    tiers = current_service().settings.rate_limits
    return (
        tier
        if tier in tiers
        else fail(
            f"RATE_LIMITS has no tier {tier!r}, only {', '.join(tiers)}. "
            "If the service has others, set its RATE_LIMITS for the command, too."
        )
    )


def say(message: str) -> None:
    """Say what was done, on standard error: standard output is for keys and lists."""
    click.echo(message, err=True)


def fail(message: str) -> NoReturn:
    raise click.ClickException(message)
