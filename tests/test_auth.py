"""How keys are made, checked, remembered and counted; changed keys are refused."""

import re
import sqlite3
import string
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import peewee
import pytest
from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

import auth
import models
from accounts import Invalid
from auth import Guard
from conftest import NewKey
from models import ApiKey, User
from protocol.problems import Problem
from ratelimit import Limiter, Quota

NOON = 1_795_262_400  # 2026-11-21T12:00:00Z
TEST = "/api/v1/protected/test"
BODY = slice(8, 16), slice(17, 49)  # where the id is, and the secret


@pytest.fixture
def guard(app: Flask) -> Guard:
    found: Guard = app.extensions["guard"]
    return found


@pytest.fixture
def clock(app: Flask) -> list[float]:
    """The limiter's time: `clock[0]`."""
    now: list[float] = [NOON]
    app.extensions["guard"].limiter = Limiter(saves=True, clock=lambda: now[0])
    return now


def ask(client: FlaskClient, key: str | None, path: str = TEST) -> TestResponse:
    return client.get(path, headers={} if key is None else {"X-API-Key": key})


def lose_keys() -> None:
    """From now on every look-up of a key fails."""
    with models.database.connection_context():
        models.database.drop_tables([ApiKey])


def revoke_elsewhere(key: str) -> None:
    """Revoke as another process does, so that this one forgets nothing."""
    with models.database.connection_context():
        assert models.revoke_key(key[8:16])


def expire(key: str, moment: int | None) -> None:
    with models.database.connection_context():
        assert models.change_key(key[8:16], expires_at=moment)


def with_checksum(key: str) -> str:
    """The same text with the right checksum."""
    return key[:-6] + auth.checksum(key[:-6])


def other(character: str) -> str:
    return "b" if character == "a" else "a"


# The form of a key


@pytest.mark.parametrize(("type", "prefix"), [("production", "live"), ("development", "test")])
def test_key_shows_its_type(new_key: NewKey, type: str, prefix: str) -> None:
    assert re.fullmatch(rf"sk_{prefix}_[0-9A-Za-z]{{8}}_[0-9A-Za-z]{{38}}", new_key(type=type))


def test_key_ends_in_its_checksum(key: str) -> None:
    assert key == with_checksum(key)


def test_two_keys_share_nothing(new_key: NewKey) -> None:
    one, two = new_key(), new_key()
    assert all(one[part] != two[part] for part in BODY)


def test_secrets_use_the_whole_alphabet(new_key: NewKey) -> None:
    used = {character for _ in range(25) for character in new_key()[17:49]}
    assert used <= set(string.digits + string.ascii_letters)
    assert all(used & set(part) for part in (string.digits, string.ascii_lowercase))
    assert used & set(string.ascii_uppercase)


@pytest.mark.parametrize(
    ("text", "checksum"),
    [("", "000000"), ("a", "4gehkn"), ("123456789", "3Jzrme")],
)
def test_checksum_is_crc_32_in_base_62(text: str, checksum: str) -> None:
    assert auth.checksum(text) == checksum


# What is stored


def test_row_describes_the_key(ada: User) -> None:
    with models.database.connection_context():
        row, key = auth.create_key(ada, "ci", "development", "pro")
        stored = ApiKey.get_by_id(key[8:16])
    assert stored == row
    assert (stored.name, stored.type, stored.tier) == ("ci", "development", "pro")
    assert (stored.user_id, stored.expires_at, stored.revoked_at) == (ada.id, None, None)


def test_new_key_is_of_the_free_tier(ada: User) -> None:
    with models.database.connection_context():
        assert auth.create_key(ada, "ci", "production")[0].tier == "free"


def test_the_database_holds_a_digest_and_no_secret(key: str, tmp_path: Path) -> None:
    models.database.close_all()
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("test.db*"))
    assert auth.digest(key).encode() in stored
    assert key[17:].encode() not in stored
    assert key[17:49].encode() not in stored


def test_twenty_sixth_live_key_is_refused(new_key: NewKey, guard: Guard) -> None:
    for _ in range(25):
        new_key()
    with pytest.raises(Invalid, match="You have 25 keys, the maximum"):
        new_key()
    with models.database.connection_context():
        assert ApiKey.select().count() == 25


def test_a_revoked_key_makes_room(new_key: NewKey) -> None:
    first, *_ = [new_key() for _ in range(25)]
    revoke_elsewhere(first)
    assert new_key()


# The check


def test_good_key_is_found(guard: Guard, key: str, ada: User) -> None:
    found = guard.check(key)
    row = (key[8:16], ada.id, "ci", "production", "free", auth.digest(key))
    assert found == (*row, None, None, 0, 0, 0)


MUTATIONS: dict[str, Callable[[str], str]] = {
    "empty id": lambda key: key[:8] + key[16:],
    "no prefix": lambda key: key[8:],
    "other prefix": lambda key: key.replace("live", "test"),
    "other prefix, right checksum": lambda key: with_checksum(key.replace("live", "test")),
    "capital prefix, right checksum": lambda key: with_checksum(key.replace("sk_live", "SK_LIVE")),
    "other id": lambda key: key[:8] + other(key[8]) + key[9:],
    "other id, right checksum": lambda key: with_checksum(key[:8] + other(key[8]) + key[9:]),
    "other separator, right checksum": lambda key: with_checksum(key[:16] + "-" + key[17:]),
    "first of the secret": lambda key: key[:17] + other(key[17]) + key[18:],
    "first of the secret, right checksum": lambda key: with_checksum(
        key[:17] + other(key[17]) + key[18:]
    ),
    "last of the secret, right checksum": lambda key: with_checksum(
        key[:48] + other(key[48]) + key[49:]
    ),
    "last of the checksum": lambda key: key[:-1] + other(key[-1]),
    "no checksum": lambda key: key[:-6],
    "zero checksum": lambda key: key[:-6] + "000000",
    "one character less": lambda key: key[:-1],
    "one character more": lambda key: key + "a",
    "a shorter secret, right checksum": lambda key: with_checksum(key[:-7] + key[-6:]),
    "a longer secret, right checksum": lambda key: with_checksum(key[:-6] + "a" + key[-6:]),
    "twice": lambda key: key + key,
    "two secrets swapped": lambda key: with_checksum(key[:17] + key[33:49] + key[17:33] + key[49:]),
    "upper case": str.upper,
    "lower case": str.lower,
    "reversed": lambda key: key[::-1],
    "space before": lambda key: " " + key,
    "space behind": lambda key: key + " ",
    "line end behind": lambda key: key + "\n",
    "null behind": lambda key: key + "\0",
    "quoted": lambda key: f'"{key}"',
    "as a bearer": lambda key: f"Bearer {key}",
    "as a list": lambda key: f"{key}, {key}",
    "its digest": auth.digest,
    "id only": lambda key: key[8:16],
    "prefix and id": lambda key: key[:16],
    "secret only": lambda key: key[17:],
    "wildcards for the id": lambda key: with_checksum(key[:8] + "%" * 8 + key[16:]),
    "quote for the id": lambda key: with_checksum(key[:8] + "' OR 1=1" + key[16:]),
    "letters that look alike": lambda key: key.replace("e", "\u0435"),
    "wide letters": lambda key: key.translate({c: c + 0xFEE0 for c in range(0x21, 0x7F)}),
    "one character": lambda key: key[0],
    "something else": lambda key: "password",
    "very long": lambda key: key * 1000,
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_changed_key_is_refused(guard: Guard, key: str, mutate: Callable[[str], str]) -> None:
    assert mutate(key) != key
    assert guard.find(mutate(key)) is None
    assert guard.find(key)
    assert guard.find(mutate(key)) is None, "now that the good one is remembered"


def test_one_key_with_the_secret_of_another_is_refused(guard: Guard, new_key: NewKey) -> None:
    one, two = new_key(), new_key()
    assert guard.find(with_checksum(one[:17] + two[17:])) is None


def test_wrong_checksum_needs_no_database(guard: Guard, key: str) -> None:
    lose_keys()
    assert guard.find(key[:-1] + other(key[-1])) is None


def test_right_checksum_asks_the_database(guard: Guard, key: str) -> None:
    lose_keys()
    with pytest.raises(peewee.OperationalError):
        guard.find(key)


@pytest.mark.parametrize("presented", [None, ""])
def test_no_key_is_refused(guard: Guard, presented: str | None) -> None:
    with pytest.raises(Problem) as refusal:
        guard.check(presented)
    assert refusal.value.response
    assert refusal.value.response.status_code == 401


def test_no_key_gets_another_response_than_a_bad_one(client: FlaskClient, ada: User) -> None:
    assert ask(client, None).json != ask(client, "bad").json
    assert ask(client, None).get_json()["code"] == "missing_api_key"


def test_every_bad_key_gets_the_same_answer(client: FlaskClient, new_key: NewKey) -> None:
    revoked, expired, live = new_key(), new_key(), new_key()
    revoke_elsewhere(revoked)
    expire(expired, models.now())
    unknown = with_checksum(live[:8] + other(live[8]) + live[9:])
    wrong = with_checksum(live[:17] + other(live[17]) + live[18:])
    answers = [
        ask(client, bad) for bad in (revoked, expired, unknown, wrong, live[:-1], "malformed")
    ]
    assert len({(answer.status, answer.data, str(answer.headers)) for answer in answers}) == 1
    assert answers[0].get_json()["code"] == "invalid_api_key"


@pytest.mark.parametrize("key_sent", [None, "bad"])
def test_refusal_says_which_header_is_wanted(client: FlaskClient, key_sent: str | None) -> None:
    challenge = ask(client, key_sent).headers["WWW-Authenticate"]
    assert challenge == 'ApiKey realm="api", header="X-API-Key"'


def test_key_in_the_query_is_no_key(client: FlaskClient, key: str) -> None:
    answer = client.get(TEST, query_string={"api_key": key})
    assert (answer.status_code, answer.get_json()["code"]) == (401, "missing_api_key")


def test_bearer_is_no_key(client: FlaskClient, key: str) -> None:
    answer = client.get(TEST, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 401


def test_revoked_key_is_refused(guard: Guard, key: str) -> None:
    revoke_elsewhere(key)
    assert guard.find(key) is None


# Expiry


@pytest.mark.parametrize(("left", "good"), [(1, True), (0.001, True), (0, False), (-1, False)])
def test_key_is_bad_from_the_second_at_which_it_expires(
    guard: Guard, key: str, monkeypatch: pytest.MonkeyPatch, left: float, good: bool
) -> None:
    expire(key, NOON + 9**9)
    monkeypatch.setattr(models, "time", SimpleNamespace(time=lambda: NOON + 9**9 - left))
    assert bool(guard.find(key)) == good


def test_remembered_key_expires_on_time(
    guard: Guard, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire(key, NOON + 9**9)
    assert guard.find(key)
    monkeypatch.setattr(models, "time", SimpleNamespace(time=lambda: NOON + 9**9))
    assert guard.find(key) is None


@pytest.mark.parametrize("path", [TEST, "/api/v1/user/me", "/api/v1/usage/stats"])
def test_expired_key_is_refused_by_every_protected_endpoint(
    client: FlaskClient, key: str, path: str
) -> None:
    expire(key, models.now())
    answer = ask(client, key, path)
    assert (answer.status_code, answer.get_json()["code"]) == (401, "invalid_api_key")


def test_expired_key_is_not_authenticated_and_not_counted(
    client: FlaskClient, new_key: NewKey
) -> None:
    expired, live = new_key(), new_key()
    expire(expired, models.now())
    assert not ask(client, expired, "/api/v1/status").get_json()["authenticated"]
    assert ask(client, live, "/api/v1/user/me").get_json()["api_key_count"] == 1


def test_key_is_made_with_its_end(ada: User) -> None:
    row, key = auth.create_key(ada, "ci", "production", expires_at=NOON)
    assert row.expires_at == NOON
    found = models.find_key(key[8:16])
    assert found
    assert found.expires_at == NOON


def test_expired_key_makes_room(new_key: NewKey) -> None:
    first, *_ = [new_key() for _ in range(25)]
    expire(first, models.now())
    assert new_key()


# Rotation


@pytest.fixture
def noon(monkeypatch: pytest.MonkeyPatch) -> int:
    """It is noon, for all that asks `models` for the time."""
    monkeypatch.setattr(models, "time", SimpleNamespace(time=lambda: NOON))
    return NOON


def rotate(key: str, grace: int = auth.GRACE_SECONDS) -> tuple[ApiKey, ApiKey, str]:
    """The rows of the key and of its successor, and the new key itself."""
    with models.database.connection_context():
        row, secret = auth.rotate_key(ApiKey.get_by_id(key[8:16]), grace)
        return ApiKey.get_by_id(key[8:16]), row, secret


def test_successor_has_the_same_name_type_and_tier(new_key: NewKey, guard: Guard) -> None:
    key = new_key(name="my ci", type="development", tier="pro")
    _, row, secret = rotate(key)
    found = guard.find(secret)
    assert found
    assert found[:5] == (row.id, row.user_id, "my ci", "development", "pro")
    assert secret[8:] != key[8:]


def test_successor_has_used_nothing(new_key: NewKey) -> None:
    key = new_key()
    with models.database.connection_context():
        ApiKey.update(total=9, reset=9, used=9, last_used_at=9).execute()
    _, row, _ = rotate(key)
    assert (row.total, row.reset, row.used, row.last_used_at) == (0, 0, 0, None)


@pytest.mark.parametrize(("grace", "end"), [((), 86_400), ((0,), 0), ((5,), 5)])
def test_rotated_key_ends_after_the_grace(
    key: str, noon: int, grace: tuple[int, ...], end: int
) -> None:
    old, new, _ = rotate(key, *grace)
    assert (old.expires_at, new.expires_at) == (NOON + end, None)
    assert (old.state, new.state) == ("live" if end else "revoked", "live")


def test_both_keys_are_good_during_the_grace(
    guard: Guard, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, secret = rotate(key, 5)
    assert guard.find(key)
    assert guard.find(secret)
    later = models.now() + 5
    monkeypatch.setattr(models, "time", SimpleNamespace(time=lambda: later))
    assert guard.find(key) is None
    assert guard.find(secret)


def test_grace_makes_no_key_last_longer(key: str, noon: int) -> None:
    expire(key, NOON + 60)
    assert rotate(key)[0].expires_at == NOON + 60


def test_successor_has_the_same_lifetime(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(seconds=NOON)
    monkeypatch.setattr(models, "time", SimpleNamespace(time=lambda: now.seconds))
    monkeypatch.setattr(ApiKey.created_at, "default", models.now)
    _, key = auth.create_key(ada, "ci", "production", expires_at=NOON + 1000)
    now.seconds += 900
    assert rotate(key)[1].expires_at == NOON + 900 + 1000


def test_rotated_key_cannot_be_rotated_again(key: str, noon: int) -> None:
    rotate(key)
    with pytest.raises(Invalid, match="was rotated"):
        rotate(key)


@pytest.mark.parametrize("how", ["expired", "revoked"])
def test_key_that_has_ended_cannot_be_rotated(key: str, how: str) -> None:
    if how == "expired":
        expire(key, models.now())
    else:
        revoke_elsewhere(key)
    with pytest.raises(Invalid, match="This key has ended"):
        rotate(key)
    with models.database.connection_context():
        assert ApiKey.select().count() == 1


def test_rotation_of_the_twenty_fifth_key_is_refused_and_changes_nothing(
    new_key: NewKey,
) -> None:
    """Both keys would be live during the grace."""
    key, *_ = [new_key() for _ in range(25)]
    with pytest.raises(Invalid, match="You have 25 keys, the maximum"):
        rotate(key)
    with models.database.connection_context():
        assert ApiKey.get_by_id(key[8:16]).expires_at is None
        assert ApiKey.select().count() == 25


def test_rotation_of_the_twenty_fifth_key_at_once_is_accepted(new_key: NewKey) -> None:
    key, *_ = [new_key() for _ in range(25)]
    assert rotate(key, 0)[1].state == "live"


# Remembering and forgetting


def test_seen_key_needs_no_database(guard: Guard, key: str) -> None:
    guard.check(key)
    lose_keys()
    assert guard.check(key)


def test_forgotten_key_is_looked_up_again(guard: Guard, key: str) -> None:
    guard.check(key)
    revoke_elsewhere(key)
    guard.refresh()
    assert guard.find(key) is None


def test_key_is_trusted_for_a_second_at_most(
    guard: Guard, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(auth, "time", SimpleNamespace(monotonic=lambda: now))
    guard.refresh()
    assert guard.find(key)
    revoke_elsewhere(key)
    now += 0.99
    assert guard.find(key), "it is still remembered"
    now = 1001.0
    assert guard.find(key) is None


def test_use_does_not_make_a_key_trusted_for_longer(
    guard: Guard, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(auth, "time", SimpleNamespace(monotonic=lambda: now))
    guard.refresh()
    for _ in range(4):
        assert guard.find(key)
        now += 0.25
    revoke_elsewhere(key)
    assert guard.find(key) is None


def test_unknown_keys_take_no_memory(guard: Guard, key: str) -> None:
    guard.find(with_checksum(key[:8] + other(key[8]) + key[9:]))
    assert not guard._known


# Spending


def test_six_requests_of_five(client: FlaskClient, new_key: NewKey, clock: list[float]) -> None:
    key = new_key(tier="five")
    statuses = [ask(client, key).status_code for _ in range(6)]
    assert statuses == [200] * 5 + [429]


def test_refusal_of_a_used_up_key_says_when_to_retry(
    client: FlaskClient, new_key: NewKey, clock: list[float]
) -> None:
    key = new_key(tier="five")
    clock[0] += 17.5
    refusal = [ask(client, key) for _ in range(6)][-1]
    assert refusal.headers["Retry-After"] == "43"
    assert refusal.json == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Too Many Requests",
        "status": 429,
        "detail": "All 5 requests of this window are used up.",
        "code": "rate_limited",
        "violated-policies": ["five"],
        "reset_time": "2026-11-21T12:01:00Z",
    }


def test_used_up_key_works_again_in_the_next_window(
    client: FlaskClient, new_key: NewKey, clock: list[float]
) -> None:
    key = new_key(tier="five")
    for _ in range(6):
        ask(client, key)
    clock[0] += 60
    assert ask(client, key).status_code == 200


def test_bad_keys_spend_nothing_of_the_good_one(
    client: FlaskClient, key: str, guard: Guard, clock: list[float]
) -> None:
    for mutate in MUTATIONS.values():
        guard.find(mutate(key))
    ask(client, key[:-1] + other(key[-1]))
    assert guard.limiter.hit(key[8:16], Quota("free", 1000, 3600), cost=0).total == 0


def test_every_good_response_carries_both_header_families(
    client: FlaskClient, key: str, clock: list[float]
) -> None:
    headers = ask(client, key).headers
    assert headers["RateLimit-Policy"] == '"free";q=1000;w=3600'
    assert headers["RateLimit"] == '"free";r=999;t=3600'
    assert headers["X-RateLimit-Limit"] == "1000"
    assert headers["X-RateLimit-Remaining"] == "999"
    assert headers["X-RateLimit-Reset"] == str(NOON + 3600)


def test_refusal_of_a_used_up_key_carries_them_too(
    client: FlaskClient, new_key: NewKey, clock: list[float]
) -> None:
    key = new_key(tier="five")
    headers = [ask(client, key) for _ in range(6)][-1].headers
    assert headers["RateLimit"] == '"five";r=0;t=60'
    assert headers["X-RateLimit-Remaining"] == "0"


def test_refusal_of_a_bad_key_carries_none(client: FlaskClient, ada: User) -> None:
    assert not [name for name, _ in ask(client, "bad").headers if "ratelimit" in name.lower()]


def test_unlisted_tier_is_treated_as_free(client: FlaskClient, new_key: NewKey) -> None:
    answer = ask(client, new_key(tier="dropped"))
    assert answer.get_json()["rate_limit_tier"] == "free"
    assert answer.headers["RateLimit-Policy"].startswith('"free";')


def test_nothing_in_a_key_row_is_the_key(key: str, tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "test.db")
    row = connection.execute("SELECT * FROM api_key").fetchone()
    connection.close()
    assert not [column for column in row if key[17:] in str(column)]
