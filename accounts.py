"""People: what they may call themselves, and their passwords."""

from __future__ import annotations

import re

import gevent
from peewee import IntegrityError, fn
from werkzeug.security import check_password_hash, generate_password_hash

from models import User, database

USERNAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{1,31}", re.ASCII)
EMAIL = re.compile(r"[^@\s]{1,64}@[^@\s.]+(\.[^@\s.]+)+")
MIN_PASSWORD, MAX_PASSWORD = 10, 256


class Invalid(ValueError):
    """Input that cannot be taken: a message for each field that is wrong."""

    def __init__(self, **errors: str) -> None:
        super().__init__(" ".join(errors.values()))
        self.errors = errors


def create_user(username: str, email: str, password: str) -> User:
    """Store a new user; raises Invalid."""
    check(username=username, email=email, password=password)
    password_hash = hash_password(password)
    with database.connection_context():
        return save(User(username=username, email=email, password_hash=password_hash))


def find(username: str) -> User | None:
    """The user of this name, whatever its capitals."""
    found: User | None = User.get_or_none(fn.LOWER(User.username) == username.lower())
    return found


def check(**fields: str) -> None:
    """Raises Invalid unless every field is as it should be."""
    errors = {name: RULES[name][1] for name, text in fields.items() if not RULES[name][0](text)}
    if errors:
        raise Invalid(**errors)


RULES = {
    "username": (USERNAME.fullmatch, "Use 2 to 32 letters, digits, dots, dashes or underscores."),
    "email": (lambda text: len(text) <= 254 and EMAIL.fullmatch(text), "This is no email address."),
    "password": (
        lambda text: MIN_PASSWORD <= len(text) <= MAX_PASSWORD,
        f"Use {MIN_PASSWORD} to {MAX_PASSWORD} characters.",
    ),
    "name": (lambda text: 1 <= len(text) <= 64 and text.isprintable(), "Use 1 to 64 characters."),
}


def save(user: User) -> User:
    """Insert or update; raises Invalid when the name or the address is somebody else's."""
    try:
        with database.atomic():
            user.save()
    except IntegrityError as error:
        field = "email" if "email" in str(error) else "username"
        raise Invalid(**{field: f"This {field} is taken."}) from None
    return user


def hash_password(password: str) -> str:
    """scrypt takes 50 ms and the whole processor: in a thread it holds up nobody else."""
    hashed: str = gevent.get_hub().threadpool.apply(generate_password_hash, (password,))
    return hashed


def verify_password(user: User | None, password: str) -> bool:
    """Takes as long for a user that does not exist."""
    stored = user.password_hash if user else NOBODY
    right: bool = gevent.get_hub().threadpool.apply(check_password_hash, (stored, password))
    return right and user is not None


NOBODY = "scrypt:32768:8:1$" + "0" * 16 + "$" + "0" * 128
