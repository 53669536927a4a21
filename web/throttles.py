"""How often a caller, a user or an account may do what costs much, and what hashes a password."""

from collections.abc import Iterator
from contextlib import contextmanager

from flask import request
from gevent.lock import BoundedSemaphore
from werkzeug.exceptions import ServiceUnavailable, TooManyRequests

import accounts
from http_api.client_address import client_network
from models import User
from ratelimit import Quota
from service import current_service

FORMS = Quota("forms of a caller", 60, 60)
SIGN_UPS = Quota("accounts of a caller", 20, 3600)
NEW_KEYS = Quota("new keys of a user", 30, 3600)
PASSWORDS = Quota("passwords of a caller", 20, 60)
PASSWORDS_FOR_ACCOUNT = Quota("passwords for an account", 100, 60)  # of all callers
BUCKETS = 16384  # for each of these quotas
HASH_SLOTS = BoundedSemaphore(100)  # how many passwords may wait to be hashed


def throttle(quota: Quota, *counted_for: object) -> str:
    """Count for this caller, user or account; raises TooManyRequests when the quota is used up.

    Made-up names must not fill the memory, so each is counted in one of a bounded number of
    buckets, which is returned. An attacker cannot aim at another user's bucket, because Python's
    hash of a string differs from process to process.
    """
    bucket = f"{quota.tier} {hash((quota.tier, *counted_for)) % BUCKETS}"
    allowance = current_service.throttles.hit(bucket, quota)
    if not allowance.accepted:
        raise TooManyRequests(retry_after=allowance.seconds_left)
    return bucket


def throttle_caller(*quotas: Quota) -> None:
    """Count for the caller in each of these quotas, in order; raises TooManyRequests."""
    for quota in quotas:
        throttle(quota, client_network(request.remote_addr))


@contextmanager
def throttled(quota: Quota, *counted_for: object) -> Iterator[None]:
    """As `throttle`, for what is done inside: if that raises an exception, it is not counted."""
    bucket = throttle(quota, *counted_for)
    try:
        yield
    except BaseException:
        current_service.throttles.take_back(bucket)
        raise


def hash_password(password: str, *more: Quota) -> str:
    """Hash a new password, which is counted before, for the caller, as one of `more` too.

    Raises InvalidInput, TooManyRequests and ServiceUnavailable.
    """
    throttle_caller(PASSWORDS, *more)
    with _hash_slot():
        return accounts.hash_password(password)


def verify_password(user: User | None, name: str, password: str) -> bool:
    """Whether this is the password of the user, or False if there is no user of that name.

    Right or wrong, it is counted before it is hashed: first for the caller, so that one address can
    neither lock an account nor make others wait, then for the account. A name without a user is
    limited as an account is. Raises TooManyRequests and ServiceUnavailable.
    """
    throttle_caller(PASSWORDS)
    throttle(PASSWORDS_FOR_ACCOUNT, user.id if user else name.lower())
    with _hash_slot():
        return accounts.verify_password(user, password)


@contextmanager
def _hash_slot() -> Iterator[None]:
    """A place among those that wait to be hashed; raises ServiceUnavailable if there is none."""
    if not HASH_SLOTS.acquire(blocking=False):
        raise ServiceUnavailable(retry_after=5)
    try:
        yield
    finally:
        HASH_SLOTS.release()
