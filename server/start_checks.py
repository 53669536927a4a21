"""What a start checks and prepares, before anything is served."""

import signal
import sys
from importlib.util import find_spec

if sys.argv[0].endswith("app.py"):  # Ctrl-C ends the demo's start without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
# An older Python must be able to parse this file and app.py.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(f"Python 3.10 or later is needed; this is {sys.version.split()[0]}.")
if not all(map(find_spec, ["flask", "flask_sock", "gevent", "gunicorn", "peewee"])):
    sys.exit("Packages are missing: run the commands at the top of README.md.")

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

import click
import flask.cli

from settings import HERE, SettingsError

TRIES = 30  # in 3 s, for which a start waits for another service on the same file to stop


def refuse_other_servers() -> None:
    """Raises SystemExit under `flask run`, and under gunicorn without gunicorn.conf.py.

    They would save no counts and send no ticks.
    """
    if "gunicorn.arbiter" in sys.modules and "server.worker" not in sys.modules:
        file = HERE / "gunicorn.conf.py"
        print(f"gunicorn needs its settings: --config {file}", file=sys.stderr)
        raise SystemExit(4)  # with this status of a worker, gunicorn ends
    context = click.get_current_context(silent=True)
    if context and context.command is flask.cli.run_command:
        raise SettingsError(
            "`flask run` cannot serve this app: run `python app.py`, or, to reload changed files, "
            "`GUNICORN_CMD_ARGS=--reload python app.py`"
        )


def lock_database(file: Path) -> None:
    """Raises SettingsError if another service uses this SQLite file, which would double all limits.

    The lock is on a file beside it: to close a second descriptor of the database would end SQLite's
    own locks. Worker processes inherit the descriptor, and the lock ends with the last of them.
    """
    path = f"{file.resolve()}-lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:  # it belongs to another user, for example
        reason = f"{error.strerror}; if no service is running, delete it"
        raise SettingsError(f"DATABASE_URL: {path}: {reason}") from None
    for _ in range(TRIES):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.1)
    advice = "stop it, or start this one with DATABASE_URL=sqlite:///other.db"
    raise SettingsError(f"DATABASE_URL: {file}: another service uses this file; {advice}")
