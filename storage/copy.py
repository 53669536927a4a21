"""Copies a SQLite file into an empty PostgreSQL database: `flask db copy`."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import peewee

Tables = list[type[peewee.Model]]


class CopyError(ValueError):
    """Nothing was copied; the message says why."""


def copy(file: Path, target: Any, tables: Tables) -> dict[str, int]:
    """Copy all rows or none; returns how many of each table. Raises CopyError, PeeweeException."""
    if not isinstance(target, peewee.PostgresqlDatabase):
        raise CopyError("DATABASE_URL says where to copy to; it must be postgresql://...")
    uri = f"{file.resolve().as_uri()}?mode=ro"
    with peewee.__exception_wrapper__:
        try:
            with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as source:
                source.execute("BEGIN")  # so that all tables are of one moment
                with target.atomic():
                    return {t._meta.table_name: _copy(source, target, t) for t in tables}
        except sqlite3.Error as error:
            raise CopyError(f"{file}: {error}") from None


def _copy(source: sqlite3.Connection, target: Any, table: type[peewee.Model]) -> int:
    name, columns, count = table._meta.table_name, ", ".join(table._meta.columns), 0
    if table.select().exists():
        raise CopyError(f"there is data in PostgreSQL already, in the table {name}")
    with target.cursor().copy(f'COPY "{name}" ({columns}) FROM STDIN') as rows:
        for row in source.execute(f'SELECT {columns} FROM "{name}"'):
            rows.write_row(row)
            count += 1
    if table._meta.auto_increment:  # or the next row would have an id that is taken
        sequence = f"pg_get_serial_sequence('\"{name}\"', 'id')"
        target.execute_sql(f'SELECT setval({sequence}, max(id)) FROM "{name}"')
    return count
