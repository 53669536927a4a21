"""Refuse servers that cannot serve the application: they would save no counts."""

import sys

import click
import flask.cli

from settings import HERE, SettingsError


def require_our_gunicorn() -> None:
    """Raises SystemExit under `flask run`, and under gunicorn without gunicorn.conf.py."""
    # gunicorn.conf.py imports server.lifecycle, and this app does not.
    if "gunicorn.arbiter" in sys.modules and "server.lifecycle" not in sys.modules:
        file = HERE / "gunicorn.conf.py"
        click.echo(f"gunicorn needs its settings: --config {file}", err=True)
        raise SystemExit(4)  # with this status of a worker, gunicorn ends
    context = click.get_current_context(silent=True)
    if context and context.command is flask.cli.run_command:
        raise SettingsError("`flask run` cannot serve this app: run `.venv/bin/python app.py`")
