"""Fixtures: `app -> client -> ...` inside this process, `server` over the wire."""

import sys
from importlib.util import find_spec

if not all(map(find_spec, ["psycopg", "pytest_randomly", "websockets", "xdist"])):
    sys.exit("Packages are missing: run .venv/bin/pip install -r requirements-dev.txt")

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from traceback import walk_stack
from typing import Any
from unittest import mock

import greenlet  # type: ignore[import-untyped]
import jinja2
import pytest
from flask import Flask, has_request_context, request
from flask.testing import FlaskClient, FlaskCliRunner
from peewee import SqliteDatabase
from werkzeug.datastructures import ImmutableMultiDict
from werkzeug.security import generate_password_hash

import settings
from accounts import api_keys, users
from app import create_app
from helpers import sample
from helpers.moment import MomentClient
from helpers.postgresql import Cluster
from helpers.server import REPOSITORY, Server
from models import User, db
from ratelimit import Limiter
from service.application import Service
from storage import sqlite
from storage.database import prepare_database
from web import forms

# Beside the defaults, tiers small enough to use up.
TIERS = "pro=10000/hour,free=1000/hour,five=5/day,once=1/day"

StartServer = Callable[..., Server]
NewKey = Callable[..., str]


in_ci = partial(pytest.param, marks=pytest.mark.ci)  # a slow case that runs with --ci only

# What runs only with an option, which is also the name of a mark.
GROUPS = {
    "ci": "what takes long or needs what few machines have: all of tests/acceptance, and more",
    "postgres": "what needs a PostgreSQL server; other tests of tests/wire run on it, too",
    "citus": "what needs a cluster of PostgreSQL servers with the extension Citus",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, what in GROUPS.items():
        parser.addoption(f"--{name}", action="store_true", help=f"run {what}")


def pytest_configure(config: pytest.Config) -> None:
    """Let the servers heed signals that nohup or a background job ignores, and start fast."""
    for name, what in GROUPS.items():
        config.addinivalue_line("markers", f"{name}: {what}")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hundreds of processes start; each would compile all modules again where this is set.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ["TZ"] = "Asia/Tokyo"  # so that a time that is not UTC's is noticed
    time.tzset()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What tests/acceptance imports is in .ci/requirements.txt."""
    return True if collection_path.name == "acceptance" and not config.getoption("ci") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = {name for name in GROUPS if config.getoption(name)}
    config.hook.pytest_deselected(items=[item for item in items if groups(item) - asked])
    items[:] = [item for item in items if not groups(item) - asked]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    for item in items if "postgres" in asked else []:
        if mark := item.get_closest_marker("one_process"):
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))


def groups(item: pytest.Item) -> set[str]:
    marks = {name for name in GROUPS if item.get_closest_marker(name)}
    return marks | {"postgres"} if "cluster" in getattr(item, "fixturenames", ()) else marks


@pytest.fixture(autouse=True)
def nothing_waits_while_sqlite_is_locked() -> Iterator[None]:
    """Other greenlets would find the file locked, or only a part of what was counted."""
    one_step = {sqlite.Store.hit.__code__, sqlite.Store.save.__code__}
    found = []

    def trace(event: str, greenlets: Any) -> None:
        stack = [frame.f_code for frame, _ in walk_stack(greenlets[0].gr_frame)]
        database = db.obj
        is_locked = isinstance(database, SqliteDatabase) and database.in_transaction()
        if is_locked or not one_step.isdisjoint(stack):
            found.append([code.co_name for code in stack])

    before = greenlet.settrace(trace)
    yield
    greenlet.settrace(before)
    assert not isinstance(socket.socket.connect, mock.Mock), (
        "requests of several greenlets restored each other's patches: use FlaskClient"
    )
    assert not found, "a greenlet waits in a transaction, `hit` or `save`: do this before, or after"


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> settings.Settings:
    """The settings; a test that is parametrized by them may change some.

    Tests that use `with_sample` have the largest limit that an operator may set; with --postgres,
    they store in PostgreSQL.
    """
    usual = {
        "DATABASE_URL": f"sqlite:///{tmp_path}/test.db",
        "SECRET_KEY": secrets.token_hex(),
        "RATE_LIMITS": TIERS,
    }
    if "with_sample" in request.fixturenames:
        usual |= request.getfixturevalue("storage")() | {
            "RATE_LIMITS": TIERS.replace("free=1000", f"free={'9' * 12}")
        }
    return settings.load(usual | getattr(request, "param", {}))


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> jinja2.BytecodeCache:
    """The compiled templates: each app would compile them again."""
    return jinja2.FileSystemBytecodeCache(str(tmp_path_factory.mktemp("templates")))


@pytest.fixture
def app(
    config: settings.Settings, templates: jinja2.BytecodeCache, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Service]:
    # Real hashes of a low cost: one of the full cost takes 50 ms, and test_accounts.py has them.
    cheap = partial(generate_password_hash, method="scrypt:128:8:1")
    monkeypatch.setattr(users, "generate_password_hash", cheap)
    monkeypatch.setattr(users, "UNMATCHABLE_HASH", cheap("known to nobody"))
    monkeypatch.setattr(forms, "BUCKETS", 10**12)  # so that no two names share one by chance
    prepare_database(config)
    made = create_app(config)
    connections = db.obj  # a command uses another one
    made.jinja_env.bytecode_cache = templates
    made.test_client_class = MomentClient
    made.testing = True  # some tests are WSGI servers themselves
    started = time.time()
    made.extensions["throttles"] = Limiter(lambda: started)  # no minute turns in a test
    yield made
    made.store.save_and_close()
    connections.close_all()


@pytest.fixture
def with_sample(app: Service) -> Iterator[None]:
    """The service has the endpoints and the table of tests/helpers/sample.py, too."""
    with sample.added(app):
        yield


@pytest.fixture
def read(app: Flask, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the parameters, and of the fields of forms and of JSON, that views read.

    A GET has no form, though its page shows what the fields of one would contain.
    """
    names: set[str] = set()

    def note(this: Any, method: Any, name: str, *rest: Any) -> Any:
        if request.method != "GET" or this is not request.form:
            names.add(name)
        return method(this, name, *rest)

    def noting(kind: Any, *methods: str) -> Any:
        """The type, whose methods note the name that is their first argument."""
        return type(
            "Noting",
            (kind,),
            {each: partialmethod(note, getattr(kind, each)) for each in methods},
        )

    fields = noting(dict, "__getitem__", "__contains__", "get", "pop")
    monkeypatch.setattr(
        app.request_class, "parameter_storage_class", noting(ImmutableMultiDict, "__getitem__")
    )
    monkeypatch.setattr(
        app.json,
        "loads",  # which tests use, too
        partial(
            json.loads, object_hook=lambda body: fields(body) if has_request_context() else body
        ),
    )
    return names


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What peewee asks, with the values; it is not logged, so that no report shows all of it."""
    made: list[tuple[str, Any]] = []
    monkeypatch.setattr("peewee.logger.isEnabledFor", lambda level: True)
    monkeypatch.setattr("peewee.logger.debug", made.append)
    return made


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still, so that two pages, answers or frames show the same seconds."""
    monkeypatch.setattr("time.time", mock.Mock(return_value=time.time()))


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture
def cli(app: Flask) -> Iterator[FlaskCliRunner]:
    """Runs commands in this process, and in the context that `flask` makes."""
    with app.app_context():
        yield app.test_cli_runner()


def new_user(name: str) -> User:
    return users.create(name, f"{name}@example.com", users.UNMATCHABLE_HASH)


@pytest.fixture
def owner(app: Flask) -> User:
    """Ada, the user to whom all keys belong."""
    return new_user("ada")


@pytest.fixture
def new_key(owner: User) -> NewKey:
    def create(name: str = "ci", type: str = "production", tier: str = "free") -> str:
        return api_keys.create_key(owner, name, type, tier=tier)[1]

    return create


@pytest.fixture
def key(new_key: NewKey) -> str:
    return new_key()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running.start()


@pytest.fixture(scope="session")
def storage(request: pytest.FixtureRequest) -> Callable[[], dict[str, str]]:
    """The settings of a server that decide where it stores: in SQLite, or as --postgres says."""
    if not request.config.getoption("postgres"):
        return dict
    cluster: Cluster = request.getfixturevalue("cluster")
    return lambda: {"DATABASE_URL": cluster.new_database(), "WEB_CONCURRENCY": "2"}


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, storage: Callable[[], dict[str, str]]
) -> Iterator[Server]:
    """One real server for all tests that only talk to it."""
    with Server(tmp_path_factory.mktemp("server"), **storage(), RATE_LIMITS=TIERS) as running:
        yield running.start()
        running.stop()


@pytest.fixture(scope="session")
def server_key(server: Server) -> str:
    """A key of that server, for tests that do not count."""
    return server.new_key("shared key")


@pytest.fixture
def start_server(tmp_path: Path, storage: Callable[[], dict[str, str]]) -> Iterator[StartServer]:
    """Starts servers for one test: `start_server(MAX_SOCKETS="3")`."""
    with contextlib.ExitStack() as running:

        def start(*command: str, stdin: int = subprocess.DEVNULL, **environment: str) -> Server:
            server = Server(tmp_path / secrets.token_hex(4), *command, **(storage() | environment))
            server.stdin = stdin
            return running.enter_context(server).start()

        yield start


@pytest.fixture
def start_patched(start_server: StartServer, tmp_path: Path) -> StartServer:
    """Starts a server whose gunicorn.conf.py ends with some more lines of Python."""

    def start(lines: str, *command: str, **settings: Any) -> Server:
        file = tmp_path / "patched.conf.py"
        file.write_text(
            f"__file__ = {str(REPOSITORY / 'gunicorn.conf.py')!r}\n"
            f"exec(open(__file__).read())\n{lines}\n"
        )
        return start_server(*command, GUNICORN_CMD_ARGS=f"--config {file}", **settings)

    return start


@pytest.fixture
def zones(monkeypatch: pytest.MonkeyPatch) -> Iterator[Iterator[None]]:
    """Moves the server to another time zone, and to one more."""

    def move_to(zone: str) -> None:
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield map(move_to, ("Asia/Tokyo", "America/Lima"))
    monkeypatch.undo()
    time.tzset()
