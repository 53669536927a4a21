"""API keys: what they look like, and how they are made, changed and ended."""

import re
import secrets
from hashlib import sha256
from string import ascii_letters, digits
from typing import Any

from models import DEFAULT_TYPE, PREFIXES, ApiKey, Invalid, User, check_fields, now
from storage.database import transaction

BASE62 = digits + ascii_letters
KEY_START = re.compile(f"(?:{'|'.join(PREFIXES.values())})([{BASE62}]{{8}})")  # with the ID
MAX_KEYS = 50  # of one user, with those that were rotated and are in their grace period
GRACE_SECONDS = 86400  # how long a rotated key stays valid
INHERITED = ("user_id", "name", "type", "tier", "reset", "used")  # by the successor of a key


def create_key(
    user: User, name: str, type: str = DEFAULT_TYPE, **columns: Any
) -> tuple[ApiKey, str]:
    """Store a new key; the second value is the key itself, which is stored nowhere.

    Other columns may be given: `id`, `tier`, `expires_at`. Raises Invalid, and peewee's
    IntegrityError if there is a key with this id.
    """
    check_fields(name=name, type=type)
    with transaction(user.id):
        return _store(ApiKey(user=user, name=name, type=type, **columns))


def rotate_key(key: ApiKey, grace_seconds: int = GRACE_SECONDS) -> tuple[ApiKey, str]:
    """Store a successor to a key, which is returned as by `create_key`.

    It has the same name, type, tier and lifetime, and goes on with the window as it was last saved.
    The old key ends after the grace period, or earlier by itself; `key` is updated. Raises Invalid.
    """
    with transaction(key.user_id):
        old = ApiKey.get_or_none(ApiKey.id == key.id, ApiKey.valid())  # as it is now
        if not old or old.rotated_at:
            raise Invalid(key="This key has ended or was rotated; create a new one.")
        new = ApiKey(**{name: getattr(old, name) for name in INHERITED})
        if old.expires_at:
            new.expires_at = now() + old.expires_at - old.created_at
        key.rotated_at, end = now(), now() + grace_seconds
        key.expires_at = min(old.expires_at or end, end)
        key.save(only=["rotated_at", "expires_at"])
        return _store(new)


def _store(key: ApiKey) -> tuple[ApiKey, str]:
    """Store a key, in a transaction of its user."""
    key.id = key.id or random_text(8)
    secret = f"{PREFIXES[key.type]}{key.id}_{random_text(32)}"
    secret += checksum(secret)
    key.digest = digest(secret)
    key.save(force_insert=True)  # a form that is sent again has the same id: IntegrityError
    if ApiKey.select().where(ApiKey.user == key.user_id, ApiKey.valid()).count() > MAX_KEYS:
        raise Invalid(key=f"A user can have {MAX_KEYS} keys. Revoke one first.")
    return key, secret


def random_text(length: int) -> str:
    """Random base62 characters, 5.95 bits each."""
    return "".join(secrets.choice(BASE62) for _ in range(length))


def id_from_form(text: str) -> str:
    """The ID of a key that is made only once for this text; a client cannot choose it."""
    return "".join(BASE62[byte % 62] for byte in sha256(text.encode()).digest()[:8])


def change_key(key_id: str, **columns: object) -> bool:
    """Change a key; False if there is no valid key with this id."""
    with transaction():
        return bool(ApiKey.update(**columns).where(ApiKey.id == key_id, ApiKey.valid()).execute())


def revoke_key(key_id: str) -> bool:
    """Delete a key; False if there is no key with this id."""
    with transaction():
        return bool(ApiKey.delete().where(ApiKey.id == key_id).execute())


def digest(key: str) -> str:
    """The digest that is stored instead of a key.

    SHA-256 is enough, because 190 random bits cannot be guessed.
    """
    return sha256(key.encode()).hexdigest()


def checksum(text: str) -> str:
    """The last six characters of a key: detects mistyped and made-up keys without the database."""
    return digest(text)[:6]
