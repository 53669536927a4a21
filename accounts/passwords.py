"""Hashing and verifying passwords with scrypt, in a separate thread."""

from collections.abc import Callable
from functools import cache
from unicodedata import normalize

from gevent.threadpool import ThreadPool
from werkzeug.security import check_password_hash, generate_password_hash

from models import MAX_PASSWORD, User, check_fields

UNMATCHABLE_HASH = f"scrypt:32768:8:1${'0' * 16}${'0' * 128}"


def hash_password(password: str) -> str:
    """The hash to store for a new password; raises InvalidInput if it breaks the password rule."""
    check_fields(password=password)
    return str(_scrypt(generate_password_hash, password))


def verify_password(user: User | None, password: str) -> bool:
    """Whether this is the user's password; takes the same time when there is no user.

    A text that is too long to be a password is not hashed: normalizing it could take 0.3 s.
    """
    stored = user.password_hash if user else UNMATCHABLE_HASH
    could_match = len(password) <= MAX_PASSWORD
    return could_match and bool(_scrypt(check_password_hash, stored, password))


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
