"""How keys are made, changed, checked and counted; what is not exactly a key is refused."""

import re
import secrets
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import product

import peewee
import pytest
from flask import Flask
from flask.testing import FlaskClient

import auth
from accounts import api_keys
from conftest import NewKey
from helpers.clock import NOON, Clock
from helpers.paths import GATE, STATS, TEST
from helpers.stored import change, count, rotate_key, row
from models import ApiKey, InvalidInput, User, db, now
from ratelimit import Usage
from settings import PROJECT

Find = Callable[[str], ApiKey | None]


@pytest.fixture
def find(app: Flask) -> Iterator[Find]:
    with app.app_context():
        yield auth.find_key


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time at which keys are made and end: `clock.now`."""
    clock = Clock()
    monkeypatch.setattr("models.time", clock)
    monkeypatch.setattr(ApiKey.created_at, "default", now)
    return clock


@pytest.mark.parametrize(("type", "prefix"), [("production", "live"), ("development", "test")])
def test_new_key_has_form_and_row(
    owner: User, find: Find, clock: Clock, type: str, prefix: str
) -> None:
    made, key = api_keys.create_key(owner, "my ci", type, tier="pro", expires_at=NOON + 5)
    assert re.fullmatch(rf"sk_{prefix}_[0-9A-Za-z]{{8}}_[0-9A-Za-z]{{38}}", key)
    assert key[-6:] == sha256(key[:-6].encode()).hexdigest()[:6], "older keys would be bad ones"
    assert {
        "id": key[8:16],
        "digest": sha256(key.encode()).hexdigest(),
        "user": owner.id,
        "name": "my ci",
        "type": type,
        "tier": "pro",
        "created_at": NOON,
        "expires_at": NOON + 5,
    }.items() <= row(key).__data__.items()
    assert find(key) == made, "a new key is not found: see find_key in auth.py"
    clock.now += 5
    assert find(key) is None, (
        "a key is taken after its expires_at: see has_expired, and find_key in auth.py"
    )


def test_two_keys_share_nothing_and_use_the_whole_alphabet(new_key: NewKey) -> None:
    keys = [new_key() for _ in range(25)]
    assert len({key[8:16] for key in keys}) == len({key[17:49] for key in keys}) == 25
    assert len({character for key in keys for character in key[17:49]}) > 55, (
        "800 characters at random lack few of the 62"
    )


def test_a_user_has_fifty_keys_with_those_in_their_grace(owner: User, new_key: NewKey) -> None:
    """Those that have expired do not count, deleted or not."""
    keys = [new_key() for _ in range(49)]
    keys.append(rotate_key(owner, keys[0][8:16], 60)[2])
    for one_more in (new_key, lambda: rotate_key(owner, keys[1][8:16], 60)):
        with pytest.raises(InvalidInput, match=r"^A user can have 50 keys\. Revoke one first\.$"):
            one_more()
    assert (count(), row(keys[1]).rotated_at) == (50, None), "the refused rotation did something"
    assert rotate_key(owner, keys[49][8:16], 60)[1].predecessor == keys[0][8:16], (
        "which ends that one: the new key replaces the one before it"
    )
    assert rotate_key(owner, keys[1][8:16], 0)
    assert change(keys[2], expires_at=now())
    assert new_key()


def test_successor_goes_on_with_the_window(owner: User, clock: Clock) -> None:
    _, key = api_keys.create_key(owner, "my ci", "development", tier="pro", expires_at=NOON + 1000)
    change(key, total=9, reset=8, used=7, last_used_at=9)
    api_keys.change_key(owner, key[8:16], name="my ci")
    clock.now += 900
    new = rotate_key(owner, key[8:16])[2]
    assert {
        **{"user": owner.id, "name": "my ci", "type": "development", "tier": "pro"},
        **{"total": 0, "reset": 8, "used": 7, "last_used_at": None},
        **{"created_at": NOON + 900, "expires_at": NOON + 900 + 1000},
    }.items() <= row(new).__data__.items()
    assert row(key).usage == Usage(9, 8, 7), (
        "a rotation or another name gives a new allowance: see change_key, and save only=[...]"
    )
    assert row(key).expires_at == NOON + 1000, "the grace makes no key last longer"
    clock.now += 1000
    with pytest.raises(InvalidInput, match="has ended"):
        rotate_key(owner, new[8:16])


@pytest.mark.parametrize("tier", ["free", "tiny"])
def test_successor_has_the_later_of_two_windows_or_more_of_the_same(owner: User, tier: str) -> None:
    """When it replaces both keys, and when one of them is revoked; every pair of windows.

    The window of a key of another tier is not taken over.
    """
    for one, other in product(product((1, 2), (0, 1, 2)), repeat=2):
        _, first = api_keys.create_key(owner, "ci", reset=one[0], used=one[1])
        second = rotate_key(owner, first[8:16])[2]
        change(second, tier=tier, total=9, reset=other[0], used=other[1])
        third = rotate_key(owner, second[8:16])[2]
        assert row(third).usage == (0, *(max(one, other) if tier == "free" else other)), (
            f"see api_keys.successor: {one}, {other}"
        )
        change(third, tier="free", reset=one[0], used=one[1])
        api_keys.revoke_key(owner, second[8:16], list)
        assert row(third).usage == (0, *(max(one, other) if tier == "free" else one)), (
            f"see revoke_key: {one}, {other}"
        )


def test_each_column_of_a_key_is_inherited_or_not_on_purpose() -> None:
    own = {
        *("id", "digest", "nonce", "predecessor", "total", "reset", "used"),
        *("created_at", "expires_at", "rotated_at", "last_used_at"),
    }
    assert {*ApiKey._meta.columns} == own | {*api_keys.INHERITED}, (
        "name them in api_keys.INHERITED if a successor takes them over, or here"
    )
    (told,) = re.findall(
        "a new key with the same (.*?)[.]", (PROJECT / "web/templates/change-key.html").read_text()
    )
    assert {"user_id", *re.findall(r"\w+", told)} == {*api_keys.INHERITED, "and", "lifetime"}, (
        "edit change-key.html"
    )


@db.connection_context()
def test_only_a_right_checksum_asks_the_database(find: Find, key: str) -> None:
    db.drop_tables([ApiKey])
    assert find(key[:-1] + ("b" if key[-1] == "a" else "a")) is None, "see has_right_checksum"
    with pytest.raises(peewee.OperationalError):
        find(key)


def test_digests_are_compared_in_constant_time(
    find: Find, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "compare_digest", lambda first, second: False)
    assert not find(key), "its row was found, and nothing else may compare digests"


def test_unlisted_tier_is_treated_as_free_and_logged_once(
    client: FlaskClient, new_key: NewKey, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = [secrets.token_hex(8) for _ in range(2)]  # none of which this process has named before
    for key in [new_key(tier=tier) for tier in (tiers[0], *tiers)]:
        answer = client.get(GATE, headers={"X-API-Key": key})
        assert answer.headers["X-Auth-Tier"] == "free", "see quota_of in auth.py"
        for path in (TEST, STATS):
            answer = client.get(path, headers={"X-API-Key": key})
            assert answer.get_json()["rate_limit_tier"] == "free", f"{path}: use allowance.quota"
            assert answer.headers["RateLimit-Policy"].startswith('"free";'), f"see quota_of: {path}"
    assert caplog.messages == [
        f"RATE_LIMITS has no tier {tier}; its keys are treated as free" for tier in tiers
    ], "each tier that RATE_LIMITS lacks is logged once: see warn_once and quota_of"
