"""The connections of pages and commands: opening the database, and creating its tables."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peewee import PeeweeException, PostgresqlDatabase
from playhouse.migrate import SchemaMigrator

from models import TABLES, database
from settings import Settings, SettingsError
from storage import sqlite
from storage.outage import one_line
from storage.store import Store

# For a transaction of PostgreSQL: its COMMIT waits for the disk, whatever was set for the session.
# On a Citus cluster, it may change "user", which all nodes have, after the keys.
ON_DISK = "set_config('synchronous_commit', 'on', true)"
USERS_AFTER_KEYS = "set_config('citus.multi_shard_modify_mode', 'sequential', true)"
# In PostgreSQL, processes that start at the same time create the tables one after another. While a
# new column waits for a table that is in use, all requests wait behind it, so it may not wait long.
ONE_AT_A_TIME = "SELECT pg_advisory_xact_lock(20261121)"
SHORT_LOCKS = "SELECT set_config('lock_timeout', '20ms', true)"


def backend(settings: Settings) -> Any:
    """The module for the database of DATABASE_URL; both have the same three names."""
    if settings.sqlite:
        return sqlite
    from storage import postgres  # the driver is optional

    return postgres


def open_database(settings: Settings) -> None:
    """Configure the connections of pages, but do not connect yet."""
    database.initialize(backend(settings).PageDatabase(settings.database_url))


def open_store(settings: Settings) -> Store:
    """Where keys are found and counted."""
    store: Store = backend(settings).KeyStore(settings.database_url)
    return store


@contextmanager
def command_connection(settings: Settings) -> Iterator[None]:
    """One connection, on which a query may wait: for commands, and for a start."""
    before = database.obj
    database.initialize(backend(settings).CommandDatabase(settings.database_url))
    try:
        with database.connection_context():
            yield
    finally:
        database.initialize(before)


@contextmanager
def transaction() -> Iterator[None]:
    """A transaction for whatever stores or ends a key, a user or a password; may be nested."""
    with database.connection_context(), database.atomic():
        if isinstance(database.obj, PostgresqlDatabase):
            database.execute_sql(f"SELECT {ON_DISK}, {USERS_AFTER_KEYS}")
        yield


def create_tables(settings: Settings) -> None:
    """Create what is missing in the database; raises SettingsError if it cannot be used."""
    try:
        if settings.sqlite and not settings.sqlite.exists():
            create_file(settings.sqlite)
        with command_connection(settings):
            create_missing()
        if settings.sqlite and not os.access(settings.sqlite, os.W_OK):
            raise OSError("the file cannot be written")
    except (OSError, PeeweeException) as error:
        where, reason = settings.sqlite or "PostgreSQL", one_line(error)
        raise SettingsError(f"DATABASE_URL: {where}: {reason}") from None


def create_file(file: Path) -> None:
    """Create an empty database for its owner only.

    Raises OSError if a log (-wal) is there: then the file was moved away.
    """
    wal = Path(f"{file.resolve()}-wal")
    if wal.exists():
        advice = f"put the file back, or delete {wal.name} to start with an empty database"
        raise OSError(f"the file is missing, but {wal.name} is there: {advice}")
    file.touch(mode=0o600)


def create_missing() -> None:
    """Create what is missing; a database that lacks nothing is only read, and nothing is locked."""
    if not missing():
        return
    with transaction():
        if isinstance(database.obj, PostgresqlDatabase):
            database.execute_sql(ONE_AT_A_TIME)
            database.execute_sql(SHORT_LOCKS)
        for create in missing():
            create()


def missing() -> list[Callable[[], object]]:
    """What creates each table and column that the database lacks, and their indexes."""
    creates: list[Callable[[], object]] = []
    migrator = SchemaMigrator.from_database(database.obj)
    for table in TABLES:
        name, fields = table._meta.table_name, table._meta.columns
        stored = {column.name for column in database.get_columns(name)}
        lacking = [column for column in fields if column not in stored]
        for column in lacking if stored else ():
            add = migrator.alter_add_column(name, column, fields[column], allow_not_null=True)
            creates.append(add.run)
        if lacking:
            creates.append(table.create_table)  # and indexes; leaves alone what exists
    return creates
