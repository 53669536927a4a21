"""What a start does before it opens the database: it reads `.env`, and locks the SQLite file."""

import fcntl
import logging
import os
import time
from pathlib import Path

import flask.cli
from flask.helpers import get_load_dotenv

from settings import HERE, SettingsError

log = logging.getLogger(__name__)

LOCK_SECONDS = 6  # how long a start waits for another service on the same file to stop


def read_dotenv() -> None:
    """Read `.env` as the `flask` command does, where python-dotenv is installed.

    Otherwise the service and the commands might use different databases.
    """
    os.chdir(HERE)
    if get_load_dotenv():
        flask.cli.load_dotenv()


def lock(file: Path) -> None:
    """Raises SettingsError if another service uses this SQLite file, which would double all limits.

    The lock is on a file beside it: to close a second descriptor of the database would end SQLite's
    own locks. Worker processes inherit the descriptor, and the lock ends with the last of them.
    """
    path, deadline = f"{file.resolve()}-lock", time.monotonic() + LOCK_SECONDS
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    reason = "another service uses this file; stop that one, or use another file"
                    raise SettingsError(f"DATABASE_URL: {file}: {reason}") from None
            time.sleep(0.1)
    except OSError as error:  # a network drive may have no locks
        log.warning("%s: %s; a second service would not be noticed", path, error.strerror)
