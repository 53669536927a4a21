"""usage: python app.py

Serves the demo on http://127.0.0.1:8000; the first start makes a user and an API key, and prints
them. Settings are environment variables, for example: PORT=8001 python app.py
Both this and `flask run` become gunicorn, with the same promises.
"""

import os
import secrets
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

import click
import flask.cli
from click.core import ParameterSource
from flask.helpers import get_debug_flag

import accounts
import auth
import models
import settings
from cli import print_secret
from models import User, database
from settings import Settings, SettingsError

BACKLOG = 4096
WELCOME = settings.HERE / "server" / "welcome.txt"


def main() -> None:
    """The demo: on an empty database make a user with a key, then serve."""
    if arguments := sys.argv[1:]:
        print(__doc__)
        raise SystemExit(0 if arguments in (["-h"], ["--help"]) else 2)
    config = settings.load()
    if config.platform:
        raise SettingsError(f"{config.platform} is set: on a platform, start `gunicorn` instead")
    settings.raise_file_limit()  # what may fail comes before a secret is printed
    replace_by_gunicorn("127.0.0.1", config, is_demo=True)


def replace_flask_run() -> None:
    """Serve in place of `flask run`, which would save no counts, and log the keys in URLs."""
    context = click.get_current_context(silent=True)
    if not context or context.command is not flask.cli.run_command:
        return
    source = context.get_parameter_source
    given = {name for name in context.params if source(name) != ParameterSource.DEFAULT}
    if get_debug_flag() or given - {"host", "port"}:
        raise click.ClickException("only --host and --port work here: it is not Flask's server")
    if "port" in given:
        os.environ["PORT"] = str(context.params["port"])
    replace_by_gunicorn(context.params["host"], settings.load())


def replace_by_gunicorn(host: str, config: Settings, is_demo: bool = False) -> NoReturn:
    """Take the port, then become gunicorn, which takes the listening socket over.

    A stop waits until `when_ready` in gunicorn.conf.py can obey it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})
    listener = listen(host, config.port)
    listener.set_inheritable(True)
    os.environ["SECRET_KEY"] = config.secret_key or secrets.token_hex()
    os.environ["WEB_CONCURRENCY"] = str(config.web_concurrency)  # gunicorn takes no empty one
    os.chdir(settings.HERE)
    if is_demo:
        welcome(config)
    bind = ["--bind", f"fd://{listener.fileno()}"]
    os.execv(sys.executable, [sys.executable, "-m", "gunicorn", *bind])


def listen(host: str, port: int) -> socket.socket:
    """Raises SettingsError if the port is in use."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # without the address again
        raise SettingsError(f"PORT: {port} on {host}: {reason}; try PORT={port + 1}") from None


def welcome(config: Settings) -> None:
    """On an empty database make a user with a key, and print them; if that fails, neither."""
    models.init(config)
    database.obj.timeout = models.COMMAND_SECONDS
    url, password = f"http://127.0.0.1:{config.port}", secrets.token_urlsafe(12)
    try:  # of two processes that start at once, one makes the user
        with suppress(accounts.Invalid), database.connection_context(), database.atomic():
            if not User.select().exists():
                user = accounts.create("demo", "demo@example.com", password)
                _, key = auth.create_key(user, "demo", "production")
                print_secret(WELCOME.read_text().format(url=url, password=password, key=key))
    finally:
        database.close_all()  # or SQLite's -wal file would stay
