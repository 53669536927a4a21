"""Prepare the database at a start: check the file, lock it, and create what is missing."""

import os
from pathlib import Path
from typing import Any

from peewee import Model, PeeweeException, PostgresqlDatabase, SchemaManager
from playhouse.migrate import SchemaMigrator

from models import TABLES
from settings import Settings, SettingsError
from storage import sqlite
from storage.backend import backend
from storage.outage import reason_of

# In PostgreSQL, processes that start at the same time create the tables one after another. ALTER
# TABLE blocks all requests while it waits for its lock, so the wait is short.
ONE_AT_A_TIME = "SELECT pg_advisory_xact_lock(20261121); SET LOCAL lock_timeout = '20ms'"


def prepare_database(settings: Settings, is_service: bool = False) -> None:
    """Create what the database lacks; raises SettingsError if it cannot be used.

    A service first locks an SQLite file, so that no second service can use it.
    """
    try:
        if settings.sqlite:
            check_file(settings.sqlite)
            if is_service:
                sqlite.lock(settings.sqlite)
        database = backend(settings).command_database(settings.database_url)
        with database.connection_context():
            create_missing(database)
    except (OSError, PeeweeException) as error:
        where = settings.sqlite or "PostgreSQL"
        raise SettingsError(f"DATABASE_URL: {where}: {reason_of(error)}") from None


def check_file(file: Path) -> None:
    """Create the file if it is missing, for its owner only.

    Raises OSError if only its log (-wal) is there, because then the file was moved away. Raises it
    also if a permission is missing: SQLite would only say that it cannot open the file.
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
            is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
            advice = "the file system is read-only" if is_read_only else "change its owner"
            raise OSError(f"no permission to read and write {path}; {advice}")


def create_missing(database: Any) -> None:
    """Create what is missing; if nothing is, the database is only read, and nothing is locked."""
    if not any(missing_columns(database, table) for table in TABLES):
        return
    with database.atomic():
        if isinstance(database, PostgresqlDatabase):
            database.execute_sql(ONE_AT_A_TIME)
        migrator = SchemaMigrator.from_database(database)
        for table in TABLES:
            name = table._meta.table_name
            columns = missing_columns(database, table)  # again: another process may have added some
            for column in columns if database.table_exists(name) else ():
                field = table._meta.columns[column]
                migrator.alter_add_column(name, column, field, allow_not_null=True).run()
            if columns:
                SchemaManager(table, database).create_all()  # leaves alone what exists


def missing_columns(database: Any, table: type[Model]) -> list[str]:
    """The columns that the stored table lacks: all of them, if there is no table."""
    stored = {column.name for column in database.get_columns(table._meta.table_name)}
    return [column for column in table._meta.columns if column not in stored]
