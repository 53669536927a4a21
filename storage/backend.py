"""Which database stores everything: SQLite or PostgreSQL."""

from collections.abc import Callable
from typing import Any, NamedTuple

from peewee import Database

from settings import Settings
from storage.key_store import KeyStore


class Backend(NamedTuple):
    """The classes for a database; each is called with `settings.database_url`."""

    key_store: Callable[[Any], KeyStore]  # for the API
    page_database: Callable[[Any], Database]  # for pages
    command_database: Callable[[Any], Database]  # for commands, whose queries may wait


def backend(settings: Settings) -> Backend:
    if settings.sqlite:
        from storage import sqlite

        return Backend(sqlite.SqliteKeyStore, sqlite.PageDatabase, sqlite.CommandDatabase)
    from storage import postgres  # here, because its driver is optional

    return Backend(postgres.PostgresKeyStore, postgres.PageDatabase, postgres.CommandDatabase)
