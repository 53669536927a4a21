"""The start from a terminal: `python app.py` and `flask run` become the production server."""

import os
import secrets
import socket
import sys

import click
import flask.cli
from click.core import ParameterSource
from flask.helpers import get_debug_flag

import accounts
import auth
import models
import settings
from models import User

BACKLOG = 4096
HELP = """usage: python app.py
Serves the demo on http://127.0.0.1:8000; the first start makes a user and an API key, and prints
them. Settings are environment variables, for example: PORT=8001 python app.py"""
WELCOME = settings.HERE / "server" / "welcome.txt"


def main() -> None:
    """The demo: on an empty database make a user with a key, then serve."""
    if arguments := sys.argv[1:]:
        print(HELP)
        raise SystemExit(0 if arguments in (["-h"], ["--help"]) else 2)
    config = settings.load()
    if config.platform:
        raise settings.SettingsError(
            f"{config.platform} is set: on a platform, start `gunicorn`, not `python app.py`"
        )
    settings.raise_file_limit()  # what may fail comes before a secret is printed
    listener = listen("127.0.0.1", config.port)
    models.init(config)
    with models.database.connection_context():
        if not User.select().exists():
            welcome(f"http://127.0.0.1:{config.port}")
    serve(listener)


def replace_flask_run(port: int) -> None:
    """Serve in place of `flask run`, which would save no counts, and log the keys in URLs."""
    context = click.get_current_context(silent=True)
    if not context or context.command is not flask.cli.run_command:
        return
    source = context.get_parameter_source
    given = {name for name in context.params if source(name) != ParameterSource.DEFAULT}
    if get_debug_flag() or given - {"host", "port"}:
        message = "only --host and --port are supported: this is not Flask's server"
        raise click.ClickException(message)
    if "port" in given:
        port = settings.load({**os.environ, "PORT": str(context.params["port"])}).port
    serve(listen(context.params["host"], port))


def listen(host: str, port: int) -> socket.socket:
    """Take the port; raises SettingsError if it is in use."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        hint = f"choose another, for example PORT={port + 1}"
        reason = str(error.strerror).partition(" (")[0]  # without the address again
        raise settings.SettingsError(f"PORT: {port} on {host}: {reason}; {hint}") from None


def welcome(url: str) -> None:
    password = secrets.token_urlsafe(12)
    try:
        user = accounts.create("demo", "demo@example.com", password)
    except accounts.Invalid:
        return  # another process was first, and prints its key
    _, key = auth.create_key(user, "demo", "production")
    print(WELCOME.read_text().format(url=url, password=password, key=key), flush=True)


def serve(listener: socket.socket) -> None:
    """Replace this process by gunicorn, which takes the listening socket over."""
    os.environ["SECRET_KEY"] = settings.load().secret_key or secrets.token_hex()
    listener.set_inheritable(True)
    bind = ["--bind", f"fd://{listener.fileno()}"]
    os.chdir(settings.HERE)
    os.execv(sys.executable, [sys.executable, "-m", "gunicorn", *bind])
