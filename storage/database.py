"""The connections of pages and commands: opening the database, and creating its tables."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import peewee
from playhouse.migrate import SchemaMigrator

from models import TABLES, database
from settings import Settings, SettingsError
from storage import Store, transaction
from storage.outage import one_line
from storage.sqlite import Sqlite, SqliteStore

PAGES = 3  # connections of each process for pages, with PostgreSQL
BUSY_SECONDS = 2  # how long a page waits for a lock of SQLite; a slow disk needs 0.4
COMMAND_SECONDS = 10  # in a command, with either database: nobody else waits for it
# In PostgreSQL, processes that start at the same time create the tables one after another. They
# wait for less than COMMAND_SECONDS.
ONE_AT_A_TIME = "SELECT set_config('lock_timeout', '9s', true), pg_advisory_xact_lock(20261121)"
# While a new column or index waits for a table that is in use, all requests wait behind it. A hit
# waits for 50 ms (SESSION in postgres.py).
SHORT_LOCKS = "SELECT set_config('lock_timeout', '20ms', true)"
TABLE_NAMES = ", ".join(table._meta.table_name for table in TABLES)


def open_database(settings: Settings, patience: float | None = None) -> None:
    """Configure the database, but do not connect to it yet.

    `patience` is how many seconds a query may wait. It is short by default, because requests wait.
    """
    if database.obj:
        database.close_all()  # what was open before
    if settings.sqlite:
        database.initialize(Sqlite(settings.sqlite, patience or BUSY_SECONDS))
    else:
        from storage.connections import PooledPostgres, Postgres  # the driver is optional

        url = str(settings.database_url)
        database.initialize(Postgres(url, patience) if patience else PooledPostgres(url, PAGES))


def open_store(settings: Settings) -> Store:
    """Where keys are found and counted."""
    if settings.sqlite:
        return SqliteStore(settings.sqlite)
    from storage.postgres import PostgresStore  # the driver is optional

    return PostgresStore(str(settings.database_url))


def create_tables(settings: Settings) -> None:
    """Create what is missing in the database; raises SettingsError if it cannot be used."""
    open_database(settings, COMMAND_SECONDS)
    try:
        if settings.sqlite and not settings.sqlite.exists():
            create_file(settings.sqlite)
        with database.connection_context():
            create_missing()
        if settings.sqlite:
            with suppress(PermissionError):  # it has another owner, who chose its mode
                settings.sqlite.chmod(0o600)
            if not os.access(settings.sqlite, os.W_OK):
                raise OSError("the file cannot be written")
        open_database(settings)
    except (OSError, peewee.PeeweeException) as error:
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
    deadline = time.monotonic() + COMMAND_SECONDS
    while missing():
        try:
            with transaction():
                if isinstance(database.obj, peewee.PostgresqlDatabase):
                    database.execute_sql(ONE_AT_A_TIME)
                    database.execute_sql(SHORT_LOCKS)
                for create in missing():
                    create()
        except peewee.OperationalError:  # a table is locked
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            if missing():  # PostgreSQL shows a role only what it may use
                raise peewee.OperationalError(f"this role needs a GRANT for each of {TABLE_NAMES}")


def missing() -> list[Callable[[], object]]:
    """What creates each column, table and index that the database lacks, in this order."""
    creates: list[Callable[[], object]] = []
    migrator = SchemaMigrator.from_database(database.obj)
    for table in TABLES:
        name, fields = table._meta.table_name, table._meta.columns
        columns = {column.name for column in database.get_columns(name)}
        for column, field in fields.items() if columns else ():
            if column not in columns:
                add = migrator.alter_add_column(name, column, field, allow_not_null=True)
                creates.append(add.run)
        indexes = {index.name for index in database.get_indexes(name)}
        if not columns or {index._name for index in table._meta.fields_to_index()} - indexes:
            creates.append(table.create_table)  # and its indexes; leaves alone what exists
    return creates
