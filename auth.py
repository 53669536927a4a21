"""Who is calling, and whether they may: API keys, and @require_api_key."""

import secrets
import zlib
from collections.abc import Callable, Mapping
from functools import wraps
from hashlib import sha256
from hmac import compare_digest
from string import ascii_letters, digits

from flask import current_app, request

import accounts
import clock
import models
from answers import ALLOWANCE
from models import PREFIXES, ApiKey, Key, User
from problems import Problem
from ratelimit import DEFAULT_TIER, Allowance, Limiter, Quota

BASE62 = digits + ascii_letters
ID_LENGTH, SECRET_LENGTH, CHECKSUM_LENGTH = 8, 32, 6
MAX_LIVE_KEYS = 25  # of one user
REMEMBERED_KEYS = 200_000  # about 600 bytes each
CHALLENGE = {"WWW-Authenticate": 'ApiKey realm="api", header="X-API-Key"'}
QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"

View = Callable[[Key, Allowance], dict[str, object]]


def create_key(user: User, name: str, type: str, tier: str = DEFAULT_TIER) -> tuple[ApiKey, str]:
    """Store a new key; the second value is the key itself, which exists nowhere else.

    Raises accounts.Invalid.
    """
    accounts.check(name=name, type=type)
    random = "".join(secrets.choice(BASE62) for _ in range(ID_LENGTH + SECRET_LENGTH))
    key_id, secret = random[:ID_LENGTH], random[ID_LENGTH:]
    key = f"{PREFIXES[type]}{key_id}_{secret}"
    key += checksum(key)
    row = ApiKey(id=key_id, user=user, name=name, type=type, tier=tier, digest=digest(key))
    with models.database.connection_context(), models.database.atomic():
        if models.live_keys(user).count() >= MAX_LIVE_KEYS:
            full = f"There are {MAX_LIVE_KEYS} live keys already. Revoke one first."
            raise accounts.Invalid(name=full)
        row.save(force_insert=True)
    return row, key


def checksum(text: str) -> str:
    """CRC-32 in six base62 characters: tells a mistyped or made-up key without a look-up."""
    number, characters = zlib.crc32(text.encode()), ""
    for _ in range(CHECKSUM_LENGTH):
        number, index = divmod(number, len(BASE62))
        characters = BASE62[index] + characters
    return characters


def digest(key: str) -> str:
    """What is stored of a key. Plain SHA-256 suffices: 190 random bits cannot be guessed."""
    return sha256(key.encode()).hexdigest()


class Guard:
    """Checks keys and spends their allowance, remembering the keys it has seen.

    A known key is trusted until it is removed, which the background does within a second of any
    change to the key, and to all keys when it cannot see the changes.
    """

    def __init__(self, quotas: Mapping[str, Quota], limiter: Limiter) -> None:
        self.limiter = limiter
        self._quotas = quotas
        self.known: dict[str, Key] = {}  # by their ids

    def check(self, presented: str | None) -> Key:
        """The live key that was presented; raises Problem 401, or DatabaseError."""
        if not presented:
            raise Problem(401, "missing_api_key", "Send your key in X-API-Key.", headers=CHALLENGE)
        key = self.find(presented)
        if not key:
            raise Problem(401, "invalid_api_key", "This API key is not valid.", headers=CHALLENGE)
        return key

    def find(self, presented: str) -> Key | None:
        """The live key, or None for any that is unknown, malformed, wrong or revoked."""
        key_id = presented[ID_LENGTH : 2 * ID_LENGTH]  # both prefixes are as long as an id
        key = self.known.get(key_id) or self._look_up(key_id, presented)
        return key if key and compare_digest(key.digest, digest(presented)) else None

    def _look_up(self, key_id: str, presented: str) -> Key | None:
        if checksum(presented[:-CHECKSUM_LENGTH]) != presented[-CHECKSUM_LENGTH:]:
            return None
        key = models.find_key(key_id)
        if key:
            if len(self.known) >= REMEMBERED_KEYS:
                self.known.clear()
            self.known[key_id] = key
        return key

    def allowance(self, key: Key | ApiKey, cost: int = 0) -> Allowance:
        """What is left to the key, less the cost of a request; raises DatabaseError."""
        quota = self._quotas.get(key.tier) or self._quotas[DEFAULT_TIER]
        return self.limiter.hit(key.id, quota, cost)

    def spend(self, key: Key, cost: int = 1) -> Allowance:
        """Count this request; raises Problem 429, or DatabaseError."""
        request.environ[ALLOWANCE] = allowance = self.allowance(key, cost)
        if allowance.accepted:
            return allowance
        (tier, limit, _), reset = allowance.quota, clock.date_time(allowance.reset)
        detail = f"All {limit} requests of this window are used up."
        retry = {"Retry-After": str(allowance.seconds_left)}
        members = {"type": QUOTA_EXCEEDED, "violated-policies": [tier], "reset_time": reset}
        raise Problem(429, "rate_limited", detail, headers=retry, **members)


def guard() -> Guard:
    found: Guard = current_app.extensions["guard"]
    return found


def require_api_key(view: View) -> Callable[[], dict[str, object]]:
    """Let a view run for a good key within its limits, and hand it both."""

    @wraps(view)
    def guarded() -> dict[str, object]:
        keys = guard()
        key = keys.check(request.environ.get("HTTP_X_API_KEY"))
        return view(key, keys.spend(key))

    return guarded
