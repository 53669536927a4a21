"""Compare GET /api/v1/protected/test on SQLite with PostgreSQL, with one worker and with more.

    python benchmarks/postgres.py [--rounds 7] [--seconds 3] [--citus]

Needs requirements-dev.txt, wrk, and PostgreSQL's binaries; it starts a PostgreSQL of its own. With
--citus it compares one server of PostgreSQL with a Citus cluster instead, and needs that extension.
Nothing is pinned to a core: the service, PostgreSQL and the load share the machine. All servers
stay up; they are measured in turn, round after round, and the medians count.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path

BENCHMARKS = Path(__file__).parent
sys.path[:0] = [str(BENCHMARKS.parent / "tests"), str(BENCHMARKS.parent)]

from postgresql import CitusCluster, Cluster  # noqa: E402
from serving import Server  # noqa: E402
from settings import load  # noqa: E402
from storage.database import create_tables  # noqa: E402

HERTZ = os.sysconf("SC_CLK_TCK")
DISTRIBUTE = re.findall(  # as docs/growing.md says
    r"SELECT create_\w+_table\([^;]*\)", (BENCHMARKS.parent / "docs" / "growing.md").read_text()
)
LIMIT = "free=1000000000/day"


class Case:
    """One server under one load: requests a second, p50 and p99 in ms, processor time in µs."""

    def __init__(
        self, name: str, server: Server, keys: Path, connections: int, *databases: Cluster
    ) -> None:
        self.name, self.connections, self.keys = name, connections, keys
        self.server, (self.first, *self.nodes) = server, databases
        self.rounds = list[list[float]]()

    def measure(self, seconds: int) -> list[float]:
        url = f"{self.server.url}/api/v1/protected/test"
        load = ["wrk", "-t1", f"-c{self.connections}", f"-d{seconds}s"]
        environ = {**os.environ, "KEYS": str(self.keys)}
        before = self.processor_times()
        output = subprocess.run(
            [*load, "-s", str(BENCHMARKS / "wrk.lua"), url],
            env=environ,
            check=True,
            capture_output=True,
        )
        after = self.processor_times()
        line = output.stdout.decode().split("figures")[1]
        rate, p50, p99, requests, errors = map(float, line.split())
        if errors:
            print(f"{self.name}: {errors:.0f} of {requests:.0f} failed", file=sys.stderr)
        spent = [1e6 * (b - a) / requests for a, b in zip(before, after, strict=True)]
        return [rate, p50, p99, *spent]

    def processor_times(self) -> tuple[float, float, float]:
        """In seconds: of the service, of PostgreSQL or the coordinator, and of the nodes."""
        nodes = sum(seconds_of(node.pid) for node in self.nodes)
        return seconds_of(self.server.pid), seconds_of(self.first.pid), nodes

    def medians(self) -> list[float]:
        return [statistics.median(column) for column in zip(*self.rounds, strict=True)]


def seconds_of(pid: int) -> float:
    """The processor time of a process and its children, also of those that have ended."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ticks = 0
    for process in [str(pid), *children]:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            stat = Path(f"/proc/{process}/stat").read_text()
            ticks += sum(map(int, stat.rsplit(")")[1].split()[11:15]))
    return ticks / HERTZ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=int, default=3, help="of each round and case")
    parser.add_argument("--citus", action="store_true", help="compare with a Citus cluster")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    if options.citus:
        return compare_with_citus(options.rounds, options.seconds)
    cluster = Cluster()
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as folder:

        def start(workers: int) -> tuple[Server, Path, Path]:
            """A server; 0 workers: one on SQLite. With files of one key, and of twenty."""
            postgres = {"DATABASE_URL": cluster.new_database(), "WEB_CONCURRENCY": str(workers)}
            place = Path(folder, str(workers))
            server = Server(place, RATE_LIMITS=LIMIT, **(postgres if workers else {}))
            servers.append(server.start())
            keys = [server.new_key() for _ in range(20 if workers in (1, 2) else 1)]
            (place / "one").write_text(keys[0])
            (place / "many").write_text("\n".join(keys))
            return server, place / "one", place / "many"

        try:
            cluster.start()
            sqlite, one, two, four = map(start, (0, 1, 2, 4))
            cases = [
                Case("SQLite, 1 worker, 32 connections", sqlite[0], sqlite[1], 32, cluster),
                Case("PostgreSQL, 1 worker, 32 connections", one[0], one[1], 32, cluster),
                Case("PostgreSQL, 2 workers, 32 connections", two[0], two[1], 32, cluster),
                Case("PostgreSQL, 1 worker, 32 connections, 20 keys", one[0], one[2], 32, cluster),
                Case("PostgreSQL, 2 workers, 64 connections", two[0], two[1], 64, cluster),
                Case("PostgreSQL, 2 workers, 64 connections, 20 keys", two[0], two[2], 64, cluster),
                Case("PostgreSQL, 4 workers, 64 connections", four[0], four[1], 64, cluster),
                Case("SQLite, 1 worker, 1 connection", sqlite[0], sqlite[1], 1, cluster),
                Case("PostgreSQL, 1 worker, 1 connection", one[0], one[1], 1, cluster),
            ]
            measure(cases, options.rounds, options.seconds)
            report(cases)
        finally:
            for server in servers:
                server.close()
            time.sleep(0.5)
            cluster.close()


def measure(cases: list[Case], rounds: int, seconds: int) -> None:
    for number in range(rounds + 1):
        for case in cases:
            figures = case.measure(seconds)
            if number:  # the first round warms up
                case.rounds.append(figures)


def compare_with_citus(rounds: int, seconds: int) -> None:
    """The same load of 20 and of 2,000 keys, with 32 connections and one worker each."""
    with closing(CitusCluster()) as citus, tempfile.TemporaryDirectory() as folder:
        cases, servers = list[Case](), list[Server]()
        plain = citus.nodes[0].new_database()  # a database of its own, not distributed
        try:
            for name, url in (("one server", plain), ("Citus", citus.new_database())):
                create_tables(load({"DATABASE_URL": url}))
                server = Server(Path(folder, name), DATABASE_URL=url, RATE_LIMITS=LIMIT)
                servers.append(server)
                if name == "Citus":
                    for sql in DISTRIBUTE:
                        Cluster.query(url, sql)
                databases = [citus.nodes[0]] if url == plain else citus.all
                server.start()
                keys = [server.new_key() for _ in range(2000)]
                for count in (20, 2000):
                    file = Path(folder, name, str(count))
                    file.write_text("\n".join(keys[:count]))
                    cases.append(Case(f"{name}, {count} keys", server, file, 32, *databases))
            measure(cases, rounds, seconds)
            print(f"{'':48} requests/s   p50 ms   p99 ms   CPU µs  coordinator   nodes")
            for case in cases:
                print_line(case)
        finally:
            for server in servers:
                server.close()


def print_line(case: Case) -> None:
    rate, p50, p99, service, first, nodes = case.medians()
    times = f"{service:8.0f} {first:8.0f} {nodes:11.0f}"
    print(f"{case.name:48} {rate:10.0f} {p50:8.1f} {p99:8.1f} {times}")


def report(cases: list[Case]) -> None:
    print(f"{'':48} requests/s   p50 ms   p99 ms   CPU µs   of PostgreSQL")
    for case in cases:
        rate, p50, p99, service, postgres, _ = case.medians()
        print(f"{case.name:48} {rate:10.0f} {p50:8.1f} {p99:8.1f} {service:8.0f} {postgres:8.0f}")
    rate, time = ratio(cases[1], cases[0], 0), [ratio(cases[n], cases[1], 3) for n in (2, 4)]
    print(f"One worker on PostgreSQL makes {rate:.2f} of SQLite's requests a second.")
    many, one = ratio(cases[3], cases[0], 3), ratio(cases[1], cases[0], 3)
    print(f"Its processor time per request is {one:.2f} of SQLite's, with 20 keys {many:.2f}.")
    print("Two workers' processor time per request, of one worker's at 32 connections:")
    print(f"{time[0]:.2f} at 32, {time[1]:.2f} at 64 connections.")


def ratio(case: Case, other: Case, column: int) -> float:
    """The median of the ratios in each round, as the machine's other load changes."""
    pairs = zip(case.rounds, other.rounds, strict=True)
    return statistics.median(mine[column] / others[column] for mine, others in pairs)


if __name__ == "__main__":
    main()
