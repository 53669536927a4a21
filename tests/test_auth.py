"""How keys are made, changed, checked and counted; what is not exactly a key is refused."""

import re
import string
from collections.abc import Callable, Iterator

import peewee
import pytest
from flask import Flask
from flask.testing import FlaskClient

import auth
import models
from clock import NOON, Clock
from conftest import NewKey
from models import ApiKey, Invalid, User
from paths import TEST
from ratelimit import Allowance
from rows import change, count, row

Find = Callable[[str], ApiKey | None]


@pytest.fixture
def find(app: Flask) -> Iterator[Find]:
    with app.app_context():
        yield auth.find_key


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time at which keys are made and end: `clock.now`."""
    clock = Clock()
    monkeypatch.setattr(models, "time", clock)
    monkeypatch.setattr(ApiKey.created_at, "default", models.now)
    return clock


def with_checksum(key: str) -> str:
    return key[:-6] + auth.checksum(key[:-6])


def other(character: str) -> str:
    return "b" if character == "a" else "a"


@pytest.mark.parametrize(("type", "prefix"), [("production", "live"), ("development", "test")])
def test_new_key_has_form_and_row(owner: User, clock: Clock, type: str, prefix: str) -> None:
    made, key = auth.create_key(owner, "my ci", type, tier="pro", expires_at=NOON + 5)
    assert re.fullmatch(rf"sk_{prefix}_[0-9A-Za-z]{{8}}_[0-9A-Za-z]{{38}}", key)
    assert key == with_checksum(key)
    stored = row(key)
    assert stored == made
    about = (stored.user_id, stored.name, stored.type, stored.tier)
    assert about == (owner.id, "my ci", type, "pro")
    assert (stored.created_at, stored.expires_at, stored.revoked_at) == (NOON, NOON + 5, None)
    assert auth.create_key(owner, "ci", type)[0].tier == "free"


def test_two_keys_share_nothing_and_use_the_whole_alphabet(new_key: NewKey) -> None:
    keys = [new_key() for _ in range(25)]
    for part in (slice(8, 16), slice(17, 49)):
        assert len({key[part] for key in keys}) == 25
    used = {character for key in keys for character in key[17:49]}
    assert used <= set(string.digits + string.ascii_letters)
    assert len(used) > 55, "800 characters at random lack few of the 62"


def test_twenty_sixth_live_key_is_a_successor_or_waits_for_the_end_of_one(new_key: NewKey) -> None:
    first, second, third, *_ = [new_key() for _ in range(25)]
    for key, ended in ((first, {"revoked_at": 1}), (second, {"expires_at": 1})):
        with pytest.raises(Invalid, match=r"^You have 25 keys, the maximum"):
            new_key()
        assert change(key, **ended)
        new_key()
    auth.rotate_key(row(third), models.now() + 60)
    with pytest.raises(Invalid, match="the maximum"):
        new_key()
    assert count() == 28


def test_fifty_keys_are_live_at_most_while_some_are_being_rotated(new_key: NewKey) -> None:
    end = models.now() + 60
    keys = [new_key() for _ in range(25)]
    successors = [auth.rotate_key(row(key), end)[1] for key in keys]
    with pytest.raises(Invalid, match=r"^You have 50 keys, the maximum"):
        auth.rotate_key(row(successors[0]), end)
    assert (count(), row(successors[0]).rotated_at) == (50, None)
    assert auth.revoke_key(row(keys[0]).id)
    assert auth.rotate_key(row(successors[0]), end)


def test_successor_goes_on_with_the_window(owner: User, clock: Clock) -> None:
    _, key = auth.create_key(owner, "my ci", "development", tier="pro", expires_at=NOON + 1000)
    read_before = row(key)
    change(key, total=9, reset=8, used=7, last_used_at=9)
    clock.now += 900
    successor, new = auth.rotate_key(read_before, auth.grace_end(read_before, 86400))
    stored = row(new)
    assert stored == successor
    same = (stored.user_id, stored.name, stored.type, stored.tier)
    assert same == (owner.id, "my ci", "development", "pro")
    assert (stored.total, stored.reset, stored.used, stored.last_used_at) == (0, 8, 7, None)
    assert stored.expires_at == NOON + 900 + 1000, "the same lifetime"
    assert row(key).expires_at == NOON + 1000, "the grace makes no key last longer"


def test_only_a_right_checksum_asks_the_database(find: Find, key: str) -> None:
    with models.database.connection_context():
        models.database.drop_tables([ApiKey])
    assert find(key[:-1] + other(key[-1])) is None
    with pytest.raises(peewee.OperationalError):
        find(key)


def test_key_that_was_made_by_1_0_0_stays_valid(owner: User, find: Find) -> None:
    digest = "fa01ea3c65f267241808e524548f61f62c03900537fa1661dd7e8de7a6567838"
    with models.database.connection_context():
        ApiKey.create(id="a" * 8, user=owner, name="ci", type="production", digest=digest)
    assert find(f"sk_live_{'a' * 8}_{'b' * 32}119ada")


def test_unlisted_tier_is_treated_as_free(client: FlaskClient, new_key: NewKey) -> None:
    answer = client.get(TEST, headers={"X-API-Key": new_key(tier="dropped")})
    assert answer.get_json()["rate_limit_tier"] == "free"
    assert answer.headers["RateLimit-Policy"].startswith('"free";')


def test_endpoint_that_does_not_count_tells_what_is_left(app: Flask, new_key: NewKey) -> None:
    @auth.require_api_key(counted=False)
    def quota(key: ApiKey, allowance: Allowance) -> dict[str, object]:
        return {"left": allowance.remaining}

    app.add_url_rule("/api/v1/left", "left", quota)
    client, headers = app.test_client(), {"X-API-Key": new_key(tier="five")}
    for left in (5, 4, 3, 2, 1, 0, 0):
        answers = [client.get("/api/v1/left", headers=headers) for _ in range(2)]
        assert [answer.get_json() for answer in answers] == [{"left": left}] * 2
        assert answers[0].headers["X-RateLimit-Remaining"] == str(left)
        client.get(TEST, headers=headers)
    assert client.get("/api/v1/left").status_code == 401
