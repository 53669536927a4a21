"""Users: how they are created, found, changed and deleted."""

from collections.abc import Iterator
from contextlib import contextmanager

from peewee import IntegrityError, fn

from models import InvalidInput, User, check_fields, db
from storage.database import transaction
from storage.outage import reason_of


def create(username: str, email: str, password_hash: str) -> User:
    """Store a new user; raises InvalidInput."""
    check_fields(username=username, email=email)
    with _taken_is_invalid(), transaction():
        return User.create(username=username, email=email, password_hash=password_hash)


def change(user: User, **columns: str) -> None:
    """Update the user's row; `user` itself keeps the old values.

    Raises InvalidInput and Changed.
    """
    check_fields(**columns)
    with _taken_is_invalid(), transaction(user):
        User.update(**columns).where(User.id == user.id).execute()


def delete(user: User) -> None:
    """Delete a user and all their keys; raises Changed."""
    with transaction(user):
        user.delete_instance(recursive=True)


def find_user(name: str) -> User | None:
    """The user with this user name or email address, ignoring case."""
    with db.connection_context():
        lower = fn.LOWER(name)
        has_name = (fn.LOWER(User.username) == lower) | (fn.LOWER(User.email) == lower)
        return User.get_or_none(has_name)


@contextmanager
def _taken_is_invalid() -> Iterator[None]:
    """Raises InvalidInput if another user has this name or address."""
    try:
        yield
    except IntegrityError as error:
        # The reason names the index: user_email or user_username.
        field = "email" if "email" in reason_of(error) else "username"
        raise InvalidInput(**{field: "This is already taken."}) from None
