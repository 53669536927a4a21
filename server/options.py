"""Which of gunicorn's options are supported; every other one is refused at the start.

A closed list, because an option that nobody has thought of, known or new, could break a promise.
docs/deploying.md describes these.
"""

import sys

from gunicorn.config import Config

from settings import Settings, SettingsError

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
    config = Config()
    for arguments in (config.get_cmd_args_from_env(), sys.argv[1:]):
        given = vars(config.parser().parse_args(arguments))
        for name in [name for name, value in given.items() if value is not None]:
            if name != "args" and name not in SUPPORTED:  # args: the application
                option = config.settings[name].cli[-1]
                raise SettingsError(
                    f"gunicorn: {option} is not supported; docs/deploying.md lists what is"
                )
        if given["worker_class"] not in (None, "gevent"):
            raise SettingsError("gunicorn: --worker-class must be gevent")
        workers = given["workers"]
        if workers is not None and not 1 <= workers <= (1 if settings.sqlite else workers):
            number = "1 with SQLite" if settings.sqlite else "1 or more"
            raise SettingsError(f"gunicorn: --workers must be {number}")
