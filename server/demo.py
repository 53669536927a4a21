"""The demo, `python app.py`.

It serves on http://127.0.0.1:8000; the first start creates a user and an API key, and prints them.
Settings are environment variables, for example: PORT=8001 python app.py
"""

import argparse
import logging
import os
import secrets
import socket
import sys

from peewee import OperationalError

from accounts import api_keys, users
from models import InvalidInput, User, db
from settings import PROJECT, Settings, SettingsError, load
from storage.database import transaction

log = logging.getLogger(__name__)


def main() -> None:
    """Become gunicorn, which serves the same app on this machine only."""
    argparse.ArgumentParser(usage="[PORT=8000] python app.py", description=__doc__).parse_args()
    os.chdir(PROJECT)  # where gunicorn.conf.py is
    settings = load()
    refuse_used_port(settings.port)
    os.environ["SECRET_KEY"] = settings.secret_key or secrets.token_hex()
    # gunicorn reads this variable, too; an empty one would end it with a traceback.
    os.environ["WEB_CONCURRENCY"] = str(settings.web_concurrency)
    command = f"-m gunicorn --bind 127.0.0.1:{settings.port} app:create_app(is_demo=True)"
    os.execv(sys.executable, [sys.executable, *command.split()])


def refuse_used_port(port: int) -> None:
    """Raises SettingsError if the port cannot be used; gunicorn would try for five seconds."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        other = port + 1 if 1024 <= port < 65_535 else 8000  # below 1024, a user may not listen
        raise SettingsError(
            f"PORT: {port} on 127.0.0.1: {os.strerror(error.errno or 0)}; "
            f"is the service running already? If not, try PORT={other}"
        ) from None


def welcome(settings: Settings) -> None:
    """On an empty database, create a user with a key, and print how to use them.

    If they cannot be printed, nothing is created. If there are users, say how to get in again.
    """
    try:
        with db.connection_context():
            if User.select().exists():
                return log.info(
                    "Forgotten the password or the key? "
                    ".venv/bin/flask user password demo, .venv/bin/flask key create demo NAME"
                    if users.find_user("demo")
                    else "To create a user: .venv/bin/flask user create USERNAME EMAIL"
                )
        if not sys.stdout:
            raise OSError("standard output is closed")
        password = secrets.token_urlsafe(12)
        password_hash = users.hash_password(password)
        with transaction(), open(sys.stdout.fileno(), "w", closefd=False) as output:
            user = users.create("demo", "demo@example.com", password_hash)
            _, key = api_keys.create_key(user, "demo")
            text = (PROJECT / "server" / "welcome.txt").read_text()
            address = f"127.0.0.1:{settings.port}{settings.script_name}"
            output.write(text.format(address=address, password=password, key=key))
    except (InvalidInput, OSError, OperationalError) as error:
        log.warning("skipped the demo user: %s", error)
