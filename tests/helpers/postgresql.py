"""A PostgreSQL server of our own for tests, in a temporary directory and on a free port."""

import os
import secrets
import shutil
import signal
import socket
import socketserver
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partialmethod
from pathlib import Path
from typing import Any

import psycopg
import pytest

from helpers.load import Load, Reply, refused
from helpers.server import (
    POSTGRESQL,
    eventually,
    find_program,
    free_port,
    listens,
    patience,
    serving,
)

OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",  # a test survives the end of a server, not the end of the machine
    "log_min_messages": "fatal",
}


class Cluster(AbstractContextManager["Cluster"]):
    """A running server with its data; root runs it as the user `postgres`, as it refuses root."""

    def __init__(
        self, primary: "Cluster | None" = None, options: dict[str, str] | None = None
    ) -> None:
        """A new server, or one that follows the `primary` until `pg_promote` is called."""
        self._settings = OPTIONS | (options or {})
        self._binaries = Path(find_program("initdb")).resolve().parent
        self.port = free_port()
        self.password: str = primary.password if primary else secrets.token_hex()
        self._directory = Path(tempfile.mkdtemp(prefix="pg-"))
        self._options: dict[str, Any] = {"cwd": self._directory}
        if os.getuid() == 0:
            self._options |= {"user": "postgres", "group": "postgres", "extra_groups": []}
            shutil.chown(self._directory, "postgres", "postgres")
        if primary:
            command = [str(self._binaries / "pg_basebackup"), "-D", "data", "-R", "-c", "fast"]
            subprocess.run([*command, "-d", primary.url()], check=True, **self._options)
            return
        file = self._directory / "password"
        file.write_text(self.password)
        file.chmod(0o644)  # in a directory that is for its owner only
        host = "trust" if options else "scram-sha-256"  # the nodes of a CitusCluster connect
        command = [
            *(str(self._binaries / "initdb"), "-D", "data", "-U", "demo", "--no-sync"),
            *("--auth-local=trust", f"--auth-host={host}", f"--pwfile={file}"),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **self._options)

    @contextmanager
    def pooled(self, **defaults: str) -> Iterator[str]:
        """A new database behind a PgBouncer, which runs each transaction in one of two sessions."""
        port = free_port()
        file = self._directory / "pgbouncer.ini"
        file.write_text(
            f"""[databases]
            * = host=127.0.0.1 port={self.port} user=demo password={self.password}
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {port}
            auth_type = any
            pool_mode = transaction
            default_pool_size = 2
            unix_socket_dir =""".replace("  ", "")
        )
        with subprocess.Popen(
            [find_program("pgbouncer"), "-q", str(file)], stderr=-3, **self._options
        ) as process:
            try:
                eventually(lambda: listens("127.0.0.1", port), what="PgBouncer starts")
                yield self.new_database(**defaults).replace(f":{self.port}/", f":{port}/")
            finally:
                process.kill()

    @contextmanager
    def far_away(self, seconds: float) -> Iterator[str]:
        """A new database by way of a network on which whatever is sent takes these seconds."""

        def carry(source: socket.socket, target: socket.socket) -> None:
            with suppress(OSError):
                while data := source.recv(65_536):
                    time.sleep(seconds)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        class Relay(socketserver.BaseRequestHandler):
            def handle(this) -> None:
                with socket.create_connection(("127.0.0.1", self.port)) as server:
                    threading.Thread(target=carry, args=(server, this.request)).start()
                    carry(this.request, server)

        with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay)) as relay:
            yield self.new_database().replace(f":{self.port}/", f":{relay.server_address[1]}/")

    def start(self) -> "Cluster":
        options = [part for option in self._settings.items() for part in ("-c", "=".join(option))]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self._binaries / "postgres"),
                    *("-D", "data", "-k", str(self._directory), "-p", str(self.port)),
                    *options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self._options,
            )
        eventually(self._answers, 20, "PostgreSQL starts")
        return self

    def stop(self) -> None:
        """As at a restart of the server: its clients are cut off."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=20)

    def freeze(self, number: signal.Signals = signal.SIGSTOP) -> None:
        """Stop all its processes; the kernel goes on accepting connections and data for them."""
        pid = self._process.pid
        os.kill(pid, number)  # first, so that a frozen one makes no more children
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(int(child), number)

    thaw = partialmethod(freeze, signal.SIGCONT)

    def replies_through(self, outage: str, load: Load) -> list[Reply]:
        """All replies to a load, from before an outage (the name of a method) until after it."""
        eventually(lambda: len(load.replies) > 200, what="200 requests are answered")
        getattr(self, outage)()
        eventually(lambda: refused(load.replies) > 100, 10, f"100 are refused in a {outage}")
        self.thaw() if outage == "freeze" else self.start()
        back = time.monotonic()
        eventually(
            lambda: load.statuses(max(back, time.monotonic() - 0.5)) == {200},
            patience(5),
            "all requests are served again: does get_connection give each connection back?",
        )
        return load.stop()

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self.thaw()
            self._process.send_signal(signal.SIGQUIT)  # every process ends at once
            self._process.wait(timeout=20)
        shutil.rmtree(self._directory)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://demo:{self.password}@127.0.0.1:{self.port}/{database}"

    def new_database(self, options: str = "", **defaults: str) -> str:
        """A database that is made with these options, and gives its sessions these settings."""
        name = f"test_{secrets.token_hex(4)}"
        self.query(self.url(), f"CREATE DATABASE {name} {options}")
        for setting, value in defaults.items():
            self.query(self.url(), f"ALTER DATABASE {name} SET {setting} = '{value}'")
        return self.url(name)

    @staticmethod
    def query(url: str, sql: str, *values: object) -> list[Any]:
        """The rows, if there are any; each statement is a transaction of its own."""
        with closing(psycopg.connect(url, autocommit=True, connect_timeout=5)) as connection:
            cursor = connection.execute(sql.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self._directory / "log").read_text()
        with suppress(psycopg.OperationalError):
            return bool(self.query(self.url(), "SELECT 1"))
        return False


class CitusCluster(ExitStack):
    """A coordinator and two nodes that hold the rows, each a server of its own."""

    def __init__(self) -> None:
        super().__init__()
        if not any(POSTGRESQL.glob("*/lib/citus.so")):
            pytest.skip("Citus is not installed")
        options = {"shared_preload_libraries": "citus", "citus.node_conninfo": "sslmode=disable"}
        self.all = [self.enter_context(Cluster(options=options)).start() for _ in range(3)]
        self.coordinator, *self.nodes = self.all

    def new_database(self) -> str:
        name = f"test_{secrets.token_hex(4)}"
        for server in self.all:
            server.query(server.url(), f"CREATE DATABASE {name}")
            server.query(server.url(name), "CREATE EXTENSION citus")
        url = self.coordinator.url(name)
        Cluster.query(
            url, "SELECT citus_set_coordinator_host('127.0.0.1', %s)", self.coordinator.port
        )
        for node in self.nodes:
            Cluster.query(url, "SELECT citus_add_node('127.0.0.1', %s)", node.port)
        return url
