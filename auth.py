"""API keys: how they are checked, counted, made and ended, and @require_api_key."""

import re
import secrets
from collections.abc import Callable
from functools import wraps
from hashlib import sha256
from hmac import compare_digest
from string import ascii_letters, digits
from typing import Any

from flask import request

from models import DEFAULT_TYPE, PREFIXES, ApiKey, Invalid, User, check_fields, now
from ratelimit import DEFAULT_TIER, UNIT_NAMES, Allowance, Quota
from rest.headers import ALLOWANCE
from rest.problems import Problem
from rest.timestamps import date_time
from service import current_service
from storage.database import transaction

BASE62 = digits + ascii_letters
KEY_START = re.compile(f"(?:{'|'.join(PREFIXES.values())})([{BASE62}]{{8}})")  # with the ID
MAX_KEYS = 25  # live keys of one user
MAX_KEYS_ROTATING = 50  # the same, with those that were rotated and are in their grace period
KEYS_PER_HOUR = 30  # that a user may make or rotate in the pages
GRACE_SECONDS = 86400  # how long a rotated key stays valid
INHERITED = ("user_id", "name", "type", "tier", "reset", "used")  # by the successor of a key
NOT_VALID = (
    f"This API key is not valid. A key begins with {' or '.join(PREFIXES.values())}, followed by "
    "47 characters, without quotes, spaces, or Bearer."
)
CHALLENGE = {"WWW-Authenticate": 'ApiKey realm="api", header="X-API-Key"'}
QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"

View = Callable[..., dict[str, object]]  # takes a key, its Allowance, the URL's arguments


def require_api_key(
    view: View | None = None, *, counted: bool = True, within_limit: bool = True
) -> Any:
    """Call the view only with a valid key. The request is counted, and is 429 if nothing is left.

    With `within_limit=False` the view is called all the same when nothing is left; with
    `counted=False` it always is, and nothing is counted. The view gets the key and its Allowance,
    and then the arguments of the URL.
    """

    def decorate(view: View) -> View:
        @wraps(view)
        def guarded(**arguments: object) -> dict[str, object]:
            key = require_key(request.headers.get("X-API-Key"))
            allowance = count_request(key, within_limit) if counted else peek(key)
            return view(key, allowance, **arguments)

        return guarded

    return decorate(view) if view else decorate


def require_key(presented: str | None, or_else: str = "") -> ApiKey:
    """The key that was presented, if it is good; raises Problem 401, or PeeweeException.

    `or_else` names another place where the client may send the key.
    """
    if not presented:
        detail = f"Send your key in the X-API-Key header{or_else}."
        raise Problem(401, "missing_api_key", detail, headers=CHALLENGE)
    key = find_key(presented)
    if not key:
        raise bad_key()
    return key


def find_key(presented: str) -> ApiKey | None:
    """The key, or None if it is malformed, unknown, wrong, revoked or expired."""
    start = KEY_START.match(presented)
    if not start or presented[-6:] != checksum(presented[:-6]):
        return None
    key = current_service.store.find(start[1])
    if key is None or key.has_ended():
        return None
    return key if compare_digest(key.digest, digest(presented)) else None


def count_request(key: ApiKey, within_limit: bool = True) -> Allowance:
    """Count this request; the response shows the Allowance in its headers.

    Raises Problem 401 if the key was just deleted, 429 if nothing was left for a request that
    must be within the limit, and PeeweeException.
    """
    allowance = current_service.store.hit(key.id, quota_of(key))
    if allowance is None:
        raise bad_key()
    show(allowance)
    if within_limit and not allowance.accepted:
        raise used_up(allowance)
    return allowance


def peek(key: ApiKey) -> Allowance:
    """What is left, in the headers of the response, too; counts nothing."""
    return show(current_service.store.peek(key, quota_of(key)))


def show(allowance: Allowance) -> Allowance:
    """Let the response have it in its headers."""
    request.environ[ALLOWANCE] = allowance
    return allowance


def quota_of(key: ApiKey) -> Quota:
    quotas = current_service.settings.rate_limits
    return quotas.get(key.tier) or quotas[DEFAULT_TIER]


def bad_key() -> Problem:
    """The same response for every kind of bad key."""
    return Problem(401, "invalid_api_key", NOT_VALID, headers=CHALLENGE)


def used_up(allowance: Allowance) -> Problem:
    quota, reset = allowance.quota, date_time(allowance.reset)
    detail = f"All {quota.limit:,} requests of this {UNIT_NAMES[quota.seconds]} are used up."
    retry = {"Retry-After": str(allowance.seconds_left)}
    members = {"type": QUOTA_EXCEEDED, "violated-policies": [quota.tier], "reset_time": reset}
    return Problem(429, "rate_limited", detail, headers=retry, **members)


def create_key(
    user: User, name: str, type: str = DEFAULT_TYPE, **columns: Any
) -> tuple[ApiKey, str]:
    """Store a new key; the second value is the key itself, which is stored nowhere.

    Other columns may be given: `id`, `tier`, `expires_at`. Raises Invalid, and peewee's
    IntegrityError if there is a key with this id.
    """
    check_fields(name=name, type=type)
    with transaction():
        return _store(ApiKey(user=user, name=name, type=type, **columns), MAX_KEYS)


def rotate_key(old: ApiKey, end: int) -> tuple[ApiKey, str]:
    """Create a successor to a live key, which ends at this moment: see `grace_end`.

    The successor has the same name, type, tier and lifetime, and goes on with the window as it was
    last saved. Raises Invalid.
    """
    rotated_at = now()
    lifetime = old.expires_at and old.expires_at - old.created_at
    with transaction():
        # The condition is part of the UPDATE: of two rotations at once, one makes a successor.
        can_rotate = (ApiKey.id == old.id) & ApiKey.live() & ApiKey.rotated_at.is_null()
        if not ApiKey.update(rotated_at=rotated_at, expires_at=end).where(can_rotate).execute():
            raise Invalid(key="This key has ended or was rotated; create a new one.")
        saved = ApiKey.get_by_id(old.id)  # again, because requests may have been counted since
        columns = {name: getattr(saved, name) for name in INHERITED}
        new = ApiKey(expires_at=lifetime and rotated_at + lifetime, **columns)
        return _store(new, MAX_KEYS_ROTATING)


def grace_end(key: ApiKey, grace_seconds: int) -> int:
    """When the key ends if it is rotated now: after the grace period, or earlier by itself."""
    end = now() + grace_seconds
    return min(key.expires_at or end, end)


def _store(key: ApiKey, maximum: int) -> tuple[ApiKey, str]:
    # In PostgreSQL, this locks the user's row until the transaction ends, so no other one adds a
    # key. In SQLite, they take turns anyway.
    User.update(id=User.id).where(User.id == key.user_id).execute()
    key.id = key.id or random_text(8)
    secret = f"{PREFIXES[key.type]}{key.id}_{random_text(32)}"
    secret += checksum(secret)
    key.digest = digest(secret)
    key.save(force_insert=True)  # fails for a form that is sent again, because of its id
    if ApiKey.select().where(ApiKey.user == key.user_id, ApiKey.live()).count() > maximum:
        raise Invalid(key=f"You have {maximum} keys, the maximum. Revoke one first.")
    return key, secret


def random_text(length: int) -> str:
    """Random base62 characters, 5.95 bits each."""
    return "".join(secrets.choice(BASE62) for _ in range(length))


def id_for(text: str) -> str:
    """The ID of a key that is made only once for this text; nobody can choose it."""
    return "".join(BASE62[byte % 62] for byte in sha256(text.encode()).digest()[:8])


def change_key(key_id: str, **columns: object) -> bool:
    """Change a live key; False if there is none with this id."""
    with transaction():
        return bool(ApiKey.update(**columns).where(ApiKey.id == key_id, ApiKey.live()).execute())


def revoke_key(key_id: str) -> bool:
    """End a live key for good; False if there is none with this id."""
    return change_key(key_id, revoked_at=now())


def digest(key: str) -> str:
    """The digest that is stored instead of a key.

    SHA-256 is enough, because 190 random bits cannot be guessed.
    """
    return sha256(key.encode()).hexdigest()


def checksum(text: str) -> str:
    """The last six characters of a key: detects mistyped and made-up keys without the database."""
    return digest(text)[:6]
