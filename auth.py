"""API keys: how they are made, checked and counted, and @require_api_key."""

import re
import secrets
import time
import zlib
from collections.abc import Callable, Mapping
from functools import wraps
from hashlib import sha256
from hmac import compare_digest
from string import ascii_letters, digits

from flask import current_app, request

import accounts
import models
from models import PREFIXES, ApiKey, Key, User
from protocol.headers import ALLOWANCE
from protocol.problems import Problem
from protocol.timestamps import date_time
from ratelimit import DEFAULT_TIER, Allowance, Limiter, Quota, Usage

BASE62 = digits + ascii_letters
ID_LENGTH, SECRET_LENGTH, CHECKSUM_LENGTH = 8, 32, 6
RANDOM_LENGTH = ID_LENGTH + SECRET_LENGTH
KEY_FORMAT = re.compile(
    rf"({'|'.join(PREFIXES.values())})[0-9A-Za-z]{{{ID_LENGTH}}}"
    rf"_[0-9A-Za-z]{{{SECRET_LENGTH + CHECKSUM_LENGTH}}}"
)
KEY_ID = slice(8, 8 + ID_LENGTH)  # in a key; both prefixes have 8 characters
MAX_LIVE_KEYS = 25  # of one user
GRACE_SECONDS = 86400  # for which a rotated key stays good
TRUST_SECONDS = 1  # for which keys are remembered after a `refresh`
MAX_KNOWN = 100_000  # keys that are remembered, with their usage: about 100 MiB
CHALLENGE = {"WWW-Authenticate": 'ApiKey realm="api", header="X-API-Key"'}
QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"

View = Callable[[Key, Allowance], dict[str, object]]


def create_key(
    user: User,
    name: str,
    type: str,
    tier: str = DEFAULT_TIER,
    expires_at: int | None = None,
    random: str | None = None,
) -> tuple[ApiKey, str]:
    """Store a new key; the second value is the key itself, which is stored nowhere.

    It is made of 40 `random` base62 characters. Raises accounts.Invalid.
    """
    accounts.check(name=name, type=type)
    random = random or base62(secrets.randbelow(62**RANDOM_LENGTH), RANDOM_LENGTH)
    key = full_key(type, random)
    row = ApiKey(id=random[:ID_LENGTH], user=user, name=name, type=type, tier=tier)
    row.digest, row.expires_at = digest(key), expires_at
    with models.database.connection_context(), models.database.atomic():
        models.lock(user)
        if ApiKey.select().where(ApiKey.user == user, ApiKey.live()).count() >= MAX_LIVE_KEYS:
            raise accounts.Invalid(name=f"You have {MAX_LIVE_KEYS} keys, the maximum.")
        row.save(force_insert=True)
    return row, key


def rotate_key(
    key: ApiKey, grace_seconds: int = GRACE_SECONDS, random: str | None = None
) -> tuple[ApiKey, str]:
    """Make a successor of a live key, and end the key when the grace is over.

    The successor has the same name, type, tier and lifetime. Raises accounts.Invalid.
    """
    now = models.now()
    with models.database.connection_context(), models.database.atomic():
        end = now + grace_seconds
        end = min(key.expires_at or end, end)
        # With `revoked_at` it was rotated before, and `expires_at` no longer tells its lifetime.
        if key.revoked_at or not models.change_key(key.id, expires_at=end, revoked_at=end):
            raise accounts.Invalid(name="This key has ended or was rotated; create a new one.")
        expires_at = key.expires_at and now + key.expires_at - key.created_at
        return create_key(key.user, key.name, key.type, key.tier, expires_at, random)


def full_key(type: str, random: str) -> str:
    """The key that is made of these random characters."""
    key = f"{PREFIXES[type]}{random[:ID_LENGTH]}_{random[ID_LENGTH:]}"
    return key + checksum(key)


def checksum(text: str) -> str:
    """CRC-32 in six base62 characters: finds mistyped and made-up keys without the database."""
    return base62(zlib.crc32(text.encode()), CHECKSUM_LENGTH)


def is_well_formed(key: str) -> bool:
    """Whether this can be a key at all."""
    return bool(KEY_FORMAT.fullmatch(key)) and key.endswith(checksum(key[:-CHECKSUM_LENGTH]))


def base62(number: int, length: int) -> str:
    """The last `length` base62 digits of the number."""
    characters = ""
    for _ in range(length):
        number, index = divmod(number, len(BASE62))
        characters = BASE62[index] + characters
    return characters


def digest(key: str) -> str:
    """What is stored of a key. SHA-256 is enough, because 190 random bits cannot be guessed."""
    return sha256(key.encode()).hexdigest()


def bad_key() -> Problem:
    """The same response for every kind of bad key."""
    return Problem(401, "invalid_api_key", "This API key is not valid.", headers=CHALLENGE)


class Guard:
    """Checks keys and counts their requests; remembers keys while nobody changes the database."""

    def __init__(
        self, quotas: Mapping[str, Quota], limiter: Limiter, find_key: Callable[[str], Key | None]
    ) -> None:
        self.limiter = limiter
        self._quotas, self._find_key = quotas, find_key
        self._known: dict[str, Key] = {}  # by digest
        self._trusted_until = 0.0

    def check(self, presented: str | None) -> Key:
        """The key that was presented, if it is good; raises Problem 401, or PeeweeException."""
        if not presented:
            raise Problem(401, "missing_api_key", "Send your key in X-API-Key.", headers=CHALLENGE)
        key = self.find(presented)
        if not key:
            raise bad_key()
        return key

    def find(self, presented: str) -> Key | None:
        """The key, or None if it is malformed, unknown, wrong, revoked or expired."""
        if time.monotonic() >= self._trusted_until:  # the background could not look for changes
            self.refresh()
        fingerprint, known = digest(presented), self._known
        key = known.get(fingerprint)
        if key is None and is_well_formed(presented):
            key = self._find_key(presented[KEY_ID])
            if key is None or not compare_digest(key.digest, fingerprint):
                return None
            known[fingerprint] = key  # dropped with the others, if `refresh` was called meanwhile
        return None if key is None or key.has_ended() else key

    def refresh(self, changed: bool = True) -> None:
        """Forget keys and usage if the database has changed, or if they are too many.

        What is remembered then is trusted for TRUST_SECONDS.
        """
        if changed or len(self._known) > MAX_KNOWN:
            self._known = {}
            self.limiter.forget()
        self._trusted_until = time.monotonic() + TRUST_SECONDS

    def allowance(self, key: Key | ApiKey, cost: int = 0) -> Allowance:
        """What is left for the key after a request of this cost; raises PeeweeException."""
        quota = self._quotas.get(key.tier) or self._quotas[DEFAULT_TIER]
        return self.limiter.hit(key.id, quota, Usage(key.total, key.reset, key.used), cost)

    def spend(self, key: Key, cost: int = 1) -> Allowance:
        """Count this request; raises Problem 429, or PeeweeException."""
        request.environ[ALLOWANCE] = allowance = self.allowance(key, cost)
        if allowance.accepted:
            return allowance
        quota, reset = allowance.quota, date_time(allowance.reset)
        detail = f"All {quota.limit} requests of this window are used up."
        retry = {"Retry-After": str(allowance.seconds_left)}
        members = {"type": QUOTA_EXCEEDED, "violated-policies": [quota.tier], "reset_time": reset}
        raise Problem(429, "rate_limited", detail, headers=retry, **members)


def guard() -> Guard:
    """The app's guard."""
    found: Guard = current_app.extensions["guard"]
    return found


def require_api_key(view: View) -> Callable[[], dict[str, object]]:
    """Call the view for a good key within its limits, with the key and what is left for it."""

    @wraps(view)
    def guarded() -> dict[str, object]:
        checker = guard()
        key = checker.check(request.environ.get("HTTP_X_API_KEY"))
        return view(key, checker.spend(key))

    return guarded
