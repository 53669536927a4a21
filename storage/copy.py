"""Copies a SQLite file into an empty PostgreSQL database: `flask db copy`."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import peewee

BATCH = 1000  # rows that are inserted at once


def copy(file: Path, target: Any, tables: list[type[peewee.Model]]) -> dict[str, int]:
    """Copy all rows or none; returns how many of each table. Raises ValueError, PeeweeException."""
    if not isinstance(target, peewee.PostgresqlDatabase):
        raise ValueError("DATABASE_URL says where to copy to; it must be postgresql://...")
    uri = f"{file.resolve().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as source:
            source.execute("BEGIN")  # so that all tables are of one moment
            with target.atomic():
                return {table._meta.table_name: _copy(source, table) for table in tables}
    except sqlite3.Error as error:
        raise ValueError(f"{file}: {error}") from None


def _copy(source: sqlite3.Connection, table: type[peewee.Model]) -> int:
    name, columns = table._meta.table_name, table._meta.columns
    if table.select().exists():
        raise ValueError(f"there is data in PostgreSQL already, in the table {name}")
    rows = source.execute(f'SELECT {", ".join(columns)} FROM "{name}"')
    for batch in peewee.chunked(rows, BATCH):
        table.insert_many(batch, fields=list(columns.values())).execute()
    if table._meta.auto_increment:  # or the next row would have an id that is taken
        sequence = f"pg_get_serial_sequence('\"{name}\"', 'id')"
        table._meta.database.execute_sql(f'SELECT setval({sequence}, max(id)) FROM "{name}"')
    return int(table.select().count())
