"""Keys are made, checked, remembered and forgotten; Mallory changes one in every way she knows."""

import re
import sqlite3
import string
from collections.abc import Callable
from pathlib import Path

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
    app.extensions["guard"].limiter = Limiter(models.load_usage, clock=lambda: now[0])
    return now


def ask(client: FlaskClient, key: str | None, path: str = TEST) -> TestResponse:
    return client.get(path, headers={} if key is None else {"X-API-Key": key})


def lose_keys() -> None:
    """From now on, whoever asks the database for a key gets an error."""
    with models.database.connection_context():
        models.database.drop_tables([ApiKey])


def revoke_elsewhere(key: str) -> None:
    """Revoke as another process does: this one is not told."""
    with models.database.connection_context():
        assert models.change_key(key[8:16], revoked_at=models.now())


def resealed(key: str) -> str:
    """The same text with the checksum that belongs to it."""
    return key[:-6] + auth.checksum(key[:-6])


def other(character: str) -> str:
    return "b" if character == "a" else "a"


# The form of a key


@pytest.mark.parametrize(("type", "prefix"), [("production", "live"), ("development", "test")])
def test_key_says_what_it_is(new_key: NewKey, type: str, prefix: str) -> None:
    assert re.fullmatch(rf"sk_{prefix}_[0-9A-Za-z]{{8}}_[0-9A-Za-z]{{38}}", new_key(type=type))


def test_key_ends_in_its_checksum(key: str) -> None:
    assert key == resealed(key)


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
    assert (stored.user_id, stored.revoked_at) == (ada.id, None)


def test_new_key_is_of_the_free_tier(ada: User) -> None:
    with models.database.connection_context():
        assert auth.create_key(ada, "ci", "production")[0].tier == "free"


def test_the_database_holds_a_digest_and_no_secret(key: str, tmp_path: Path) -> None:
    models.database.close_all()
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("test.db*"))
    assert auth.digest(key).encode() in stored
    assert key[17:].encode() not in stored
    assert key[17:49].encode() not in stored


def test_twenty_five_live_keys_are_enough(new_key: NewKey, guard: Guard) -> None:
    for _ in range(25):
        new_key()
    with pytest.raises(Invalid, match="There are 25 live keys already"):
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
    assert found == (key[8:16], ada.id, "ci", "production", "free", auth.digest(key))


MUTATIONS: dict[str, Callable[[str], str]] = {
    "empty id": lambda key: key[:8] + key[16:],
    "no prefix": lambda key: key[8:],
    "other prefix": lambda key: key.replace("live", "test"),
    "other prefix, resealed": lambda key: resealed(key.replace("live", "test")),
    "capital prefix, resealed": lambda key: resealed(key.replace("sk_live", "SK_LIVE")),
    "other id": lambda key: key[:8] + other(key[8]) + key[9:],
    "other id, resealed": lambda key: resealed(key[:8] + other(key[8]) + key[9:]),
    "other separator, resealed": lambda key: resealed(key[:16] + "-" + key[17:]),
    "first of the secret": lambda key: key[:17] + other(key[17]) + key[18:],
    "first of the secret, resealed": lambda key: resealed(key[:17] + other(key[17]) + key[18:]),
    "last of the secret, resealed": lambda key: resealed(key[:48] + other(key[48]) + key[49:]),
    "last of the checksum": lambda key: key[:-1] + other(key[-1]),
    "no checksum": lambda key: key[:-6],
    "zero checksum": lambda key: key[:-6] + "000000",
    "one character less": lambda key: key[:-1],
    "one character more": lambda key: key + "a",
    "a shorter secret, resealed": lambda key: resealed(key[:-7] + key[-6:]),
    "a longer secret, resealed": lambda key: resealed(key[:-6] + "a" + key[-6:]),
    "twice": lambda key: key + key,
    "two secrets swapped": lambda key: resealed(key[:17] + key[33:49] + key[17:33] + key[49:]),
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
    "any one for the id": lambda key: resealed(key[:8] + "%" * 8 + key[16:]),
    "quote for the id": lambda key: resealed(key[:8] + "' OR 1=1" + key[16:]),
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
    assert guard.find(resealed(one[:17] + two[17:])) is None


def test_wrong_checksum_touches_no_database(guard: Guard, key: str) -> None:
    lose_keys()
    assert guard.find(key[:-1] + other(key[-1])) is None


def test_right_checksum_asks_the_database(guard: Guard, key: str) -> None:
    lose_keys()
    with pytest.raises(peewee.OperationalError):
        guard.find(key)


@pytest.mark.parametrize("presented", [None, ""])
def test_no_key_is_told_to_bring_one(guard: Guard, presented: str | None) -> None:
    with pytest.raises(Problem) as refusal:
        guard.check(presented)
    assert refusal.value.response
    assert refusal.value.response.status_code == 401


def test_no_key_gets_another_answer_than_a_bad_one(client: FlaskClient, ada: User) -> None:
    assert ask(client, None).json != ask(client, "bad").json
    assert ask(client, None).get_json()["code"] == "missing_api_key"


def test_every_bad_key_gets_the_same_answer(client: FlaskClient, new_key: NewKey) -> None:
    revoked, live = new_key(), new_key()
    revoke_elsewhere(revoked)
    unknown = resealed(live[:8] + other(live[8]) + live[9:])
    wrong = resealed(live[:17] + other(live[17]) + live[18:])
    answers = [ask(client, bad) for bad in (revoked, unknown, wrong, live[:-1], "malformed")]
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


# Remembering and forgetting


def test_seen_key_needs_no_database(guard: Guard, key: str) -> None:
    guard.check(key)
    lose_keys()
    assert guard.check(key)


def test_forgotten_key_is_looked_up_again(guard: Guard, key: str) -> None:
    guard.check(key)
    revoke_elsewhere(key)
    assert guard.find(key), "it is still remembered"
    del guard.known[key[8:16]]
    assert guard.find(key) is None


def test_memory_of_keys_is_bounded(
    guard: Guard, new_key: NewKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "REMEMBERED_KEYS", 2)
    keys = [new_key() for _ in range(3)]
    assert all(guard.find(key) for key in keys)
    assert len(guard.known) <= 2


def test_unknown_keys_take_no_memory(guard: Guard, key: str) -> None:
    guard.find(resealed(key[:8] + other(key[8]) + key[9:]))
    assert not guard.known


# Spending


def test_six_requests_of_five(client: FlaskClient, new_key: NewKey, clock: list[float]) -> None:
    key = new_key(tier="five")
    statuses = [ask(client, key).status_code for _ in range(6)]
    assert statuses == [200] * 5 + [429]


def test_used_up_key_is_told_when_to_come_back(
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


def test_after_the_turn_a_used_up_key_works_again(
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


def test_every_good_answer_carries_both_header_families(
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
