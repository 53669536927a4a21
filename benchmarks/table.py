"""Print the table of README.md: the service on SQLite and on PostgreSQL, and rivals.

No program has a core for itself: the services, a PostgreSQL that syncs its disk, and the load share
the machine. The figures are those of the round with the most requests a second, because other
programs only take some away. PostgreSQL's own processor time is beside that of the service.
"""

import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from postgres import Cluster
from rest import RIVALS
from servers import HERE, Case, Server, arguments, processor_seconds
from time_sockets import measure as measure_sockets

PROCESSES = {"SQLite|1": 0, **{f"PostgreSQL|{n}": n for n in (1, 2, 4)}}
PACKAGES = ["gunicorn", "gevent", "flask", "psycopg", "fastapi", "slowapi", "flask-limiter"]
TITLES = "| |processes|keys|requests/s|p50 ms|p99 ms|CPU µs|PostgreSQL µs|MiB|time sockets|"


def machine(cluster: Cluster) -> str:
    cpu = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].partition("\n")[0]
    ((postgres,),) = cluster.query(cluster.url(), "SHOW server_version")
    programs = {"Python": platform.python_version(), "PostgreSQL": postgres.split()[0]}
    programs |= {package: version(package) for package in PACKAGES}
    versions = ", ".join(" ".join(program) for program in programs.items())
    return f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores of {cpu}, {versions}"


def services(cluster: Cluster, folder: Path, **env: str) -> Iterator[tuple[str, Server]]:
    for name, number in PROCESSES.items():
        more = {"DATABASE_URL": cluster.new_database(), "WEB_CONCURRENCY": str(number)}
        server = Server(folder / name, checkout=HERE.parent, **env, **(more if number else {}))
        server.cores = "0-63"
        yield name, server


def cases(cluster: Cluster, folder: Path, stack: ExitStack, count: int) -> Iterator[Case]:
    """Each server with one key, and then with many."""
    servers = {name: (one, one.make_keys(count)) for name, one in services(cluster, folder)}
    sqlite, keys = servers["SQLite|1"]
    for name in ("FastAPI + slowapi + sqlite3", "Flask-Limiter + peewee"):
        database = f"{sqlite.folder}/service.db"
        rival = Server(folder / name, *RIVALS[name], checkout=HERE, DATABASE=database)
        rival.cores = "0-63"
        servers[f"{name}|1"] = rival, keys
    for name, (server, keys) in servers.items():
        stack.enter_context(server)
        yield from (Case(name, server, keys[:1]), Case(name, server, keys))


def measure(case: Case, cluster: Cluster, seconds: int = 2) -> list[float]:
    """As the case does; the last figure is PostgreSQL's processor time of a request in µs."""
    before = processor_seconds(cluster.pid)
    figures = case.measure(seconds)
    spent = processor_seconds(cluster.pid) - before
    return [*figures, 1e6 * spent / (figures[1] * seconds)]


def main() -> None:
    options = arguments(__doc__, rounds=8, keys=10_000, sockets=9000, seconds=30)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = stack.enter_context(closing(Cluster(options={"fsync": "on"}).start()))
        print(machine(cluster), TITLES, "|---" * (TITLES.count("|") - 1) + "|", sep="\n")
        limits = dict.fromkeys(["MAX_SOCKETS", "MAX_SOCKETS_PER_CALLER"], str(options.sockets))
        sockets = {
            name: measure_sockets(server, options.sockets, options.seconds).partition(";")[0]
            for name, server in services(cluster, Path(folder, "sockets"), **limits)
        }
        measured = list(cases(cluster, Path(folder), stack, options.keys))
        memory = []
        for case in measured:
            case.measure(1 + 1.2 * len(case.keys) / case.measure()[1])  # each key is used
            memory.append(case.server.memory_mib())
        for _ in range(options.rounds):
            for case in measured:
                case.rounds.append(measure(case, cluster))
        for case, mib in zip(measured, memory, strict=True):
            processor, rate, p50, p99, postgres = max(case.rounds, key=lambda figures: figures[1])
            figures = f"{rate:,.0f}|{p50:.0f}|{p99:.0f}|{processor:,.0f}"
            figures += f"|{postgres:.0f}|" if PROCESSES.get(case.name) else "||"
            cells = f"{mib:.0f}|{sockets.pop(case.name, '')}|"
            print(f"|{case.name}|{len(case.keys):,}|{figures}{cells}")


if __name__ == "__main__":
    main()
