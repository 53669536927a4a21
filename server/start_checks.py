"""Refuse, at the start, options of gunicorn that could break a promise."""

import sys

from settings import Settings, SettingsError

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
