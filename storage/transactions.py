"""The connections of pages and commands, and `transaction(user)`, through which both store."""

from collections.abc import Iterator
from contextlib import contextmanager

from models import Changed, User, db
from settings import Settings
from storage.backend import backend


def open_database(settings: Settings) -> None:
    """Configure the connections of pages, but do not connect yet."""
    db.initialize(backend(settings).page_database(settings.database_url))


@contextmanager
def command_connection(settings: Settings) -> Iterator[None]:
    """Give this process one connection whose queries may wait.

    For commands only: a service would block.
    """
    db.initialize(backend(settings).command_database(settings.database_url))
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
