"""The rules for what may be typed, users and their passwords."""

import ast
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unicodedata import normalize
from unittest import mock

import gevent
import pytest
from werkzeug.security import check_password_hash

from accounts import api_keys, users
from conftest import new_user
from helpers.described import misfits, parts_of
from helpers.documents import API, SOCKETS
from helpers.server import REPOSITORY, sources
from helpers.stored import rotate_key
from models import PREFIXES, ApiKey, Changed, InvalidInput, User, check_fields, db

RULES = {  # what is accepted, and what is refused
    "username": (
        ["ad", "a" * 32, "0ada", "Ada.Lovelace-1815_"],
        ["", "a", "a" * 33, ".ada", "-ada", "_ada", "ada lovelace", "ada\n", "\u00e4da", "a@b.c"],
    ),
    "email": (
        [
            *("ada@example.com", "ada+ci@mail.example.co.uk", f"{'a' * 64}@example.com"),
            *(f"ada@{'a' * 246}.com", "o'brien!#$%&*+-/=?^_`{|}~.1@ex-ample.com"),
        ],
        [
            *("", "ada", "ada@", "@example.com", "ada@example", "ada@.com", "ada@example."),
            *("\u00e4@example.com", "ada@\u00e4.de"),
            *("ada@example..com", "ada@exam@ple.com", "ada lovelace@example.com"),
            *("ada@example.com\n", "ada\x1b[2J@example.com", "ada\0@example.com"),
            *("ada\u202e@example.com", f"{'a' * 65}@example.com", f"ada@{'a' * 247}.com"),
        ],
    ),
    "password": (
        ["a" * 10, "a" * 256, "        \u00e4\t\U0001f511"],
        ["", "a" * 9, "a" * 257, "\udcff" * 10],
    ),
    "name": (
        [
            *(
                "a",
                "a" * 64,
                "Ada's CI <prod> \u00e4",
                "\U0001f469\u200d\U0001f4bb",
                "10\xa0ms",
                "a\u2000\u200a\u202f\u205fb",
                "\U0001f3f4\U000e0020\U000e0067\U000e007f",
                "\u3042\u3000\u3044",
                "\U0001fa77\U0001faff",
            ),
            "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u0d28\u0d4d\u200d",
        ],
        [
            *(
                "",
                " ",
                "a" * 65,
                "two\nlines",
                "a\ttab",
                "a\x1b[2J",
                "\xa0",
                "\u200d",
                "\u200d " * 9,
            ),
            *("a\x85", "a\u2028b", "a\u200b", "a\u202eb", "a\ufeff", "a\udcff", "a\0"),
            *(f"{prefix}{'a' * 47}" for prefix in PREFIXES.values()),
        ],
    ),
    "type": (["production", "development"], ["", "Production", "live"]),
}
PASSWORD = "a password of hers".ljust(256, ".")  # no password is longer


@pytest.mark.parametrize(
    ("field", "text"), [(field, text) for field, (good, _) in RULES.items() for text in good]
)
def test_text_is_accepted(field: str, text: str) -> None:
    """And fits whatever the descriptions say of this field."""
    check_fields(**{field: text})
    name = field if hasattr(User, field) else f"api_key_{field}"
    wrong = [
        found
        for description in (API, SOCKETS)
        for part in parts_of(description)
        if isinstance(part, dict) and name in part.get("properties", ())
        for found in misfits(text, part["properties"][name], description, name)
    ]
    assert not wrong, (
        f"FIELD_RULES takes more: edit docs/openapi.json or docs/asyncapi.json: {wrong}"
    )


@pytest.mark.parametrize(
    ("field", "text"), [(field, text) for field, (_, bad) in RULES.items() for text in bad]
)
def test_text_is_refused_by_its_field(field: str, text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_fields(**{field: text})
    assert refused.value.errors.keys() == {field}, "see FIELD_RULES and check_fields in models.py"


@pytest.mark.usefixtures("with_sample")  # so also in PostgreSQL, which quotes what is taken
@pytest.mark.parametrize("text", ["email", "EMAIL", "username@b.example", "USERNAME@b.Example"])
def test_taken_name_or_address_is_refused_by_its_field(text: str) -> None:
    users.create("eMail", "userName@b.example", "")
    assert users.find_user(text), "a log-in asks for other capitals than typed: see find_user"
    taken = {"email" if "@" in text else "username": text}
    with pytest.raises(InvalidInput) as invalid:
        users.create(**{"username": "bob", "email": "bob@example.com"} | taken, password_hash="")
    assert invalid.value.errors == dict.fromkeys(taken, "This is already taken."), (
        "see _taken_is_invalid: the index that the first line of the error names"
    )


@pytest.fixture(scope="module")
def user() -> User:
    """A user with the password, in no database."""
    return User(username="ada", password_hash=users.hash_password(PASSWORD))


def test_password_is_the_same_in_every_unicode_form() -> None:
    composed, decomposed = (normalize(form, "Grüße für \uff21da") for form in ("NFKC", "NFD"))
    assert users.verify_password(User(password_hash=users.hash_password(decomposed)), composed), (
        "a password typed on another keyboard (NFC, NFD) is wrong: normalize it in _scrypt"
    )


def test_no_password_is_right_without_a_user_and_it_costs_as_much_to_find_out(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = mock.Mock(wraps=check_password_hash)
    monkeypatch.setattr(users, "check_password_hash", check)
    assert not users.verify_password(None, "x"), "a password is right although there is no user"
    assert [users.verify_password(user, text) for text in ("x", "", "x" * 257, PASSWORD)] == [
        *(False, False, False, True)
    ], "a wrong password is right, or a right one of 256 characters is wrong"
    assert [call.args[0].partition("$")[0] for call in check.call_args_list] == [
        *("scrypt:32768:8:1", "scrypt:32768:8:1", "scrypt:32768:8:1")
    ], (
        "without a user, a hash is checked, too (see UNMATCHABLE_HASH), and none of a text that is "
        "empty or too long: see verify_password in accounts/users.py"
    )


def test_others_have_their_turn_while_a_password_is_hashed(user: User) -> None:
    for work in (users.hash_password, lambda text: users.verify_password(user, text)):
        other = gevent.spawn(lambda: "ran")
        work(PASSWORD)
        assert other.value == "ran", "nobody else runs while a password is hashed: see _scrypt"


def test_one_password_is_hashed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def hash_slowly(*_: object) -> None:
        time.sleep(0.001)
        threads.add(threading.get_ident())

    monkeypatch.setattr(users, "check_password_hash", hash_slowly)
    gevent.joinall([gevent.spawn(users.verify_password, None, "a password") for _ in range(9)])
    assert len(threads) == 1, "one hash at a time, in one thread: see hashing_thread and _scrypt"


def test_number_of_a_deleted_user_is_given_to_nobody_else(owner: User) -> None:
    users.delete(owner)
    assert new_user("bob").id > owner.id, "the number is given away: see NumberField in models.py"


DECISIONS: dict[str, Callable[[User, str], object]] = {
    "delete": lambda user, key_id: users.delete(user),
    "rename": lambda user, key_id: users.change(user, username="eve"),
    "change the password": lambda user, key_id: users.change(user, password_hash=""),
    "create a key": lambda user, key_id: api_keys.create_key(user, "ci"),
    "rotate a key": rotate_key,
    "revoke a key": lambda user, key_id: api_keys.revoke_key(user, key_id, list),
}


@pytest.mark.parametrize("decided", DECISIONS)
@pytest.mark.parametrize("what", ["deleted", "has another password", "number given away"])
@db.connection_context()
def test_what_was_decided_on_another_row_is_not_done(owner: User, decided: str, what: str) -> None:
    """A file that was made without AUTOINCREMENT gives the number of a deleted user away."""
    key_id = api_keys.create_key(owner, "ci")[0].id
    if what == "has another password":
        users.change(owner, password_hash="of today")
    else:
        users.delete(owner)
    if what == "number given away":
        User.create(id=owner.id, username="bob", email="bob@example.com", password_hash="of Bob")
    before = [*User.select().tuples(), *ApiKey.select().tuples()]
    with pytest.raises(Changed, match="nothing was done"):
        DECISIONS[decided](owner, key_id)
    assert [*User.select().tuples(), *ApiKey.select().tuples()] == before, (
        f"to {decided} has changed rows, though the user is {what}: do it in transaction(user)"
    )


WRITE = re.compile(
    r"(?i:\b(?:user|\w*owner)\."
    r"(?:update|delete|save|delete_instance|delete_by_id|set_by_id|bulk_update)\b)"
    r"(?!\((\w+)=User\.\1 \+ [^,]+\))"
    r"|(?:UPDATE|DELETE FROM) \"?user\b(?!\"? SET (\w+) = \2 \+ [^,]+ WHERE)"
)


# `with transaction(user)`, and what is inside.
IN_TRANSACTION = r"(?m)^( *)with .*\btransaction\(user.*:\n(\1 .*\n|\n)*"


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_users_are_changed_in_transactions_of_the_user_only(file: Path) -> None:
    """So a row that has become that of somebody else cannot be changed; adding to a count may."""
    code = re.sub(IN_TRANSACTION, "", ast.unparse(ast.parse(file.read_text())))
    found = {match[0] for match in WRITE.finditer(code)}
    if file.name == "database.py":
        found -= {"User.update"}  # the lock in `transaction` itself
    assert not found, f"{file.name}: do this inside `with transaction(user):`"
