"""Compare GET /api/v1/protected/test on PostgreSQL, with one worker and with two, with SQLite.

It starts a PostgreSQL of its own. Nothing has a core for itself: the services, PostgreSQL and the
load share the machine. One worker is compared with SQLite, two workers and /user/me are compared
with one worker. PostgreSQL's own processor time is not counted.
"""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from servers import HERE, Case, Server, arguments, checkouts, in_turns

sys.path.insert(0, str(HERE.parent))  # which the next module needs

from helpers.paths import ME
from helpers.postgresql import Cluster


def main() -> None:
    options = arguments(__doc__, rounds=7)
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = stack.enter_context(Cluster().start())
        for name, checkout in checkouts(options).items():
            servers: list[tuple[Server, list[str]]] = []
            for kind in ("SQLite", "1", "2"):
                env = {"WEB_CONCURRENCY": kind, "DATABASE_URL": cluster.new_database()}
                env = {} if kind == "SQLite" else env
                server = Server(Path(folder, name, kind), checkout=checkout, **env)
                server.cores = "0-63"
                servers.append((server, server.make_keys(20)))
                stack.enter_context(server)
            (sqlite, key), (one, keys), (two, other) = servers
            single = Case(f"{name}, SQLite", sqlite, key[:1])
            postgres = Case(f"{name}, PostgreSQL", one, keys[:1], of=single)
            cases += [
                single,
                postgres,
                Case(f"{name}, PostgreSQL, 20 keys", one, keys, of=single),
                Case(f"{name}, PostgreSQL, 2 workers", two, other[:1], of=postgres),
                Case(f"{name}, PostgreSQL, /user/me", one, keys[:1], of=postgres, path=ME),
            ]
        in_turns(cases, options.rounds)


if __name__ == "__main__":
    main()
