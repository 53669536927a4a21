"""Users: their names, addresses and passwords."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from unicodedata import normalize

from gevent.threadpool import ThreadPool
from peewee import IntegrityError, fn
from werkzeug.security import check_password_hash, generate_password_hash

from models import MAX_PASSWORD, InvalidInput, User, check_fields, database
from storage.database import transaction
from storage.outage import one_line

TAKEN = "This is already taken."
UNMATCHABLE_HASH = f"scrypt:32768:8:1${'0' * 16}${'0' * 128}"


def check_not_taken(username: str, email: str) -> None:
    """Raises InvalidInput if the name or the address belongs to a user; costs less than a hash."""
    for field, text in {"username": username, "email": email}.items():
        if find_user(text):
            raise InvalidInput(**{field: TAKEN})


def create(username: str, email: str, password_hash: str) -> User:
    """Store a new user; raises InvalidInput."""
    check_fields(username=username, email=email)
    with _taken_is_invalid(), transaction():
        user: User = User.create(username=username, email=email, password_hash=password_hash)
    return user


def change(user: User, **columns: str) -> None:
    """Update the row of a user, but not the object; raises InvalidInput and Changed."""
    with _taken_is_invalid(), transaction(user):
        User.update(**columns).where(User.id == user.id).execute()


def delete(user: User) -> None:
    """Delete a user and all their keys; raises Changed."""
    with transaction(user):
        user.delete_instance(recursive=True)


@contextmanager
def _taken_is_invalid() -> Iterator[None]:
    """Raises InvalidInput when the name or the address belongs to another user."""
    try:
        yield
    except IntegrityError as error:
        field = "email" if "email" in one_line(error) else "username"  # the index is user_email
        raise InvalidInput(**{field: TAKEN}) from None


def find_user(name: str) -> User | None:
    """The user with this user name or email address, ignoring case."""
    with database.connection_context():
        lower = fn.LOWER(name)
        has_name = (fn.LOWER(User.username) == lower) | (fn.LOWER(User.email) == lower)
        return User.get_or_none(has_name)


def hash_password(password: str) -> str:
    """What is stored of a password; raises InvalidInput if it breaks the rule for passwords."""
    check_fields(password=password)
    return str(_scrypt(generate_password_hash, password))


def verify_password(user: User | None, password: str) -> bool:
    """Whether this is the user's password; takes the same time when there is no user.

    One that is longer than any password is not read: to normalize it might take 0.3 s.
    """
    stored = user.password_hash if user else UNMATCHABLE_HASH
    could_match = len(password) <= MAX_PASSWORD
    return could_match and bool(_scrypt(check_password_hash, stored, password))


@cache
def hashing_thread() -> ThreadPool:
    """Computes one hash at a time; a hash takes 32 MiB, and 50 ms of a core.

    It is started when it is first needed, because it would not work after a fork.
    """
    return ThreadPool(1)


def _scrypt(function: Callable[..., object], *args: str) -> object:
    """Run in a thread, so that other greenlets go on meanwhile."""
    # Systems encode é differently. Normalizing leaves the stored hash, which is ASCII, unchanged.
    return hashing_thread().apply(function, [normalize("NFKC", text) for text in args])
