"""The database of pages and commands: connections, `transaction(user)`, and creating the tables."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from peewee import Model, PeeweeException, PostgresqlDatabase, SchemaManager
from playhouse.migrate import SchemaMigrator

from models import TABLES, Changed, User, database
from settings import Settings, SettingsError
from storage import sqlite
from storage.outage import one_line

# In PostgreSQL, processes that start at the same time create the tables one after another. ALTER
# TABLE blocks all requests while it waits for its lock, so the wait is short.
ONE_AT_A_TIME = "SELECT pg_advisory_xact_lock(20261121)"
SHORT_LOCKS = "SELECT set_config('lock_timeout', '20ms', true)"


def backend(settings: Settings) -> Any:
    """The module of the database; each has a KeyStore, a PageDatabase and a CommandDatabase."""
    return import_module("storage.sqlite" if settings.sqlite else "storage.postgres")


def open_database(settings: Settings) -> None:
    """Configure the connections of pages, but do not connect yet."""
    database.initialize(backend(settings).PageDatabase(settings.database_url))


@contextmanager
def command_connection(settings: Settings) -> Iterator[None]:
    """Connect, for a command: from now on, this process has one connection, whose queries may wait.

    Not for a process that serves.
    """
    database.initialize(backend(settings).CommandDatabase(settings.database_url))
    with database.connection_context():
        yield


@contextmanager
def transaction(user: User | None = None) -> Iterator[None]:
    """A transaction for whatever stores or ends a key, a user or a password; may be nested.

    Everything that changes a user, or adds a key to them, is done in a transaction of this user.
    It raises Changed if the user was deleted, or has another password, since `user` was read.
    Transactions of the same user run one after another, as all do with SQLite; so a page must not
    wait inside for anything but the database.
    """
    with database.connection_context(), database.transaction():
        if user is not None:  # in PostgreSQL, this locks the row
            is_same = (User.id == user.id) & (User.password_hash == user.password_hash)
            if not User.update(id=User.id).where(is_same).execute():
                raise Changed("The account was changed in the meantime, so nothing was done.")
        yield


def create_tables(settings: Settings, is_service: bool = False) -> None:
    """Create what is missing in the database; raises SettingsError if it cannot be used.

    Before that, a service locks an SQLite file.
    """
    try:
        if settings.sqlite:
            check_file(settings.sqlite)
            if is_service:
                sqlite.lock(settings.sqlite)
        db = backend(settings).CommandDatabase(settings.database_url)
        with db.connection_context():
            create_missing(db)
    except (OSError, PeeweeException) as error:
        where, reason = settings.sqlite or "PostgreSQL", one_line(error)
        raise SettingsError(f"DATABASE_URL: {where}: {reason}") from None


def check_file(file: Path) -> None:
    """Create the file if it is missing, for its owner only.

    Raises OSError if its log (-wal) is there, because then the file was moved away; and without
    permission, of which SQLite says only that it is unable to open the file.
    """
    real = file.resolve()
    wal = Path(f"{real}-wal")
    if not file.exists():
        if wal.exists():
            raise OSError(
                f"the file is missing, but {wal.name} is there: put the file back, or delete "
                f"{wal.name} to start with an empty database"
            )
        file.touch(mode=0o600)
    for path in (real, real.parent):  # SQLite creates other files beside it
        if not os.access(path, os.R_OK | os.W_OK):
            raise OSError(f"no permission to read and write {path}; change its owner")


def create_missing(db: Any) -> None:
    """Create what is missing; a database that lacks nothing is only read, and nothing is locked."""
    if not any(missing_columns(db, table) for table in TABLES):
        return
    with db.atomic():
        if isinstance(db, PostgresqlDatabase):
            db.execute_sql(ONE_AT_A_TIME)
            db.execute_sql(SHORT_LOCKS)
        migrator = SchemaMigrator.from_database(db)
        for table in TABLES:
            name, columns = table._meta.table_name, missing_columns(db, table)  # as it is now
            for column in columns if db.table_exists(name) else ():
                field = table._meta.columns[column]
                migrator.alter_add_column(name, column, field, allow_not_null=True).run()
            if columns:
                SchemaManager(table, db).create_all()  # leaves alone what exists


def missing_columns(db: Any, table: type[Model]) -> list[str]:
    """The columns that the stored table lacks: all of them, if there is no table."""
    stored = {column.name for column in db.get_columns(table._meta.table_name)}
    return [column for column in table._meta.columns if column not in stored]
