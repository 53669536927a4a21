"""Administration from a shell: `flask user ...` and `flask key ...`."""

import sys
from typing import Any

import click
from flask import Flask, current_app
from flask.cli import AppGroup
from peewee import DatabaseError

import accounts
import auth
import clock
import models
from models import ApiKey, User, database


class Commands(AppGroup):
    """Commands with a connection to the database, that fail in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with database.connection_context():
                return super().invoke(ctx)
        except DatabaseError as error:
            raise click.ClickException(f"DATABASE_URL: {error}") from None
        except (accounts.Invalid, UnicodeError) as error:
            raise click.ClickException(str(error)) from None


users = Commands("user", help="Create and list users.")
keys = Commands("key", help="Create, list, change and revoke API keys.")


def register(app: Flask) -> None:
    app.cli.add_command(users)
    app.cli.add_command(keys)


@users.command("create")
@click.argument("username")
@click.argument("email")
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input.")
def create_user(username: str, email: str, password_stdin: bool) -> None:
    """Create a user; the password is asked for."""
    if password_stdin:
        password = sys.stdin.readline().rstrip("\r\n")
    else:
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True)
    accounts.create(username, email, password)


@users.command("list")
def list_users() -> None:
    """List users: id, name, email, created."""
    for user in User.select().order_by(User.id):
        print_row(user.id, user.username, user.email, clock.date_time(user.created_at))


@keys.command("create")
@click.argument("username")
@click.argument("name")
@click.option("--type", type=click.Choice(list(models.PREFIXES)), required=True)
@click.option("--tier", default="free", show_default=True)
def create_key(username: str, name: str, type: str, tier: str) -> None:
    """Create a key and print it, alone and once."""
    print_row(auth.create_key(find_user(username), name, type, known(tier))[1])


@keys.command("list")
@click.argument("username", required=False)
def list_keys(username: str | None) -> None:
    """List keys: id, owner, name, type, tier, state, last used."""
    query = ApiKey.select(ApiKey, User).join(User).order_by(User.id, ApiKey.created_at)
    if username is not None:
        query = query.where(ApiKey.user == find_user(username))
    for key in query:
        state = "revoked" if key.revoked_at else "live"
        last = clock.date_time(key.last_used_at) if key.last_used_at else "never"
        print_row(key.id, key.user.username, key.name, key.type, key.tier, state, last)


@keys.command("tier")
@click.argument("key_id", metavar="ID")
@click.argument("tier")
def set_tier(key_id: str, tier: str) -> None:
    """Give a key another tier; a running server notices within two seconds."""
    change(key_id, tier=known(tier))


@keys.command("revoke")
@click.argument("key_id", metavar="ID")
def revoke_key(key_id: str) -> None:
    """Revoke a key for good; a running server notices within two seconds."""
    change(key_id, revoked_at=models.now())


def change(key_id: str, **changes: object) -> None:
    if not models.change_key(key_id, **changes):
        raise click.ClickException("There is no live key with this ID.")  # it may be a whole key


def print_row(*columns: object) -> None:
    click.echo("\t".join(map(str, columns)))


def find_user(username: str) -> User:
    user = accounts.find(username)
    if user is None:
        raise click.ClickException(f"There is no user {username!r}.")
    return user


def known(tier: str) -> str:
    tiers = current_app.extensions["settings"].quotas
    if tier not in tiers:
        raise click.ClickException(f"RATE_LIMITS has no tier {tier!r}, only {', '.join(tiers)}.")
    return tier
