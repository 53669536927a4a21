"""API keys: what they look like, and how they are made, changed and ended."""

import re
import secrets
from collections.abc import Callable
from hashlib import sha256
from string import ascii_letters, digits

from peewee import Expression, Tuple

from models import DEFAULT_TYPE, PREFIXES, ApiKey, Changed, InvalidInput, User, check_fields, now
from ratelimit import CLOCK_SKEW
from settings import MAX_KEYS
from storage.database import transaction

BASE62 = digits + ascii_letters
KEY_START = re.compile(f"(?:{'|'.join(PREFIXES.values())})([{BASE62}]{{8}})")
KEY_IS_GONE = "There is no such key: it was revoked, or has expired."
# The columns that a successor takes over.
INHERITED = ("user_id", "name", "type", "tier")


class AlreadyMade(Exception):
    """A form was sent again; the argument is the key that it made, which is still valid."""


def create_key(
    user: User, name: str, type: str = DEFAULT_TYPE, most: int = MAX_KEYS, **columns: object
) -> tuple[ApiKey, str]:
    """Store a new key; returns its row, and the key itself, which is stored nowhere.

    Other columns may be given: `tier`, `expires_at`, `nonce`. Raises InvalidInput, also if the user
    would have more keys than `most`; Changed; and AlreadyMade if a key of the user has this nonce.
    """
    check_fields(name=name, type=type)
    key = ApiKey(user=user, name=name, type=type, **columns)
    with transaction(user):
        same_form = user.keys.where(ApiKey.nonce == key.nonce, ApiKey.valid())
        if key.nonce and (earlier := same_form.get_or_none()):
            raise AlreadyMade(earlier)
        return _store(key, most)


def rotate_key(
    user: User,
    key_id: str,
    grace_seconds: int,
    save_counts: Callable[[], object],
    only_if_unused: bool = False,
) -> tuple[ApiKey, ApiKey, str]:
    """Store a successor to a key of the user.

    Returns the row of the key that it replaces, its own row, and the new key itself. The old key
    ends after the grace period, or when it expires, if that is earlier.

    Besides the successor, one older key stays valid. Usually that is the key itself, and the one
    that it had replaced ends. If the key was never used, perhaps because nobody has seen it, the
    key ends, and the older one keeps its expiry.

    `save_counts` is KeyStore.save_to_keys, because the rows have to include what was just counted.
    With `only_if_unused`, nothing is done unless the key ends because it was never used: that is
    what a page has said. Raises Changed and InvalidInput.
    """
    save_counts()  # before the rows are read
    with transaction(user):
        key = locked(is_own(user, key_id) & ApiKey.valid() & ApiKey.rotated_at.is_null())
        if not key:
            raise InvalidInput(key="This key has ended or was rotated; create a new one.")
        older = locked(is_own(user, key.predecessor) & ApiKey.valid())
        if only_if_unused and (key.total or not older):
            raise InvalidInput(
                key="The keys have changed in the meantime, so none of them was ended."
            )
        kept, ended = (older, key) if older and not key.total else (key, older)
        new = successor(key, older)
        new.predecessor = kept.id
        if kept is key:
            # Without a grace period, the key has to have ended by a clock that is behind, too.
            end = now() + (grace_seconds or -CLOCK_SKEW)
            key.rotated_at = now()
            key.expires_at = min(key.expires_at or end, end)
            key.save(only=["rotated_at", "expires_at"])
        if ended:
            ended.delete_instance()
        return kept, *_store(new)  # after the deletion, because it counts the keys of the user


def successor(key: ApiKey, older: ApiKey | None) -> ApiKey:
    """A key like this one, not stored yet, with the same lifetime.

    It goes on with the window of the key and of the one before it: otherwise, each of many
    rotations would give another allowance.
    """
    new = ApiKey(**{name: getattr(key, name) for name in INHERITED})
    if key.expires_at:
        new.expires_at = now() + key.expires_at - key.created_at
    new.reset, new.used = max(
        (each.reset, each.used) for each in (key, older) if each and each.tier == key.tier
    )
    return new


def locked(condition: Expression) -> ApiKey | None:
    """The row of a key, which nobody else changes until the transaction ends.

    In PostgreSQL, the UPDATE locks it: otherwise, a request could be counted between the look at
    the row and its end, and the successor's window would lack it.
    """
    ApiKey.update(total=ApiKey.total).where(condition).execute()
    return ApiKey.get_or_none(condition)


def _store(key: ApiKey, most: int = MAX_KEYS) -> tuple[ApiKey, str]:
    """Store a key, in a transaction of its user.

    A user may have `most` keys that no other valid key has replaced, and MAX_KEYS in all.
    """
    if key.has_expired:
        raise InvalidInput(key="This key would have expired already.")
    predecessor_of = dict(
        ApiKey.select(ApiKey.id, ApiKey.predecessor)
        .where(ApiKey.user == key.user_id, ApiKey.valid())
        .tuples()
    )
    current = predecessor_of.keys() - predecessor_of.values()
    if len(predecessor_of) >= MAX_KEYS or len(current) >= most:
        advice = f"A user can have {most} {'key' if most == 1 else 'keys'}. Revoke one first."
        raise InvalidInput(key=advice if most else "Ask the operator of this service for a key.")
    key.id = random_text(8)
    # The type of a row that was edited by hand may be unknown.
    secret = f"{PREFIXES.get(key.type, PREFIXES[DEFAULT_TYPE])}{key.id}_{random_text(32)}"
    secret += checksum(secret)
    key.digest = digest(secret)
    key.save(force_insert=True)
    return key, secret


def change_key(user: User, key_id: str, **columns: str) -> None:
    """Change a key; raises InvalidInput, and Changed if the user has no valid key with this id."""
    check_fields(**columns)
    with transaction():
        if not ApiKey.update(**columns).where(is_own(user, key_id), ApiKey.valid()).execute():
            raise Changed(KEY_IS_GONE)


def revoke_key(user: User, key_id: str, save_counts: Callable[[], object]) -> ApiKey:
    """Delete a key, and return its row; raises Changed.

    Its successor goes on with its window, so nobody gets another allowance by revoking. Keys that
    have expired are deleted by KeyStore.delete_old_rows, those of a user by users.delete.
    """
    save_counts()  # before the row is read
    with transaction(user):
        old = locked(is_own(user, key_id) & ApiKey.valid())
        if old is None:
            raise Changed(KEY_IS_GONE)
        ApiKey.update(reset=old.reset, used=old.used).where(
            ApiKey.user == user,
            ApiKey.predecessor == key_id,
            ApiKey.tier == old.tier,
            # An earlier window, or less of the same one.
            Tuple(ApiKey.reset, ApiKey.used) < (old.reset, old.used),
        ).execute()
        old.delete_instance()
        return old


def is_own(user: User, key_id: str) -> Expression:
    """The condition that a key has this id and belongs to the user.

    Whatever changes a key uses it, so a mistaken id never changes another user's key.
    """
    return (ApiKey.id == key_id) & (ApiKey.user == user)


def id_in(text: str) -> str | None:
    """The ID in a key, or in the beginning of one; None if it begins otherwise."""
    return found[1] if (found := KEY_START.match(text)) else None


def has_right_checksum(key: str) -> bool:
    return key[-6:] == checksum(key[:-6])


def random_text(length: int) -> str:
    """Random base62 characters, 5.95 bits each."""
    return "".join(secrets.choice(BASE62) for _ in range(length))


def digest(key: str) -> str:
    """The digest that is stored instead of a key.

    SHA-256 is enough, because 190 random bits cannot be guessed.
    """
    return sha256(key.encode()).hexdigest()


def checksum(text: str) -> str:
    """The last six characters of a key: detects mistyped and made-up keys without the database."""
    return digest(text)[:6]
