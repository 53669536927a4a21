"""Users: their names, addresses and passwords, and how often a client may send these."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from unicodedata import normalize

from flask import request
from gevent.lock import BoundedSemaphore
from gevent.threadpool import ThreadPool
from peewee import IntegrityError, fn
from werkzeug.exceptions import ServiceUnavailable, TooManyRequests
from werkzeug.security import check_password_hash, generate_password_hash

from models import MAX_PASSWORD, Invalid, User, check_fields, database
from ratelimit import Quota
from rest.clients import caller
from service import current_service
from storage.database import transaction
from storage.outage import one_line

FORMS = Quota("forms of a caller", 60, 60)
SIGN_UPS = Quota("accounts of a caller", 20, 3600)
NEW_KEYS = Quota("new keys of a user", 30, 3600)
PASSWORDS = Quota("passwords of a caller", 20, 60)
PASSWORDS_FOR_ACCOUNT = Quota("passwords for an account", 100, 60)  # of all callers
BUCKETS = 16384  # for each of these quotas

TAKEN = "This is already taken."
UNKNOWN_USER = f"scrypt:32768:8:1${'0' * 16}${'0' * 128}"  # a hash that matches no password
HASH_QUEUE = BoundedSemaphore(100)  # how many passwords may wait to be hashed


def check_not_taken(username: str, email: str) -> None:
    """Raises Invalid if the name or the address belongs to a user; costs less than a hash."""
    for field, text in {"username": username, "email": email}.items():
        if find_user(text):
            raise Invalid(**{field: TAKEN})


def create(username: str, email: str, password: str) -> User:
    """Store a new user; raises Invalid."""
    check_fields(username=username, email=email, password=password)
    user = User(username=username, email=email, password_hash=hash_password(password))
    with _taken_is_invalid(), transaction():
        user.save()
    return user


def change(user: User, **columns: str) -> None:
    """Update the row of a user, but not the object that was passed; raises Invalid."""
    with _taken_is_invalid(), transaction():
        User.update(**columns).where(User.id == user.id).execute()


def change_password(user: User, password: str) -> str:
    """Replace the password that `user` was read with; returns the hash of the new one.

    Raises TooManyRequests, and Invalid if it was replaced since then, for example by an operator.
    """
    count_password()
    password_hash = hash_password(password)
    is_current = (User.id == user.id) & (User.password_hash == user.password_hash)
    with transaction():
        if not User.update(password_hash=password_hash).where(is_current).execute():
            raise Invalid(current="The password has just been changed. Log in again.")
    return password_hash


def delete(user: User) -> None:
    """Delete a user and all their keys."""
    with transaction(user.id):  # so no key is added between the two steps
        user.delete_instance(recursive=True)


@contextmanager
def _taken_is_invalid() -> Iterator[None]:
    """Raises Invalid when the name or the address belongs to another user."""
    try:
        yield
    except IntegrityError as error:
        field = "email" if "email" in one_line(error) else "username"  # the index is user_email
        raise Invalid(**{field: TAKEN}) from None


def find_user(name: str) -> User | None:
    """The user with this user name or email address, ignoring case."""
    with database.connection_context():
        lower = fn.LOWER(name)
        has_name = (fn.LOWER(User.username) == lower) | (fn.LOWER(User.email) == lower)
        return User.get_or_none(has_name)


def hash_password(password: str) -> str:
    return str(_scrypt(generate_password_hash, password))


def throttle(quota: Quota, *counted_for: object) -> None:
    """Count for this caller, user or account; raises TooManyRequests when the quota is used up.

    Made-up names must not fill the memory, so each is counted in one of a bounded number of
    buckets. An attacker cannot aim at another user's bucket, because Python's hash of a string
    differs from process to process.
    """
    bucket = f"{quota.tier} {hash((quota.tier, *counted_for)) % BUCKETS}"
    allowance = current_service.throttles.hit(bucket, quota)
    if not allowance.accepted:
        raise TooManyRequests(retry_after=allowance.seconds_left)


def count_password() -> None:
    """Count a password of this caller, before it is hashed; raises TooManyRequests."""
    throttle(PASSWORDS, caller(request.remote_addr))


def try_password(user: User | None, name: str, password: str) -> bool:
    """Whether this is the password of the user, or False if there is no user of that name.

    Right or wrong, it is counted before it is hashed: first for the caller, so that one address can
    neither lock an account nor make others wait, then for the account. A name without a user is
    limited as an account is. Raises TooManyRequests.
    """
    count_password()
    throttle(PASSWORDS_FOR_ACCOUNT, user.id if user else name.lower())
    return verify_password(user, password)


def verify_password(user: User | None, password: str) -> bool:
    """Whether this is the user's password; takes the same time when there is no user.

    One that is longer than any password is not read: to normalize it might take 0.3 s.
    """
    stored = user.password_hash if user else UNKNOWN_USER
    is_read = len(password) <= MAX_PASSWORD
    return is_read and bool(_scrypt(check_password_hash, stored, password))


@cache
def hashing_thread() -> ThreadPool:
    """Computes one hash at a time; a hash takes 32 MiB, and 50 ms of a core.

    It is started when it is first needed, because it would not work after a fork.
    """
    return ThreadPool(1)


def _scrypt(function: Callable[..., object], *args: str) -> object:
    """Run in a thread, because it takes 50 ms; raises ServiceUnavailable."""
    if not HASH_QUEUE.acquire(blocking=False):
        raise ServiceUnavailable(retry_after=5)
    try:
        # Systems differ in how they encode é, for example. A hash is ASCII, and stays as it is.
        return hashing_thread().apply(function, [normalize("NFKC", text) for text in args])
    finally:
        HASH_QUEUE.release()
