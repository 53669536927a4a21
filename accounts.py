"""People: what they may call themselves, and their passwords."""

import re
from collections.abc import Callable

import gevent
from gevent.lock import BoundedSemaphore
from peewee import IntegrityError, fn
from werkzeug.exceptions import ServiceUnavailable
from werkzeug.security import check_password_hash, generate_password_hash

from models import User, database

EMAIL = re.compile(r"[^@\s]{1,64}@[^@\s.]+(\.[^@\s.]+)+")
RULES: dict[str, tuple[Callable[[str], object], str]] = {
    "username": (
        lambda text: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{1,31}", text),
        "Use 2 to 32 letters, digits, dots, dashes or underscores, the first a letter or digit.",
    ),
    "email": (
        lambda text: len(text) <= 254 and text.isprintable() and EMAIL.fullmatch(text),
        "This is no email address.",
    ),
    "password": (lambda text: 10 <= len(text) <= 256, "Use 10 to 256 characters."),
    "name": (lambda text: 1 <= len(text) <= 64 and text.isprintable(), "Use 1 to 64 characters."),
}
NOBODY = f"scrypt:32768:8:1${'0' * 16}${'0' * 128}"  # the hash of no password
HASHING = BoundedSemaphore(1)
PATIENCE_SECONDS = 5  # for the passwords before this one


class Invalid(ValueError):
    """Input that cannot be taken; `errors` has a message for each field that is wrong."""

    def __init__(self, **errors: str) -> None:
        super().__init__(" ".join(f"{field}: {message}" for field, message in errors.items()))
        self.errors = errors


def check(**fields: str) -> None:
    """Raises Invalid unless every field keeps its rule."""
    errors = {field: RULES[field][1] for field, text in fields.items() if not RULES[field][0](text)}
    if errors:
        raise Invalid(**errors)


def create(username: str, email: str, password: str) -> User:
    """Store a new user; raises Invalid."""
    check(username=username, email=email, password=password)
    user = User(username=username, email=email, password_hash=hash_password(password))
    return save(user)


def save(user: User) -> User:
    """Insert or update; raises Invalid when the name or the address is somebody else's."""
    try:
        with database.connection_context(), database.atomic():
            user.save()
    except IntegrityError as error:
        field = "email" if "email" in str(error) else "username"
        raise Invalid(**{field: f"This {field} is taken."}) from None
    return user


def find(username: str) -> User | None:
    """The user of this name, whatever its capitals."""
    found: User | None = User.get_or_none(fn.LOWER(User.username) == username.lower())
    return found


def hash_password(password: str) -> str:
    return str(_scrypt(generate_password_hash, password))


def verify_password(user: User | None, password: str) -> bool:
    """Whether this is the user's password; takes as long when there is no user."""
    right = _scrypt(check_password_hash, user.password_hash if user else NOBODY, password)
    return bool(right) and user is not None


def _scrypt(function: Callable[..., object], *args: str) -> object:
    """In a thread, because it takes 50 ms of processor; raises ServiceUnavailable.

    One at a time, because each takes 32 MiB, and many together the processor from the requests.
    """
    if not HASHING.acquire(timeout=PATIENCE_SECONDS):
        raise ServiceUnavailable(retry_after=PATIENCE_SECONDS)
    try:
        return gevent.get_hub().threadpool.apply(function, args)
    finally:
        HASHING.release()
