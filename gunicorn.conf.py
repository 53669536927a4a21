"""gunicorn's settings; `gunicorn` in this folder finds this file by itself."""

import os
import signal
import subprocess
import sys

from gunicorn.arbiter import Arbiter

import settings
from server.log import Log
from server.worker import Worker, on_reload, post_fork, respect_nohup, restart_worker  # noqa: F401
from settings import SettingsError

respect_nohup()
settings.raise_file_limit()
service = settings.load()
if not service.secret_key:
    command = "python3 -c 'import secrets; print(secrets.token_hex())'"
    raise SettingsError(f"SECRET_KEY is not set; make one: {command}")

wsgi_app = "app:create_app()"
bind = f"0.0.0.0:{service.port}"
worker_class = Worker
workers = service.workers
logger_class = Log
access_log_format = '%(h)s "%(m)s %(U)s" %(s)s %(B)s %(L)ss'  # no query and no referrer: no keys
# More than there can be WebSockets, because all others have to wait; fewer than open files.
worker_connections = min(service.max_sockets + 1000, settings.file_limit() - 64)
backlog = 4096  # thousands of WebSockets may reconnect at once
keepalive = 100 if service.proxy_hops else 5  # seconds; routers keep connections up to 90 s
graceful_timeout = 5  # seconds; the worker needs less
control_socket_disable = True  # two services of one user would take each other's
http_parser = "python"  # "auto" takes a less strict one where that is installed
sendfile = False  # it would bypass the worker's way to send a response in one piece
# Only PROXY_HOPS says whom to trust; gunicorn itself takes nothing from forwarding headers.
forwarded_allow_ips, forwarder_headers = "*", ""
secure_scheme_headers: dict[str, str] = {}


def on_starting(server: Arbiter) -> None:
    """Refuse what would break the promises of SQLite mode, and a database that does not work."""
    fits = server.cfg.workers > 0 if service.postgres else server.cfg.workers == 1
    if server.cfg.worker_class != Worker or not fits:
        raise SettingsError("--worker-class cannot be set, --workers only with PostgreSQL")
    # Several workers that cannot start would end gunicorn with a traceback, so the database is
    # tried here; in a new process, because gevent's patches must come before peewee's import.
    if service.postgres:
        check = "import models, settings; models.init(settings.load())"
        if status := subprocess.run([sys.executable, "-c", check], cwd=settings.HERE).returncode:
            sys.exit(status)
    else:
        server.handle_hup = lambda: restart_worker(server)


def when_ready(server: Arbiter) -> None:
    if signal.sigpending():  # a stop, which server/launch.py has blocked until now
        sys.exit()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    server.in_terminal = os.isatty(0)
    address = ", ".join(map(str, server.LISTENERS))
    database = "PostgreSQL" if service.postgres else service.sqlite
    tiers = ", ".join(f"{q.tier} {q.limit} per {q.seconds} s" for q in service.quotas.values())
    server.log.info("serving %s, database %s, tiers: %s", address, database, tiers)
    for warning in settings.warnings(service):
        server.log.warning(warning)
