"""The rules for names and addresses, storing and finding users, and hashing passwords."""

import secrets
import time

import gevent
import pytest
from flask import Flask
from werkzeug.exceptions import ServiceUnavailable

import accounts
import auth
import models
from accounts import Invalid
from models import ApiKey, HourlyUsage, User

NAME_RULE = "Use 2 to 32 letters, digits, dots, dashes or underscores, the first a letter or digit."


def stored() -> list[str]:
    with models.database.connection_context():
        return [user.username for user in User.select().order_by(User.id)]


def find(username: str) -> User | None:
    with models.database.connection_context():
        return accounts.find(username)


# The rules

GOOD = [
    ("username", "ad"),
    ("username", "a" * 32),
    ("username", "0ada"),
    ("username", "Ada.Lovelace-1815_"),
    ("email", "ada@example.com"),
    ("email", "ada+ci@mail.example.co.uk"),
    ("email", f"{'a' * 64}@example.com"),
    ("email", "\u00e4da@ex\u00e4mple.com"),
    ("password", "a" * 10),
    ("password", "a" * 256),
    ("password", "        \u00e4 \U0001f511"),
    ("name", "a"),
    ("name", "a" * 64),
    ("name", "Ada's CI <prod> \u00e4"),
]
BAD = [
    ("username", ""),
    ("username", "a"),
    ("username", "a" * 33),
    ("username", ".ada"),
    ("username", "-ada"),
    ("username", "_ada"),
    ("username", "ada lovelace"),
    ("username", "ada\n"),
    ("username", "\u00e4da"),
    ("username", "ada@example.com"),
    ("username", "<b>ada"),
    ("email", ""),
    ("email", "ada"),
    ("email", "ada@"),
    ("email", "@example.com"),
    ("email", "ada@example"),
    ("email", "ada@.com"),
    ("email", "ada@example."),
    ("email", "ada@example..com"),
    ("email", "ada@exam@ple.com"),
    ("email", "ada lovelace@example.com"),
    ("email", "ada@example.com\n"),
    ("email", "ada@example.com\r\nBcc: mallory@example.com"),
    ("email", "ada\x1b[2J@example.com"),
    ("email", "ada\0@example.com"),
    ("email", "ada\u202e@example.com"),
    ("email", f"{'a' * 65}@example.com"),
    ("email", f"ada@{'a' * 250}.com"),
    ("password", ""),
    ("password", "a" * 9),
    ("password", "a" * 257),
    ("password", "\udcff" * 10),
    ("name", ""),
    ("name", "a" * 65),
    ("name", "two\nlines"),
    ("name", "a\ttab"),
    ("name", "a\x1b[2J"),
]


@pytest.mark.parametrize(("field", "text"), GOOD)
def test_good_field_is_accepted(field: str, text: str) -> None:
    accounts.check(**{field: text})


@pytest.mark.parametrize(("field", "text"), BAD)
def test_bad_field_is_refused_by_its_name(field: str, text: str) -> None:
    with pytest.raises(Invalid) as invalid:
        accounts.check(**{field: text})
    assert set(invalid.value.errors) == {field}


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(Invalid) as invalid:
        accounts.check(username="a", email="ada@example.com", password="short")
    assert invalid.value.errors == {"username": NAME_RULE, "password": "Use 10 to 256 characters."}
    assert str(invalid.value) == f"username: {NAME_RULE} password: Use 10 to 256 characters."


# Users


def test_new_user_is_stored(app: Flask) -> None:
    user = accounts.create("ada", "ada@example.com", secrets.token_urlsafe())
    assert find("ada") == user


def test_invalid_user_is_not_stored(app: Flask) -> None:
    with pytest.raises(Invalid):
        accounts.create("ada", "nowhere", secrets.token_urlsafe())
    assert stored() == []


@pytest.mark.parametrize(
    ("username", "email", "field"),
    [
        ("ada", "bob@example.com", "username"),
        ("Ada", "bob@example.com", "username"),
        ("bob", "ada@example.com", "email"),
        ("bob", "ADA@example.com", "email"),
    ],
)
def test_taken_name_or_address_is_refused_by_its_field(
    ada: User, username: str, email: str, field: str
) -> None:
    with pytest.raises(Invalid) as invalid:
        accounts.create(username, email, secrets.token_urlsafe())
    assert invalid.value.errors == {field: "This is already taken."}
    assert stored() == ["ada"]


def test_changed_name_is_stored(ada: User) -> None:
    ada.username = "lovelace"
    accounts.save(ada)
    assert stored() == ["lovelace"]


def test_changing_to_a_taken_name_is_refused(ada: User) -> None:
    bob = accounts.create("bob", "bob@example.com", secrets.token_urlsafe())
    bob.username = "ADA"
    with pytest.raises(Invalid, match="username: This is already taken"):
        accounts.save(bob)
    assert stored() == ["ada", "bob"]


@pytest.mark.parametrize("name", ["ada", "ADA", "Ada", "ada@example.com", "Ada@Example.COM"])
def test_user_is_found_by_name_or_address_ignoring_case(ada: User, name: str) -> None:
    assert find(name) == ada


@pytest.mark.parametrize("username", ["", "bob", "ada ", "a%", "ad_", "ada@", "@example.com"])
def test_other_names_find_nobody(ada: User, username: str) -> None:
    assert find(username) is None


# Passwords


@pytest.fixture(scope="module")
def password() -> str:
    return secrets.token_urlsafe()


@pytest.fixture(scope="module")
def user(password: str) -> User:
    """A user with that password, in no database."""
    return User(username="ada", password_hash=accounts.hash_password(password))


def test_right_password_is_verified(user: User, password: str) -> None:
    assert accounts.verify_password(user, password)


def test_wrong_password_is_not_verified(user: User, password: str) -> None:
    for wrong in (password.swapcase(), password[:-1], f"{password} ", ""):
        assert not accounts.verify_password(user, wrong)


def test_no_password_is_right_without_a_user(password: str) -> None:
    assert not accounts.verify_password(None, password)
    assert not accounts.verify_password(None, "")


def test_hash_is_salted_scrypt(user: User, password: str) -> None:
    assert user.password_hash.startswith("scrypt:")
    assert password not in user.password_hash
    assert accounts.hash_password(password) != user.password_hash


def test_verifying_without_a_user_costs_as_much_as_with_one(user: User) -> None:
    cost, salt, digest = user.password_hash.split("$")
    work, grain, hashed = accounts.NOBODY.split("$")
    assert (work, len(grain), len(hashed)) == (cost, len(salt), len(digest))


def test_other_greenlets_run_while_a_password_is_hashed(password: str) -> None:
    others = gevent.spawn(lambda: "ran")
    accounts.hash_password(password)
    assert others.value == "ran"


def test_other_greenlets_run_while_a_password_is_verified(user: User, password: str) -> None:
    others = gevent.spawn(lambda: "ran")
    accounts.verify_password(user, password)
    assert others.value == "ran"


def test_when_too_many_passwords_wait_the_next_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "QUEUE_SECONDS", 0.01)
    accounts.HASHING.spawn(time.sleep, 0.2)
    with pytest.raises(ServiceUnavailable) as refusal:
        accounts.verify_password(None, "a password")
    assert refusal.value.retry_after


def test_deleted_user_takes_keys_and_usage_along(ada: User, key: str) -> None:
    bob = accounts.save(User(username="bob", email="bob@example.com", password_hash=""))
    with models.database.connection_context():
        auth.create_key(bob, "ci", "production")
        HourlyUsage.create(hour=0, key_id=key[8:16], requests=1)
        HourlyUsage.create(hour=0, key_id="of bob's", requests=1)
        accounts.delete(ada)
        left = [User.get(), ApiKey.get().user, HourlyUsage.get().key_id]
        assert (left, ApiKey.select().count()) == ([bob, bob, "of bob's"], 1)
