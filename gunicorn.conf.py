"""gunicorn's settings; `gunicorn` in this folder finds this file by itself.

What happens from a start to a stop is in server/lifecycle.py.
"""

import sys
from pathlib import Path

chdir = str(Path(__file__).parent)  # even when it is started from another folder
sys.path.insert(0, chdir)

from gevent import monkey

monkey.patch_all()  # before anything else is imported, in the master, too

from gunicorn.workers import SUPPORTED_WORKERS

from server import lifecycle
from server.log import RedactingLogger, protect_output
from settings import max_connections

protect_output()
settings = lifecycle.load_settings()

wsgi_app = "app:create_app()"
bind = f"0.0.0.0:{settings.port}"
SUPPORTED_WORKERS["gevent"] = "server.worker.Worker"
worker_class = "gevent"
# With SQLite, each worker would keep its own counts, and double every limit.
workers = 1 if settings.sqlite else settings.web_concurrency
logger_class = RedactingLogger
# No query and no referrer, because they may contain keys.
access_log_format = '%(h)s "%(m)s %(U)s" %(s)s %(B)s %(L)ss'
worker_connections = max_connections()  # after load_settings, which raises the limit on files
# Long enough for thousands of WebSockets that reconnect at once, and short enough for a new client
# that waits behind one that opens and closes connections in a loop.
backlog = 1024
# How many seconds a connection may be idle, and a header may take to arrive. Routers keep
# connections open for up to 90 s.
keepalive = 100 if settings.proxy_hops else 5
# The master kills a worker that takes longer to stop. A stop takes less than 5 s, but more on a
# machine that is busy. Workers give their requests less: GRACEFUL_SECONDS.
graceful_timeout = 20
control_socket_disable = True  # two services of the same user would share one socket
http_parser = "python"  # "auto" takes a less strict one where that is installed
forwarder_headers = ""
secure_scheme_headers: dict[str, str] = {}
# Only PROXY_HOPS says whom to trust. "*" is safe here, because the two settings above name no
# header to believe. With a list, gunicorn would compare the address of each client.
forwarded_allow_ips = "*"

# The hooks of the master, in the order in which gunicorn calls them.
on_starting = lifecycle.prepare
when_ready = lifecycle.announce
