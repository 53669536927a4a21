"""Users: their names, addresses and passwords."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unicodedata import normalize

import gevent
from gevent.lock import BoundedSemaphore
from peewee import IntegrityError, fn
from werkzeug.exceptions import ServiceUnavailable
from werkzeug.security import check_password_hash, generate_password_hash

from models import MAX_PASSWORD, ApiKey, Invalid, Taken, User, check_fields, database
from storage import transaction
from storage.outage import one_line

NOBODY = f"scrypt:32768:8:1${'0' * 16}${'0' * 128}"  # a hash that matches no password
QUEUE_SECONDS = 5  # how long to wait while earlier passwords are hashed
HASHING = BoundedSemaphore()  # one hash at a time: it takes 32 MiB, and a core for 50 ms


def create(username: str, email: str, password: str) -> User:
    """Store a new user; raises Invalid."""
    check_fields(username=username, email=email, password=password)
    user = User(username=username, email=email, password_hash=hash_password(password))
    with _taken_is_invalid(), transaction():
        user.save()
        # SQLite gives it the number of a user who was deleted by hand, and whose keys may be left.
        ApiKey.delete().where(ApiKey.user == user).execute()
    return user


def change(user: User, **columns: str) -> None:
    """Update the row of a user, but not the object that was passed; raises Invalid."""
    with _taken_is_invalid(), transaction():
        User.update(**columns).where(User.id == user.id).execute()


def change_password(user: User, password: str) -> str:
    """Replace the password that `user` was read with; returns the hash of the new one.

    Raises Invalid if it was replaced meanwhile, for example by an operator.
    """
    password_hash = hash_password(password)
    is_current = (User.id == user.id) & (User.password_hash == user.password_hash)
    with transaction():
        if not User.update(password_hash=password_hash).where(is_current).execute():
            raise Invalid(current="The password was changed meanwhile. Log in again.")
    return password_hash


@contextmanager
def _taken_is_invalid() -> Iterator[None]:
    """Raises Taken when the name or the address belongs to another user."""
    try:
        yield
    except IntegrityError as error:
        field = "email" if "email" in one_line(error) else "username"  # the index is user_email
        raise Taken(**{field: "This is already taken."}) from None


def find_user(name: str) -> User | None:
    """The user with this user name or email address, ignoring case."""
    with database.connection_context():
        lower = fn.LOWER(name)
        return User.get_or_none(
            (fn.LOWER(User.username) == lower) | (fn.LOWER(User.email) == lower)
        )


def hash_password(password: str) -> str:
    return str(_scrypt(generate_password_hash, password))


def verify_password(user: User | None, password: str) -> bool:
    """Whether this is the user's password; takes the same time when there is no user.

    One that is too long to be anybody's is not read: to normalize it might take 0.3 s.
    """
    stored = user.password_hash if user else NOBODY
    is_read = len(password) <= MAX_PASSWORD
    return is_read and bool(_scrypt(check_password_hash, stored, password))


def _scrypt(function: Callable[..., object], *args: str) -> object:
    """Run in a thread, because it takes 50 ms; raises ServiceUnavailable."""
    # Systems differ in how they encode é, for example. A hash is ASCII, and stays as it is.
    texts = [normalize("NFKC", text) for text in args]
    busy = ServiceUnavailable(retry_after=QUEUE_SECONDS)
    with gevent.Timeout(QUEUE_SECONDS, busy), HASHING:
        return gevent.get_hub().threadpool.apply(function, texts)
