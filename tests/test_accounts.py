"""The rules for what may be typed, users and their passwords."""

import secrets
import threading
import time
from unicodedata import normalize

import gevent
import pytest
from werkzeug.exceptions import ServiceUnavailable

import accounts
from models import Invalid, User, check_fields

RULES = {  # what is accepted, and what is refused
    "username": (
        ["ad", "a" * 32, "0ada", "Ada.Lovelace-1815_"],
        ["", "a", "a" * 33, ".ada", "-ada", "_ada", "ada lovelace", "ada\n", "\u00e4da", "a@b.c"],
    ),
    "email": (
        ["ada@example.com", "ada+ci@mail.example.co.uk", f"{'a' * 64}@example.com"],
        [
            *("", "ada", "ada@", "@example.com", "ada@example", "ada@.com", "ada@example."),
            *("\u00e4@example.com", "ada@\u00e4.de"),
            *("ada@example..com", "ada@exam@ple.com", "ada lovelace@example.com"),
            *("ada@example.com\n", "ada\x1b[2J@example.com", "ada\0@example.com"),
            *("ada\u202e@example.com", f"{'a' * 65}@example.com", f"ada@{'a' * 250}.com"),
        ],
    ),
    "password": (
        ["a" * 10, "a" * 256, "        \u00e4\t\U0001f511"],
        ["", "a" * 9, "a" * 257, "\udcff" * 10],
    ),
    "name": (
        ["a", "a" * 64, "Ada's CI <prod> \u00e4"],
        ["", " ", "a" * 65, "two\nlines", "a\ttab", "a\x1b[2J"],
    ),
    "type": (["production", "development"], ["", "Production", "live"]),
}
PASSWORD = secrets.token_urlsafe()


def errors(**fields: str) -> dict[str, str]:
    try:
        check_fields(**fields)
    except Invalid as invalid:
        return invalid.errors
    return {}


@pytest.mark.parametrize("field", RULES)
def test_field_is_accepted_or_refused_by_its_name(field: str) -> None:
    good, bad = RULES[field]
    for text in good:
        assert not errors(**{field: text}), repr(text)
    for text in bad:
        assert errors(**{field: text}).keys() == {field}, repr(text)


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize("text", ["ada", "ADA", "ada@example.com", "ADA@Example.com"])
def test_taken_name_or_address_is_refused_by_its_field(text: str) -> None:
    field = "email" if "@" in text else "username"
    bob = {"username": "bob", "email": "bob@example.com", "password": PASSWORD}
    with pytest.raises(Invalid) as invalid:
        accounts.create(**bob | {field: text})
    assert invalid.value.errors == {field: "This is already taken."}
    assert accounts.find_user("bob") is accounts.find_user("bob@example.com") is None


@pytest.fixture(scope="module")
def user() -> User:
    """A user with the password, in no database."""
    return User(username="ada", password_hash=accounts.hash_password(PASSWORD))


def test_password_is_the_same_in_every_unicode_form() -> None:
    composed, decomposed = (normalize(form, "Grüße für Ada") for form in ("NFC", "NFD"))
    user = User(password_hash=accounts.hash_password(decomposed))
    assert composed != decomposed
    assert accounts.verify_password(user, composed)


def test_no_password_is_right_without_a_user_and_it_costs_as_much_to_find_out(user: User) -> None:
    def seconds(user: User | None) -> float:
        spent = []
        for _ in range(3):
            started = time.process_time()
            assert not accounts.verify_password(user, "")
            spent.append(time.process_time() - started)
        return min(spent)

    assert 0.5 < seconds(None) / seconds(user) < 2


def test_others_have_their_turn_while_a_password_is_hashed(user: User) -> None:
    for work in (accounts.hash_password, lambda text: accounts.verify_password(user, text)):
        other = gevent.spawn(lambda: "ran")
        work(PASSWORD)
        assert other.value == "ran"


def test_one_password_is_hashed_at_a_time_and_a_hundred_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, most, refused = 0, 0, threading.Event()

    def hash_slowly(*_: object) -> bool:
        nonlocal running, most
        running += 1
        most = max(most, running)
        refused.wait(30)
        time.sleep(0.001)
        running -= 1
        return True

    monkeypatch.setattr(accounts, "check_password_hash", hash_slowly)
    waiting = [gevent.spawn(accounts.verify_password, None, "a password") for _ in range(100)]
    gevent.idle()
    with pytest.raises(ServiceUnavailable) as refusal:
        accounts.verify_password(None, "a password")
    refused.set()
    assert refusal.value.retry_after
    assert all(asking.get(timeout=30) for asking in waiting)
    assert most == 1


def test_hash_that_fails_gives_its_place_in_the_queue_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(accounts, "check_password_hash", fail)
        for _ in range(101):
            with pytest.raises(MemoryError):
                accounts.verify_password(None, "a password")
    assert not accounts.verify_password(None, "a password")
