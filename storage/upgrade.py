"""Creates the tables, or brings those of an older version up to date."""

import peewee
from playhouse.migrate import SchemaMigrator, migrate

UNUSED = {"changed_at"}  # columns of older versions; they may stay
# In PostgreSQL, processes that start at the same time make the tables one after another.
ALONE = "SELECT set_config('lock_timeout', '9s', true), pg_advisory_xact_lock(20261121)"


def create_or_upgrade(database: peewee.Database, tables: list[type[peewee.Model]]) -> None:
    """Bring all tables up to date; raises ValueError for those of a newer or another program.

    It runs in one transaction, so a failed upgrade changes nothing.
    """
    with database.bind_ctx(tables), database.connection_context(), database.atomic():
        if isinstance(database, peewee.PostgresqlDatabase):
            database.execute_sql(ALONE)
        for table in tables:
            _add_missing_columns(database, table)
        database.create_tables(tables)


def _add_missing_columns(database: peewee.Database, table: type[peewee.Model]) -> None:
    name, wanted = table._meta.table_name, table._meta.columns
    found = {column.name for column in database.get_columns(name)}  # empty without a table
    missing = [column for column in wanted if found and column not in found]
    if found - set(wanted) - UNUSED or not all(wanted[column].null for column in missing):
        raise ValueError(f"the table {name} was made by a newer version or another program")
    migrator = SchemaMigrator.from_database(database)
    migrate(*[migrator.add_column(name, column, wanted[column]) for column in missing])
