"""Users: their names, addresses and passwords, and what may be typed for each field."""

import re
from collections.abc import Callable

import gevent
from gevent.lock import BoundedSemaphore
from peewee import IntegrityError, fn
from werkzeug.exceptions import ServiceUnavailable
from werkzeug.security import check_password_hash, generate_password_hash

from models import PREFIXES, User, database
from storage.outage import one_line

USERNAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{1,31}"
EMAIL = r"(?=[!-~]{3,254}$)[^@]{1,64}@[^@.]+(\.[^@.]+)+"  # ASCII: databases differ in the rest
NAMING = "Use 2 to 32 letters, digits, dots, dashes or underscores; start with a letter or digit."
RULES = {
    "username": (USERNAME, NAMING),
    "email": (EMAIL, "Enter an address like ada@example.com."),
    "password": (r"[^\ud800-\udfff]{10,256}", "Use 10 to 256 characters."),  # no lone surrogates
    "name": (r"\S.{0,63}", "Give the key a name of 1 to 64 printable characters."),
    "type": ("|".join(PREFIXES), "Choose Development or Production."),
}
NOBODY = f"scrypt:32768:8:1${'0' * 16}${'0' * 128}"  # a hash that matches no password
QUEUE_SECONDS = 5  # how long to wait while earlier passwords are hashed
ONE_AT_A_TIME = BoundedSemaphore()  # a hash takes 32 MiB; many together would slow the requests


class Invalid(ValueError):
    """Wrong input; `errors` has a message for each wrong field, or one for the whole `key`."""

    def __init__(self, **errors: str) -> None:
        super().__init__(" ".join(map(": ".join, errors.items())).removeprefix("key: "))
        self.errors = errors


def check_fields(**fields: str) -> None:
    """Raises Invalid unless every field matches its rule."""
    errors = {field: RULES[field][1] for field, text in fields.items() if not _good(field, text)}
    if errors:
        raise Invalid(**errors)


def _good(field: str, text: str) -> bool:
    printable = text.isprintable() or field == "password"
    return bool(printable and re.fullmatch(RULES[field][0], text))


def create(username: str, email: str, password: str) -> User:
    """Store a new user; raises Invalid."""
    check_fields(username=username, email=email, password=password)
    user = User(username=username, email=email, password_hash=hash_password(password))
    _write(user.save)
    return user


def change(user: User, **columns: str) -> None:
    """Update the row of a user, but not the object that was passed; raises Invalid."""
    _write(User.update(**columns).where(User.id == user.id).execute)


def _write(query: Callable[[], object]) -> None:
    """Raises Invalid when the name or the address belongs to another user."""
    try:
        with database.connection_context(), database.atomic():
            query()
    except IntegrityError as error:
        field = "email" if "email" in one_line(error) else "username"  # the index is user_email
        raise Invalid(**{field: "This is already taken."}) from None


def find(name: str) -> User | None:
    """The user with this user name or email address, ignoring case."""
    with database.connection_context():
        lower = fn.LOWER(name)
        return User.get_or_none(
            (fn.LOWER(User.username) == lower) | (fn.LOWER(User.email) == lower)
        )


def hash_password(password: str) -> str:
    return str(_scrypt(generate_password_hash, password))


def verify_password(user: User | None, password: str) -> bool:
    """Whether this is the user's password; takes the same time when there is no user."""
    stored = user.password_hash if user else NOBODY
    return bool(_scrypt(check_password_hash, stored, password))


def _scrypt(function: Callable[..., object], *args: str) -> object:
    """Run in a thread, because it takes 50 ms; raises ServiceUnavailable."""
    busy = ServiceUnavailable(retry_after=QUEUE_SECONDS)
    with gevent.Timeout(QUEUE_SECONDS, busy), ONE_AT_A_TIME:
        return gevent.get_hub().threadpool.apply(function, args)
