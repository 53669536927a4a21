"""Refuse, at the start, whatever could break a promise: gunicorn's options, and other servers."""

import sys

import click
import flask.cli

from settings import HERE, Settings, SettingsError

# A closed list, because an option that nobody has thought of, known or new, could break a promise.
# docs/deploying.md describes these.
SUPPORTED = {
    "accesslog",
    "bind",
    "check_config",
    "config",
    "errorlog",
    "loglevel",
    "pidfile",
    "preload_app",
    "print_config",
    "proc_name",
    "worker_class",
    "worker_tmp_dir",
    "workers",
}


def check_options(settings: Settings) -> None:
    """Raises SettingsError for an option that is not supported, wherever it was given.

    gunicorn calls this while it reads its settings, before it daemonizes or logs.
    """
    from gunicorn.config import Config  # here, because its import fails for a wrong WEB_CONCURRENCY

    config = Config()
    for arguments in (config.get_cmd_args_from_env(), sys.argv[1:]):
        given = vars(config.parser().parse_args(arguments))
        for name, value in given.items():
            if value is not None and name not in {*SUPPORTED, "args"}:  # args: the app
                raise SettingsError(
                    f"gunicorn: {config.settings[name].cli[-1]} is not supported; "
                    "docs/deploying.md lists what is"
                )
        if given["worker_class"] not in (None, "gevent"):
            raise SettingsError("gunicorn: --worker-class must be gevent")
        workers = given["workers"]
        if workers is not None and (workers < 1 or (settings.sqlite and workers > 1)):
            raise SettingsError(
                "gunicorn: --workers must be 1 with SQLite, and at least 1 with PostgreSQL"
            )


def require_our_gunicorn() -> None:
    """Raises SystemExit under `flask run`, and under gunicorn without gunicorn.conf.py."""
    # gunicorn.conf.py imports server.lifecycle, and this app does not.
    if "gunicorn.arbiter" in sys.modules and "server.lifecycle" not in sys.modules:
        click.echo(f"gunicorn needs its settings: --config {HERE}/gunicorn.conf.py", err=True)
        raise SystemExit(4)  # with this status of a worker, gunicorn ends
    context = click.get_current_context(silent=True)
    if context and context.command is flask.cli.run_command:
        raise SettingsError("`flask run` cannot serve this app: run `.venv/bin/python app.py`")
