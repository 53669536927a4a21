"""Limits on expensive actions, for each caller, user and account; hashing within these limits."""

from flask import Response, after_this_request, request
from gevent.lock import BoundedSemaphore
from werkzeug.exceptions import ServiceUnavailable, TooManyRequests

from accounts import passwords
from models import User
from ratelimit import Quota
from service.application import current_service
from service.client_address import client_network

FORMS = Quota("forms of a caller", 60, 60)
SIGN_UPS = Quota("accounts of a caller", 20, 3600)
NEW_KEYS = Quota("new keys of a user", 30, 3600)
PASSWORDS = Quota("passwords of a caller", 20, 60)
PASSWORDS_FOR_ACCOUNT = Quota("passwords for an account", 100, 60)  # of all callers
BUCKETS = 16384  # for each of these quotas
places = BoundedSemaphore(60)  # of forms that wait for hashes, which takes 3 s


def take_place() -> None:
    """Let a form with a password wait; raises ServiceUnavailable if there are too many."""
    if "password" not in request.form:
        return
    if not places.acquire(blocking=False):
        raise ServiceUnavailable(retry_after=3)

    @after_this_request
    def free_place(response: Response) -> Response:
        places.release()
        return response


def throttle(quota: Quota, *counted_for: object) -> None:
    """Count for this caller, user or account; raises TooManyRequests when the quota is used up.

    Made-up names must not fill the memory, so each is counted in one of a bounded number of
    buckets. Python's hash of a string differs from process to process (unless PYTHONHASHSEED is
    set), so an attacker cannot aim at the bucket of another user.
    """
    bucket = f"{quota.tier} {hash((quota.tier, *counted_for)) % BUCKETS}"
    allowance = current_service.extensions["throttles"].hit(bucket, quota)
    if not allowance.accepted:
        raise TooManyRequests(retry_after=allowance.seconds_left)


def throttle_caller(*quotas: Quota) -> None:
    """Count for the caller in each of these quotas, in order; raises TooManyRequests."""
    for quota in quotas:
        throttle(quota, client_network(request.remote_addr))


def hash_throttled(password: str, *more: Quota) -> str:
    """Hash a new password, after counting it for the caller in PASSWORDS and in `more`.

    Raises InvalidInput and TooManyRequests.
    """
    throttle_caller(PASSWORDS, *more)
    return passwords.hash_password(password)


def verify_throttled(user: User | None, name: str, password: str) -> bool:
    """Whether this is the password of the user; False if there is no user of that name.

    It is counted before it is hashed, right or wrong: first for the caller, so that one address can
    neither lock an account nor make others wait, then for the account. A name without a user has
    the same limit. Raises TooManyRequests.
    """
    throttle_caller(PASSWORDS)
    throttle(PASSWORDS_FOR_ACCOUNT, user.id if user else name.lower())
    return passwords.verify_password(user, password)
