"""API keys: how they are made, checked and counted, and @require_api_key."""

import re
import secrets
from collections.abc import Callable, Mapping
from functools import wraps
from hashlib import sha256
from hmac import compare_digest
from string import ascii_letters, digits
from typing import Any

from flask import request
from peewee import fn
from werkzeug.exceptions import TooManyRequests

import accounts
import models
from models import DEFAULT_TYPE, HOUR, PREFIXES, ApiKey, User, database
from protocol.headers import ALLOWANCE
from protocol.problems import Problem
from protocol.timestamps import date_time
from ratelimit import DEFAULT_TIER, Allowance, Quota
from services import services
from storage import Store

BASE62 = digits + ascii_letters
ID = re.compile(f"[{BASE62}]{{8}}")
ID_IN_KEY = slice(8, 16)  # after the prefix
MAX_LIVE_KEYS = 25  # of one user
GRACE_SECONDS = 86400  # how long a rotated key stays valid
INHERITED = ("user_id", "name", "type", "tier", "reset", "used")  # by the successor of a key
NOT_VALID = (
    "This API key is not valid. A key begins with sk_live_ or sk_test_ and has 55 characters, "
    "without quotes, spaces, or Bearer."
)
CHALLENGE = {"WWW-Authenticate": 'ApiKey realm="api", header="X-API-Key"'}
QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"

View = Callable[..., dict[str, object]]  # takes a key, its Allowance, the URL's arguments


def create_key(
    user: User, name: str, type: str = DEFAULT_TYPE, tier: str = DEFAULT_TIER, **options: Any
) -> tuple[ApiKey, str]:
    """Store a new key; the second value is the key itself, which is stored nowhere.

    `options` may be `expires_at`, `id`, and `per_hour`: how many keys the user may make or rotate
    within an hour. Raises accounts.Invalid, TooManyRequests, and peewee's IntegrityError if there
    is a key with this id.
    """
    accounts.check_fields(name=name, type=type)
    with database.connection_context(), database.atomic():
        made = _store_key(user.id, type, name=name, tier=tier, **options)
        # Counted after storing: a form that is sent again fails before, because of its id.
        if ApiKey.select().where(ApiKey.user == user, ApiKey.live()).count() > MAX_LIVE_KEYS:
            maximum = f"You have {MAX_LIVE_KEYS} keys, the maximum. Revoke one first."
            raise accounts.Invalid(name=maximum)
        return made


def rotate_key(
    key: ApiKey, grace_seconds: int = GRACE_SECONDS, per_hour: int | None = None
) -> tuple[ApiKey, str]:
    """Create a successor to a live key; the old key stops working after the grace period.

    The successor has the same name, type, tier and lifetime, and goes on with the window as it was
    last saved. MAX_LIVE_KEYS does not apply to it, but `per_hour` does: see create_key.
    Raises accounts.Invalid, or TooManyRequests.
    """
    now = models.now()
    end = min(key.expires_at or now + grace_seconds, now + grace_seconds)
    lifetime = key.expires_at and key.expires_at - key.created_at
    with database.connection_context(), database.atomic():
        # The condition is part of the UPDATE: of two rotations at once, one makes a successor.
        can_rotate = (ApiKey.id == key.id) & ApiKey.live() & ApiKey.rotated_at.is_null()
        if not ApiKey.update(rotated_at=now, expires_at=end).where(can_rotate).execute():
            raise accounts.Invalid(key="This key has ended or was rotated; create a new one.")
        saved = ApiKey.get_by_id(key.id)  # again, because requests may have been counted since
        columns = {name: getattr(saved, name) for name in INHERITED}
        # For the page: to read it again after the commit might fail, and the new key be lost.
        key.expires_at = end
        return _store_key(**columns, expires_at=lifetime and now + lifetime, per_hour=per_hour)


def _store_key(
    user_id: int, type: str, id: str = "", per_hour: int | None = None, **columns: Any
) -> tuple[ApiKey, str]:
    # In PostgreSQL, this locks the user: two requests cannot both create the last key.
    User.update(id=User.id).where(User.id == user_id).execute()
    id = id or random_text(8)
    key = f"{PREFIXES[type]}{id}_{random_text(32)}"
    key += checksum(key)
    made = ApiKey.create(id=id, user=user_id, type=type, digest=digest(key), **columns)
    if per_hour:
        age = models.now() - ApiKey.created_at
        lately = ApiKey.select(fn.COUNT(ApiKey.id), fn.MAX(age)).where(age < HOUR)
        count, oldest = lately.where(ApiKey.user == user_id).tuples().get()
        if count > per_hour:
            raise TooManyRequests(retry_after=HOUR - oldest)
    return made, key


def random_text(length: int) -> str:
    """Random base62 characters, 5.95 bits each."""
    return "".join(secrets.choice(BASE62) for _ in range(length))


def change_key(key_id: str, **columns: object) -> bool:
    """Change a live key; False if there is none with this id."""
    with database.connection_context():
        return bool(ApiKey.update(**columns).where(ApiKey.id == key_id, ApiKey.live()).execute())


def revoke_key(key_id: str) -> bool:
    """End a live key for good; False if there is none with this id."""
    return change_key(key_id, revoked_at=models.now())


def digest(key: str) -> str:
    """The digest that is stored instead of a key.

    SHA-256 is enough, because 190 random bits cannot be guessed.
    """
    return sha256(key.encode()).hexdigest()


def checksum(text: str) -> str:
    """The last six characters of a key: detects mistyped and made-up keys without the database."""
    return digest(text)[:6]


def bad_key() -> Problem:
    """The same response for every kind of bad key."""
    return Problem(401, "invalid_api_key", NOT_VALID, headers=CHALLENGE)


class Guard:
    """Checks keys and counts their requests."""

    def __init__(self, quotas: Mapping[str, Quota], store: Store) -> None:
        self._quotas, self._store = quotas, store

    def check(self, presented: str | None, or_else: str = "") -> ApiKey:
        """The key that was presented, if it is good; raises Problem 401, or PeeweeException.

        `or_else` names another place where the client may send the key.
        """
        if not presented:
            detail = f"Send your key in the X-API-Key header{or_else}."
            raise Problem(401, "missing_api_key", detail, headers=CHALLENGE)
        key = self.find(presented)
        if not key:
            raise bad_key()
        return key

    def find(self, presented: str) -> ApiKey | None:
        """The key, or None if it is malformed, unknown, wrong, revoked or expired."""
        key_id = presented[ID_IN_KEY]
        if not ID.fullmatch(key_id) or presented[-6:] != checksum(presented[:-6]):
            return None
        key = self._store.find(key_id)
        if key is None or key.has_ended():
            return None
        return key if compare_digest(key.digest, digest(presented)) else None

    def left(self, key: ApiKey) -> Allowance:
        """What is left for the key, to be shown."""
        return self._store.left(key, self._quota(key))

    def spend(self, key: ApiKey) -> Allowance:
        """Count this request; raises Problem 401 or 429, or PeeweeException.

        The headers of the response show the allowance.
        """
        allowance = self._store.hit(key.id, self._quota(key))
        if allowance is None:  # deleted since it was looked up
            raise bad_key()
        request.environ[ALLOWANCE] = allowance
        if allowance.accepted:
            return allowance
        quota, reset = allowance.quota, date_time(allowance.reset)
        detail = f"All {quota.limit:,} requests of this {quota.unit} are used up."
        retry = {"Retry-After": str(allowance.seconds_left)}
        members = {"type": QUOTA_EXCEEDED, "violated-policies": [quota.tier], "reset_time": reset}
        raise Problem(429, "rate_limited", detail, headers=retry, **members)

    def _quota(self, key: ApiKey) -> Quota:
        return self._quotas.get(key.tier) or self._quotas[DEFAULT_TIER]


def require_api_key(view: View) -> View:
    """Call the view only with a valid key that is within its limit.

    The view gets the key and its Allowance, and then the arguments of the URL.
    """

    @wraps(view)
    def guarded(**arguments: object) -> dict[str, object]:
        guard = services().guard
        key = guard.check(request.headers.get("X-API-Key"))
        return view(key, guard.spend(key), **arguments)

    return guarded
