"""Users and their passwords: how they are created, found, changed and deleted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from unicodedata import normalize

from gevent.threadpool import ThreadPool
from peewee import IntegrityError, fn
from werkzeug.security import check_password_hash, generate_password_hash

from models import MAX_PASSWORD, InvalidInput, User, check_fields, db
from storage.database import transaction
from storage.outage import reason_of

UNMATCHABLE_HASH = f"scrypt:32768:8:1${'0' * 16}${'0' * 128}"


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
    """Delete a user, and all rows that belong to them; raises Changed."""
    with transaction(user):
        user.delete_instance(recursive=True)


def find_user(name: str) -> User | None:
    """The user with this user name or email address, ignoring case."""
    with db.connection_context():
        lower = fn.LOWER(name)
        return User.get_or_none(
            (fn.LOWER(User.username) == lower) | (fn.LOWER(User.email) == lower)
        )


@contextmanager
def _taken_is_invalid() -> Iterator[None]:
    """Raises InvalidInput if another user has this name or address."""
    try:
        yield
    except IntegrityError as error:
        # The reason names the index: user_email or user_username.
        field = "email" if "email" in reason_of(error) else "username"
        raise InvalidInput(**{field: "This is already taken."}) from None


def hash_password(password: str) -> str:
    """The hash to store for a new password; raises InvalidInput if it breaks the password rule."""
    check_fields(password=password)
    return str(_scrypt(generate_password_hash, password))


def verify_password(user: User | None, password: str) -> bool:
    """Whether this is the user's password; takes the same time when there is no user.

    A text that is empty, or too long to be a password, is not hashed: a form without a password has
    no slot among those that wait for hashes, and normalizing a long text could take 0.3 s.
    """
    return 0 < len(password) <= MAX_PASSWORD and bool(
        _scrypt(check_password_hash, user.password_hash if user else UNMATCHABLE_HASH, password)
    )


@cache
def hashing_thread() -> ThreadPool:
    """Computes one hash at a time; a hash takes 32 MiB, and 50 ms of a core.

    The thread starts at its first use, because a thread does not survive a fork.
    """
    return ThreadPool(1)


def _scrypt(function: Callable[..., object], *args: str) -> object:
    """Call the function in the thread, while other greenlets go on."""
    # Systems encode é differently. Normalizing leaves the stored hash, which is ASCII, unchanged.
    return hashing_thread().apply(function, [normalize("NFKC", text) for text in args])
