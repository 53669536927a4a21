"""The choice of database, and its connections, transactions and tables."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peewee import Field, Model, PeeweeException, PostgresqlDatabase, SchemaManager
from playhouse.migrate import SchemaMigrator

from models import TABLES, Changed, User, db
from settings import Settings, SettingsError
from storage import sqlite
from storage.key_store import KeyStore
from storage.outage import reason_of

# In PostgreSQL, processes that start at the same time create the tables one after another. ALTER
# TABLE blocks all requests while it waits for its lock, so the wait is short.
ONE_AT_A_TIME = "SELECT pg_advisory_xact_lock(20261121); SET LOCAL lock_timeout = '20ms'"


def backend(settings: Settings) -> Any:
    """The module of the database, whose three classes take `settings.database_url`.

    They are Store for the API, PageDatabase for pages, and CommandDatabase for commands, whose
    queries may wait.
    """
    if settings.sqlite:
        return sqlite
    from storage import postgres  # here, because its driver is optional

    return postgres


@contextmanager
def command_connection(settings: Settings) -> Iterator[None]:
    """Give this process one connection whose queries may wait.

    For commands only: in the service, one waiting query would hold up every request.
    """
    db.initialize(backend(settings).CommandDatabase(settings.database_url))
    with db.connection_context():
        yield


@contextmanager
def transaction(user: User | None = None) -> Iterator[None]:
    """A transaction for whatever stores or ends a key, a user or a password; may be nested.

    Everything that changes a user, or adds a key to them, runs in a transaction of this user. It
    raises Changed if the user was deleted, or got another password, after `user` was read. So an
    action that waited (for a hash, or for input) changes the row that was read, or nothing.
    Transactions of the same user, and with SQLite all transactions, run one after another: inside,
    wait for nothing but the database.
    """
    with db.connection_context(), db.transaction():
        if user is not None:  # in PostgreSQL, this locks the row
            is_same = (User.id == user.id) & (User.password_hash == user.password_hash)
            if not User.update(id=User.id).where(is_same).execute():
                raise Changed("The account was changed in the meantime, so nothing was done.")
        yield
    # A changed key takes effect at once. Before the commit, a request could remember the old row.
    KeyStore.clear_cache()


def prepare_database(settings: Settings, is_service: bool = False) -> None:
    """Create what the database lacks; raises SettingsError if it cannot be used.

    A service first locks an SQLite file, so that no second service can use it.
    """
    try:
        if settings.sqlite:
            sqlite.check_file(settings.sqlite)
            if is_service:
                sqlite.lock(settings.sqlite)
        database = backend(settings).CommandDatabase(settings.database_url)
        with database.connection_context():
            create_missing(database)
    except (OSError, PeeweeException) as error:
        raise SettingsError(
            f"DATABASE_URL: {settings.sqlite or 'PostgreSQL'}: {reason_of(error)}"
        ) from None


def create_missing(database: Any) -> None:
    """Create what is missing; a table that lacks nothing is only read, and not locked."""
    migrator = SchemaMigrator.from_database(database)
    for table in TABLES:
        if missing_columns(database, table):
            with database.atomic():
                if isinstance(database, PostgresqlDatabase):
                    database.execute_sql(ONE_AT_A_TIME)
                schema = SchemaManager(table, database)
                schema.create_table()  # only if there is none; it has all columns
                # Asked again: another process may have added some.
                for name, field in missing_columns(database, table).items():
                    migrator.alter_add_column(
                        table._meta.table_name, name, field, allow_not_null=True
                    ).run()
                schema.create_indexes()  # those that are missing


def missing_columns(database: Any, table: type[Model]) -> dict[str, Field]:
    """The columns that the stored table lacks: all of them, if there is no table."""
    stored = {column.name for column in database.get_columns(table._meta.table_name)}
    return {name: field for name, field in table._meta.columns.items() if name not in stored}
