"""The first checks of a start: which Python, which packages, which server.

server/lifecycle.py has those of the settings, the options of gunicorn, and the database.
"""

import sys
from importlib.util import find_spec

from server import signals

if sys.argv[0].endswith("app.py"):
    signals.end_silently()
# An older Python must be able to parse this file, app.py and signals.py.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(f"Python 3.10 or later is needed; this is {sys.version.split()[0]}.")
if not all(map(find_spec, ["flask", "flask_sock", "gevent", "gunicorn", "peewee"])):
    sys.exit("Packages are missing: run the commands at the top of README.md.")

import click
import flask.cli

from settings import HERE, SettingsError


def require_our_gunicorn() -> None:
    """Raises SystemExit under `flask run`, and under gunicorn without gunicorn.conf.py.

    They would save no counts and close no sockets.
    """
    if "gunicorn.arbiter" in sys.modules and "server.worker" not in sys.modules:
        file = HERE / "gunicorn.conf.py"
        print(f"gunicorn needs its settings: --config {file}", file=sys.stderr)
        raise SystemExit(4)  # with this status of a worker, gunicorn ends
    context = click.get_current_context(silent=True)
    if context and context.command is flask.cli.run_command:
        raise SettingsError(
            "`flask run` cannot serve this app: run `.venv/bin/python app.py`, or, to reload "
            "changed files, `GUNICORN_CMD_ARGS=--reload .venv/bin/python app.py`"
        )
