"""The pages: who may do what, what comes back for bad input, and what leaks nowhere.

Ada and Bob have accounts; Mallory knows their names and writes forms on another site.
"""

import dataclasses
import re
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from html import unescape
from itertools import product
from typing import Any
from unittest import mock

import gevent.event
import pytest
from flask import Flask, abort
from flask.testing import FlaskClient
from markupsafe import escape
from werkzeug.test import TestResponse

import settings
from accounts import api_keys, users
from helpers import sample
from helpers.clock import NOON, Clock
from helpers.described import ENDPOINTS, NONSENSE, OPERATIONS
from helpers.documents import API
from helpers.paths import (
    ECHO,
    KEYS,
    PROFILE,
    SECURITY,
    SEVERAL,
    STATS,
    STATUS,
    TEST,
    TOTALS,
    YEAR,
    pages,
)
from helpers.stored import (
    HIDDEN,
    NAME,
    add_hidden_user,
    add_many_rows,
    add_rows,
    change,
    count,
    hidden_rows,
    left_behind,
    neglected,
    outage,
    remarked,
    row,
    snapshot,
    write,
)
from models import DAY, TABLES, ApiKey, Changed, HourlyUsage, User, db, now
from ratelimit import Limiter
from service.application import Service
from service.timestamps import date_time, display, relative_time
from web import forms, site

PASSWORD = " her  own "  # the shortest that is taken, with spaces that belong to it
SECRET = re.compile(r"sk_(?:live|test)_\w{8}_\w{38}")
# All other forms and pages need a log-in.
PUBLIC_FORMS = {"/sign-up", "/log-in", "/log-out"}
PUBLIC_PAGES = {"/", "/console", "/sign-up", "/log-in", "/openapi.json", "/asyncapi.json"}
# What Ada types into fields that are empty.
TYPED = {
    "username": "9.B_o-b",  # each kind of character
    "email": "bob@example.com",
    "password": PASSWORD,
    "current": PASSWORD,
    "confirmed": "ada",
}
TYPED_IN = r'<(?:input|textarea)(?![^>]*"(?:hidden|radio|password)")([^>]*) name="(\w+)"([^>]*)>'
# The ID of each field that needs a label of its own, or "".
LABELLED = (
    r'<(?:input|textarea|select)(?![^>]*(?: hidden|"hidden"|"radio"|"checkbox"))'
    r'(?:(?=[^>]* id="([^"]+)")|)'
)
# Each field that has a maxlength: its name, and this size.
SIZED = r'<(?:input|textarea)(?=[^>]* name="(\w+)")(?=[^>]* maxlength="(\d+)")'
PASSWORDS_ONLY = {"/log-in", f"{SECURITY}/password", f"{PROFILE}/delete"}  # keep nothing
# What each button sends that has a name.
BUTTONS = r'<button(?=[^>]* name="(\w+)")(?=[^>]* value="(.*?)")'
# What a browser checks before it sends a field: its name, the attribute, and this value.
CHECKED = r'<input(?=[^>]* name="(\w+)")[^>]* (pattern|minlength)="(.*?)"'
# Finds a page whose error nobody would notice: it has no alert, its title doesn't say so, the field
# is not marked as wrong, or no field has the focus.
UNNOTICED = re.compile(
    r'\A(?!.*role="alert")|<title>(?!Error: )|'
    r'class="error" id="(?!key|type)(\w+-note)"(?!.*="\1" aria-invalid="true")|'
    r'role="alert"><p class="error" id="(?!key|type)(?!.*autofocus)',
    re.DOTALL,
)
NOTICE = '<div role="status"><p class="notice">'  # a message
MARKUP = "<i>\"&'"
# Markup, or an attribute without quotes; werkzeug writes the html of redirects.
UNSAFE = re.compile(r"""<i>|<(?!html)[a-z](?:"[^"]*"|'[^']*'|[^"'>])*=(?!["'])""")
LONG = "x" * 300
WRONG = (
    *("", "-1", "\u00b2", "9" * 30, LONG, "a\tb", "\0", MARKUP),
    *("<i>@example.com", "https://example.com/<i>", "<i>long enough"),  # markup that a rule allows
)

LogIn = Callable[[str], FlaskClient]


@pytest.fixture
def log_in(app: Flask) -> LogIn:
    """Makes a user and a browser in which that user is logged in."""

    def enter(username: str) -> FlaskClient:
        browser = app.test_client()
        assert sign_up(browser, username).status_code == 303
        return browser

    return enter


@pytest.fixture
def ada(log_in: LogIn) -> FlaskClient:
    return log_in("ada")


def sign_up(browser: FlaskClient, name: str, **fields: str) -> TestResponse:
    return browser.post(
        "/sign-up",
        data={"username": name, "email": f"{name}@example.com", "password": PASSWORD} | fields,
    )


def log_in_as(
    browser: FlaskClient, username: str, password: str = PASSWORD, **how: Any
) -> TestResponse:
    return browser.post("/log-in", data={"username": username, "password": password}, **how)


def create_key(
    browser: FlaskClient, name: str = "ci", base_url: str | None = None, **fields: str
) -> TestResponse:
    return browser.post(KEYS, data={"name": name, "type": "production"} | fields, base_url=base_url)


def path_of(number: int) -> str:
    return f"{KEYS}/{stored_keys()[number].id}"


def secret_in(response: TestResponse) -> str:
    assert SECRET.search(response.text), (
        f"no new key is shown by {response.request.method} {response.request.path}: {response}, "
        f"which leads to {response.location} and says "
        f"{re.findall('class=.error.[^>]*>(.*?)<', response.text)}"
    )
    return str(*{*SECRET.findall(response.text)})


def ask_api(browser: FlaskClient, secret: str) -> TestResponse:
    return browser.get(TEST, headers={"X-API-Key": secret})


def is_logged_in(browser: FlaskClient) -> bool:
    return browser.get(SECURITY).status_code == 200


@db.connection_context()
def stored_keys() -> list[ApiKey]:
    return list(ApiKey.select().order_by(ApiKey.created_at, ApiKey.rotated_at.is_null()))


def routes(app: Flask, method: str) -> list[str]:
    """The paths of the pages that take this method, those of all stored keys among them."""
    return pages(app, method, "ada", *(key.id for key in stored_keys()))


# Signing up, logging in and out


@pytest.mark.parametrize(
    "config",
    [{"SIGNUPS": "closed"}, {"SIGNUPS": "closed", "API_URL": "https://api.example.com"}],
    indirect=True,
)
def test_closed_sign_ups_say_so(client: FlaskClient) -> None:
    console = client.get("/").text
    assert "sign-up" not in client.get("/log-in").text + console
    assert (
        len(re.findall("Log in</a>|Ask the operator of this service for an account", console)) == 3
    ), "a link in the header, a button, and a sentence"
    for path, send in product(("/sign-up", "/sign-up/", "/log-in"), (client.get, client.post)):
        answer = send(path, data=TYPED)
        assert {answer.status_code == 403, "Sign-up is closed" in answer.text} == {
            path.startswith("/sign-up")
        }, (
            f"{answer.request.method} {path} is {answer.status}: only sign-ups are closed, see "
            "send_logged_in_users_on in web/log_in.py"
        )


@pytest.mark.parametrize("config", [{"SECRET_KEY": ""}], indirect=True)  # a test client needs none
def test_every_failed_log_in_says_the_same(ada: FlaskClient, client: FlaskClient) -> None:
    for username, password in [("ada", "wrong password"), ("%da", PASSWORD), ("", "")]:
        answer = log_in_as(client, username, password)
        assert (answer.status_code, "Wrong user name or password." in answer.text) == (422, True), (
            f"each failed log-in has one status and one message: {username!r}: see log_in"
        )
    assert [
        step.location
        for step in (
            client.post(KEYS),
            log_in_as(client, " ADA@example.com"),
            client.get("/log-in"),
        )
    ] == ["/log-in", SECURITY, SECURITY], (
        "an address logs in, too, in any case of letters: see find_user in accounts/users.py; and "
        "who is logged in is sent on to the keys: see web/log_in.py"
    )
    assert NOTICE not in client.get(SECURITY).text, "an earlier session's message: start_session"


# Throttles


def test_twenty_passwords_a_minute_are_hashed_for_a_caller(
    app: Flask, ada: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right or wrong, for whatever account and form; one for her sign-up, two for a change."""
    assert {
        log_in_as(app.test_client(), name, "wrong").status_code
        for name in ["ada", "Ada@example.com", "nobody", "somebody"] * 4
    } == {422}, "only 16 of 20 passwords are sent, all wrong: see verify_throttled in web/forms.py"
    assert log_in_as(app.test_client(), "ada").status_code == 303, "this was the 18th password"
    assert ada.post(f"{SECURITY}/password", data=TYPED).status_code == 303
    monkeypatch.setattr(
        users, "_scrypt", mock.Mock(side_effect=AssertionError("the 21st of a minute is hashed"))
    )
    for refused in (
        log_in_as(app.test_client(), "ada"),
        sign_up(app.test_client(), "bob"),
        ada.post(f"{SECURITY}/password", data=TYPED),
        ada.post(f"{PROFILE}/delete", data=TYPED),
    ):
        assert refused.status_code == 429, (
            f"{refused.request.path}: the 21st password of a minute is not refused: see "
            "verify_throttled and hash_throttled in web/forms.py"
        )
        assert 1 <= int(refused.headers["Retry-After"]) <= 60, "the minute ends within 60 s"
        assert re.search(
            "Too many attempts.*Try again in [0-9]+ (s|min)", refused.text, re.DOTALL
        ), f"{refused.request.path}: the page does not say how long to wait: see error.html"


def attempt(app: Flask, caller: int, name: str, password: str = "wrong") -> int:
    """The status of a log-in from an address of its own."""
    return log_in_as(
        app.test_client(), name, password, environ_base={"REMOTE_ADDR": f"192.0.2.{caller}"}
    ).status_code


def test_one_address_locks_no_account_and_five_do(app: Flask, ada: FlaskClient) -> None:
    """What exceeds the limit of a caller does not count for the account, whatever its name is."""
    app.extensions["throttles"] = Limiter(Clock().time)
    assert [attempt(app, 1, "ada") for _ in range(60)] == [422] * 20 + [429] * 40, (
        "an address has 20 passwords a minute: see PASSWORDS and verify_throttled in web/forms.py"
    )
    assert {attempt(app, caller, "ada") for caller in (2, 3, 4, 5) for _ in range(19)} == {422}, (
        "one address locks the account: see verify_throttled, which counts for the caller first"
    )
    assert {attempt(app, 6, "ADA@example.com") for _ in range(3)} == {422}, (
        "an account is limited to 100 passwords a minute, and these are up to the 99th"
    )
    assert attempt(app, 7, "ada", PASSWORD) == 303, "the 100th password for an account is allowed"
    assert ada.post(PROFILE, data=TYPED | {"username": "countess"}).status_code == 303
    assert (
        log_in_as(
            app.test_client(), "countess", environ_base={"REMOTE_ADDR": "192.0.2.8"}
        ).headers.get("Retry-After")
        == "60"
    ), (
        "the 101st password for an account has to wait for the next minute, whatever the account "
        "is named now: see PASSWORDS_FOR_ACCOUNT in web/forms.py"
    )


def test_name_without_a_user_is_limited_as_an_account_is(app: Flask) -> None:
    assert {attempt(app, n // 20, "nobody" if n % 2 else "NOBODY") for n in range(100)} == {422}, (
        "a name has 100 passwords a minute, of all callers: see PASSWORDS_FOR_ACCOUNT"
    )
    assert (attempt(app, 101, "Nobody"), attempt(app, 102, "somebody")) == (429, 422), (
        "who has no account is told by another limit: count for name.lower() in verify_throttled"
    )


def test_sixty_forms_at_most_wait_for_a_hash(
    app: Flask, ada: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forms that wait are counted, and those beyond them are not; forms without a password go on.

    A form that has arrived may wait for longer than its body may take.
    """
    monkeypatch.setattr(app, "test_client_class", FlaskClient)
    monkeypatch.setattr("service.application.BODY_SECONDS", 0.005)
    go_on = gevent.event.Event()
    monkeypatch.setattr(users, "verify_password", lambda *_: not go_on.wait())
    waiting = [gevent.spawn(attempt, app, 0, "ada") for _ in range(21)]
    with gevent.Timeout(
        60, AssertionError("60 forms can't wait for a hash at once: see hash_slots")
    ):
        while not any(each.ready() for each in waiting):  # the one that is too many for its caller
            gevent.sleep(0.01)
        waiting += [gevent.spawn(attempt, app, 1 + number % 2, "ada") for number in range(40)]
        while forms.hash_slots.counter:
            gevent.sleep(0.01)
        refused = [
            ada.post(f"{SECURITY}/password", data={"current": "wrong"}),  # without the new one
            *(log_in_as(app.test_client(), "ada", "wrong") for _ in range(70)),
        ]
    others = app.test_client().post("/log-out")
    go_on.set()
    assert sorted(client.get() for client in waiting) == [422] * 60 + [429], (
        "sixty forms wait for a hash at once, and each is answered: see hash_slots in web/forms.py"
    )
    assert {(answer.status_code, answer.headers.get("Retry-After")) for answer in refused} == {
        (503, "3")
    }, "the 61st form that waits for a hash is refused before it is counted: see take_slot"
    assert others.status_code == 303, "only forms with a password take a slot: see take_slot"
    assert log_in_as(app.test_client(), "ada", "wrong").status_code == 422, "see free_slot"


def test_hundred_pages_of_a_caller_wait_and_others_do_not(
    app: Flask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "test_client_class", FlaskClient)

    def ask(address: str, **more: Any) -> TestResponse:
        return app.test_client().open(
            "/static/nowhere" if len(address) % 2 else "/log-out",
            method="GET" if len(address) % 2 else "POST",  # both wait
            environ_base={"REMOTE_ADDR": address},
            **more,
        )

    arrived = gevent.event.Event()
    form = mock.Mock(read=lambda _: arrived.wait() and b"a")
    waiting = [gevent.spawn(ask, "2001:db8::10", environ_overrides={"wsgi.input": form})]
    gevent.idle()
    with site.page_turn:
        arrived.set()  # a form that was late waits, and so does a host that is refused
        waiting += [
            gevent.spawn(ask, f"2001:db8::{number}", headers={"Host": "a" * (number + 245)})
            for number in range(100)
        ]
        gevent.idle()  # until all of them wait
        busy = gevent.spawn(ask, "2001:db8::ffff").get(
            timeout=gevent.Timeout(60, AssertionError("page 102 of a /64 waits: see wait_for_turn"))
        )
        assert (busy.status_code, busy.headers.get("Retry-After")) == (503, "1"), (
            "see wait_for_turn"
        )
    assert gevent.spawn(ask, "2001:db8:0:1::1").get().status_code == 404, "another caller's page"
    assert not all(each.ready() for each in waiting), (
        "the page of another caller waits for all those of one: see caller_turns in web/site.py"
    )
    assert {each.get().status_code for each in waiting} == {303, 400, 404}, "what waits is answered"


BUCKETS = forms.BUCKETS  # which the app of a test replaces


@mock.patch.object(forms, "BUCKETS", BUCKETS)
@pytest.mark.parametrize("path", ["/sign-up", "/log-out", PROFILE])
def test_sixty_forms_a_minute_are_what_a_caller_sends(ada: FlaskClient, path: str) -> None:
    def send(address: str) -> int:
        return ada.post(
            path,
            environ_base={"REMOTE_ADDR": address},
            headers={"X-Forwarded-For": f"192.0.2.{secrets.randbelow(250)}"},  # anybody may
        ).status_code

    assert 429 not in {send(f"2001:db8::{n}:1") for n in range(60)}
    assert send("2001:db8::ffff:2") == 429, "the /64 of `request.remote_addr` is the caller"
    assert 10_000 <= BUCKETS <= 20_000, "each bucket of each quota takes 200 bytes"
    assert [send(f"2001:db8:0:{n}::1") for n in range(1, 31)].count(429) < 3, (
        "one caller's 60 forms use up what many others may send: see throttle in web/forms.py"
    )


def test_twenty_accounts_an_hour_are_what_an_address_makes(
    app: Service, client: FlaskClient, ada: FlaskClient
) -> None:
    """What a limit of a minute refuses uses up no limit of an hour."""
    clock = Clock()
    app.extensions["throttles"] = Limiter(clock.time)
    sent: list[Callable[[], TestResponse]] = [
        *[lambda: log_in_as(client, "ada", "wrong")] * 20,
        *[lambda: sign_up(client, "bob")] * 20,
        *[lambda: sign_up(client, "?")] * 20,
        *[lambda: create_key(ada)] * 30,
    ]
    assert [send().headers.get("Retry-After") for send in sent] == [
        *[None] * 20,
        *["60"] * 20,
        *[None] * 20,
        *["60"] * 30,
    ], (
        "20 passwords are counted, then refused until the next minute; check other fields before: "
        "see hash_throttled"
    )
    clock.now += 60
    assert {
        *(sign_up(app.test_client(), f"user{n}").status_code for n in range(20)),
        create_key(ada).status_code,
    } == {303, 200}, (
        "what a limit of a minute has refused uses up one of an hour: count the minute's first"
    )
    clock.now += 60
    refused = sign_up(app.test_client(), "user20")
    assert (refused.status_code, refused.headers.get("Retry-After")) == (429, "3480")
    clock.now += 3600
    assert sign_up(app.test_client(), "user20").status_code == 303


def test_thirty_keys_an_hour_are_what_a_user_gets(
    app: Service, log_in: LogIn, ada: FlaskClient
) -> None:
    """The successors of keys count, too."""
    clock = Clock()
    app.extensions["throttles"] = Limiter(clock.time)
    for _ in range(15):
        clock.now += 60
        ada.post(f"{KEYS}/{secret_in(create_key(ada))[8:16]}/successor")
    assert [
        (each.status_code, each.headers.get("Retry-After"))
        for each in (ada.post(PROFILE, data=TYPED | {"email": "a@example.com"}), create_key(ada))
    ] == [
        (303, None),
        (429, f"{3600 - 15 * 60}"),
    ], "whatever her name is now"
    assert (create_key(log_in("bob")).status_code, count()) == (200, 31)
    clock.now += 3600
    assert create_key(ada).status_code == 200


# The profile and the password


def test_account_is_deleted_with_its_keys_by_its_password_and_its_name(ada: FlaskClient) -> None:
    key = secret_in(create_key(ada))
    assert ask_api(ada, key).status_code == 200
    for wrong, label, words in [
        ({"password": "wrong"}, "Password", "This is not your password."),
        ({"confirmed": ""}, "Your user name", "This is not your user name."),
        ({"confirmed": "bob"}, "Your user name", "This is not your user name."),
    ]:
        refused = ada.post(f"{PROFILE}/delete", data=TYPED | wrong)
        assert (refused.status_code, is_logged_in(ada)) == (422, True), (
            f"an account is deleted with {wrong}: see delete_account in web/profile_settings.py"
        )
        assert re.search(f'>{label}</label>\\s*<div role="alert"><p[^>]*>{words}', refused.text), (
            f"{words!r} is right below {label!r}: see delete-account.html"
        )
    # So what a browser fills in, the password and the name that belongs to it, is never all.
    assert re.search(
        '<input hidden name="username" value="ada" autocomplete="username">.*'
        'Type ada to confirm.*name="confirmed" type="text" value="" autocomplete="off"',
        ada.get(f"{PROFILE}/delete").text,
        re.DOTALL,
    ), "a browser fills in what confirms a deletion, or no password: see delete-account.html"
    assert (
        "Your account was deleted, with everything in it."
        in ada.post(f"{PROFILE}/delete", data=TYPED, follow_redirects=True).text
    )
    assert ask_api(ada, key).status_code == 401, "the deleted user's key is taken: see transaction"
    assert {"keys": count(), "is logged in": is_logged_in(ada)} == {
        "keys": 0,
        "is logged in": False,
    }
    assert log_in_as(ada, "ada").status_code == 422, "the deleted user can log in"


def test_profile_is_saved_or_else_not_shown_as_ones_own(log_in: LogIn, ada: FlaskClient) -> None:
    log_in("bob")
    refused = ada.post(PROFILE, data={"username": "Bob", "email": "a@example.com"})
    assert refused.status_code == 422, "Ada takes the name of Bob: see users.change"
    assert re.search(
        '(?s)Logged in as </span>ada<.*role="alert"><p[^>]* id="username-note">This is already',
        refused.text,
    ), "the error is not beside its field, or shown as saved: see _taken_is_invalid, profile.html"
    write(User.created_at, NOON)
    saved = ada.post(
        PROFILE,
        data={"username": "countess", "email": "ada@lovelace.example"},
        follow_redirects=True,
    )
    assert re.search(
        "(?s)Logged in as </span>countess<.*Your profile was saved[.].*"
        "<h1>Profile Settings<.*>2026-11-21</time>",
        saved.text,
    ), "the page does not say that the profile is saved, or whose it is: see profile.html"


def test_only_a_right_form_changes_the_password(ada: FlaskClient, client: FlaskClient) -> None:
    log_in_as(client, "ada")
    for current, new, label, words in [
        ("not my password", "a brand new one", "Current password", "This is not your current"),
        (PASSWORD, "short", "New password", "Use 10 to 256 characters."),
    ]:
        answer = ada.post(f"{SECURITY}/password", data={"current": current, "password": new})
        assert (
            answer.status_code,
            len(re.findall(f'>{label}</label>\\s*<div role="alert"><p[^>]*>{words}', answer.text)),
        ) == (422, 1), (
            f"this form is refused with {words!r}, right below {label!r}: see change_password"
        )
    assert is_logged_in(client), "a form that is refused logs others out"
    answer = ada.post(
        f"{SECURITY}/password",
        data={"current": PASSWORD, "password": "a brand new one"},
        follow_redirects=True,
    )
    assert re.search("(?s)<title>API keys .*Your password was changed[.]", answer.text), (
        "the page API keys does not say that the password is changed: see change_password"
    )
    assert is_logged_in(ada), "a change of her password logs Ada out where she did it"
    assert not is_logged_in(client), (
        "a session outlives the password with which it was begun: see load_user in web/log_in.py"
    )
    assert log_in_as(client, "ada").status_code == 422, "the old password is still taken"
    assert log_in_as(client, "ada", "a brand new one").status_code == 303, "the new one is not"


@pytest.mark.parametrize("form", sorted(PASSWORDS_ONLY))
def test_form_that_waits_for_a_hash_spares_the_next_account(
    ada: FlaskClient, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Without AUTOINCREMENT, the next account may get the number, and the name, of the last one."""
    verify_password = users.verify_password

    @db.connection_context()
    def replace_then_verify(user: User, password: str) -> bool:
        users.delete(user)
        User.create(id=user.id, username="ada", email="bob@example.com", password_hash="")
        return verify_password(user, password)

    monkeypatch.setattr(users, "verify_password", replace_then_verify)
    assert re.search(
        "(?s)<title>Log in .*"
        + ("Log in to open" if form == "/log-in" else "was changed in the meantime, so nothing"),
        ada.post(form, data=TYPED | {"username": "ada"}, follow_redirects=True).text,
    ), (
        "the log-in page does not say that nothing was changed: see nothing_was_changed in "
        "web/site.py, and load_user in web/log_in.py, which must end the session of another row; "
        "start_session needs the user whose password was verified"
    )


# Keys


def test_new_key_is_shown_once(app: Flask, ada: FlaskClient) -> None:
    answer = create_key(ada, "my laptop", type="development")
    assert [answer.headers.get(name) for name in ("Cache-Control", "Set-Cookie")] == [
        "no-store",
        None,
    ], "the page with the new key is kept by a cache, or sets a cookie"
    secret = secret_in(answer)
    texts = (
        '<h2 id="key-title">my laptop</h2> <span class="tag">Development</span>',
        f">{secret}</textarea>",
        f"<code>export KEY={secret}</code>",
        'curl -H "X-API-Key: $KEY" http://localhost/<wbr>api/<wbr>v1/<wbr>protected/<wbr>test',
        f'data-send aria-label="Send GET {TEST}"',
    )
    assert [text for text in texts if text not in unescape(answer.text)] == [], "see key.html"
    assert (
        ask_api(ada, secret).get_json().items()
        >= {"api_key_name": "my laptop", "api_key_type": "development"}.items()
    )
    assert ada.get(KEYS).location == SECURITY, "Reload of this page leads to the keys"
    change(secret, tier="gone", total=9)
    assert re.search(
        r"(?s)Development, tier: free</span>.*>1 of 1,000\s", ada.get(SECURITY).text
    ), "as it is counted now, in this window"
    assert not [path for path in routes(app, "GET") if secret[17:] in ada.get(path).text], (
        "these pages show a key again"
    )


def test_form_sent_again_makes_no_second_key_and_says_what_the_first_one_made(
    log_in: LogIn, ada: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when that was the last key that Ada could make."""
    monkeypatch.setattr(api_keys, "MAX_KEYS", 1)
    # Firefox would fill in the old one after Reload.
    (nonce,) = re.findall(
        r'name="nonce" value="(\w{8})" autocomplete="off"', ada.get(SECURITY).text
    )
    secret = secret_in(create_key(ada, "ci", nonce=nonce))
    for _ in range(2):
        again = create_key(ada, "cd", nonce=nonce)
        assert (again.status_code, again.location) == (303, SECURITY), (
            "a form that is sent again leads to the list: see AlreadyMade in accounts/api_keys.py"
        )
        page = ada.get(SECURITY).text
        assert (
            "was already sent, and made the key “ci”" in page,
            f'name="nonce" value="{nonce}"' in page,
            count(),
        ) == (True, False, 1), "say what the first one made; each form needs a nonce of its own"
    change(secret, expires_at=now())  # whenever its row is deleted
    assert secret_in(create_key(ada, nonce=nonce))[8:16] != secret[8:16], (
        "or it would have the counts of the revoked key"
    )


@pytest.mark.parametrize("config", [{"KEYS_PER_USER": "2"}], indirect=True)
def test_keys_of_a_user_are_as_many_as_the_operator_allows(ada: FlaskClient) -> None:
    """Successors do not count beside the keys that they replace; the command may make more."""
    new = secret_in(ada.post(f"{KEYS}/{secret_in(create_key(ada))[8:16]}/successor"))[8:16]
    other = secret_in(create_key(ada))[8:16]
    refused = create_key(ada)
    assert (
        *(refused.status_code, count()),
        "A user can have 2 keys. Revoke one first." in refused.text,
    ) == (422, 3, True), "KEYS_PER_USER is exceeded, or unnamed: see _store in accounts/api_keys.py"
    api_keys.create_key(users.find_user("ada") or User(), "by the operator")
    assert create_key(ada).status_code == 422, "a key that the operator made counts, too"
    ada.post(f"{KEYS}/{other}/revoke")
    ada.post(f"{KEYS}/{new}/revoke")
    assert (create_key(ada).status_code, count()) == (422, 2), "what has no successor counts"
    for key in stored_keys():
        ada.post(f"{KEYS}/{key.id}/revoke")
    assert (create_key(ada).status_code, count()) == (200, 1), "keys that are revoked count"


@pytest.mark.parametrize(
    "config", [{"KEYS_PER_USER": "0", "API_URL": "https://api.example.com"}], indirect=True
)
def test_user_without_keys_of_ones_own_manages_those_of_the_operator(ada: FlaskClient) -> None:
    assert not [
        page
        for page in ("/", "/console")
        if "free key" in ada.application.test_client().get(page).text
    ], "these pages offer a key, but with KEYS_PER_USER=0 only the operator makes one"
    assert [
        re.findall("Ask the operator .*?one|Ask the operator .*?key", ada.get(page).text)
        for page in ("/", SECURITY)
    ] == [["Ask the operator for a key"], ["Ask the operator of this service for one"]]
    key = api_keys.create_key(users.find_user("ada") or User(), "ci")[0]
    assert "Create" not in ada.get(SECURITY).text, "with KEYS_PER_USER=0, show no form for a key"
    refused = create_key(ada)
    assert (
        *(refused.status_code, count()),
        "Ask the operator of this service for a key." in refused.text,
    ) == (422, 1, True), "KEYS_PER_USER=0: see _store in accounts/api_keys.py"
    assert [
        ada.post(f"{KEYS}/{key.id}/{action}", data={"name": "cd"}).status_code
        for action in ("rename", "successor", "revoke")
    ] == [303, 200, 303], "with KEYS_PER_USER=0, users still manage the keys that they have"


@pytest.mark.parametrize(
    "config", [{"SITE_NAME": "Ada's <API>", "API_URL": "https://[::1]:8443/v1"}], indirect=True
)
def test_pages_have_the_name_and_the_address_of_the_guarded_api(ada: FlaskClient) -> None:
    assert not (
        found := re.findall(
            r">Log in<|X-RateLimit.*|openapi.json</a>|the console|json\(\)",
            ada.get("/").text + ada.get("/nowhere").text,
        )
    ), (
        f"{found} is on a page: she is logged in; the gate passes no such headers on, also in "
        "`codes` of docs/endpoints.json; the API is another, and may send no JSON; the first page "
        "is the overview"
    )
    assert re.findall(r"</span> <code>(\w+)", ada.get("/").text) == [
        *("missing_api_key", "invalid_api_key", "rate_limited", "unavailable")
    ], "edit `codes` in api.html: the refusals of the gate"
    page = unescape(create_key(ada).text)
    assert [
        page.count(text) for text in ("Ada's <API></", '$KEY" "https://', "data-send", "json()")
    ] == [2, 1, 0, 0], (
        "the title and the link to the first page; a shell needs quotes; no page calls API_URL, "
        "whose responses may be no JSON"
    )
    assert [
        {*re.findall('<code>[^<]*?(https?://[^"<& ]+)', text.replace("<wbr>", ""))}
        for text in (ada.get("/").text, page)
    ] == [{"https://[::1]:8443/v1"}] * 2, (
        "the code of the first page, or beside a new key, does not call API_URL: see api.html and "
        "key.html"
    )


def test_bad_field_makes_no_key_and_a_bad_name_keeps_what_was_chosen(ada: FlaskClient) -> None:
    assert create_key(ada, expires="x").status_code == 400, "see form_option in web/forms.py"
    chosen = {"type": "development", "limit": "five", "expires": "90 days"}
    answer = create_key(ada, "two\nlines", **chosen)
    assert {"status": answer.status_code, "keys": count()} == {"status": 422, "keys": 0}, (
        "a name of two lines makes a key, or its refusal is no 422: see show_errors_on"
    )
    assert re.search('role="alert"><p[^>]* id="name-note">Use 1 to 64 printable', answer.text), (
        "the error is not shown beside the field `name`: see parts.field"
    )
    assert re.findall('value="([^"]*)" (?:checked|selected)>', answer.text) == [*chosen.values()], (
        "the page with the error forgets what was chosen: see parts.choice"
    )


@pytest.mark.parametrize(
    ("config", "offered"),
    [
        (
            {},
            {
                "free": "free: 1,000 requests per hour",
                "five": "five: 5 requests per day",
                "once": "once: 1 request per day",
            },
        ),
        (
            {"RATE_LIMITS": "free=1000/hour,pro=10000/hour,tiny=5/minute"},
            {"free": "free: 1,000 requests per hour", "tiny": "tiny: 5 requests per minute"},
        ),
        ({"RATE_LIMITS": "free=5/day,pro=9/day"}, {}),
    ],
    indirect=["config"],
    ids=["three to choose", "two to choose", "no field, as there is no choice"],
)
def test_key_has_the_limit_that_was_chosen_or_free(
    ada: FlaskClient, offered: dict[str, str]
) -> None:
    page = ada.get(SECURITY).text
    assert offered == dict(
        re.findall(r'<option value="(\w+)">(\w+: .*? per .*?)</option>', page)
    ), "users may choose tiers that allow no more than `free`: see tiers_for_users, security.html"
    assert ('name="limit"' in page, "For the tier pro, ask the operator" in page) == (
        bool(offered),
        True,
    ), "a field is shown only if there is a choice, and for a tier above `free` a sentence"
    for form in ({}, *({"limit": tier} for tier in offered)):
        made = row(secret_in(create_key(ada, **form)))
        assert (made.tier, made.expires_at) == (form.get("limit", "free"), None), "by default"
    assert {create_key(ada, limit=higher).status_code for higher in ("pro", "none")} == {400}, (
        "a user takes a tier that allows more than `free`, or none: see form_option in create_key"
    )


def test_key_ends_when_it_was_told_to(ada: FlaskClient) -> None:
    form = ada.get(SECURITY).text
    for expires, seconds in {
        "never": None,
        "5 minutes": 300,
        "30 days": 30 * DAY,
        "90 days": 90 * DAY,
        "1 year": 365 * DAY,
    }.items():
        assert f'<option value="{expires}">' in form
        made = row(secret_in(create_key(ada, expires, expires=expires)))
        page = ada.get(f"{KEYS}/{made.id}/rotate").text
        assert re.findall("The old key expires [^>]*><span[^>]*>(.*?)<.* at the latest", page) == (
            ["in 5 min"] if expires == "5 minutes" else []
        ), "whether it ends before its grace"
        lifetime = made.expires_at and made.expires_at - made.created_at
        assert lifetime == (seconds and pytest.approx(seconds, abs=60)), expires
    write(ApiKey.created_at, ApiKey.expires_at.is_null())  # "never" is the newest
    write(ApiKey.expires_at, ApiKey.expires_at - 23 * DAY - 1, ApiKey.name == "30 days")
    page = ada.get(SECURITY).text
    assert re.findall(r'class="error">\s*<time.*?><span.*?>(.*?)<', page) == [
        "in 7 days",
        "in 5 min",
    ], "a key that ends in less than a week is marked, and no other: see security.html"
    assert re.findall('<th scope="row">(.*?) *<div>', page) == [
        *("never", "1 year", "30 days", "5 minutes", "90 days")
    ], "new ones first, then by name"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (30, "in 30 s"),
        (0, "just now"),
        (-30, "just now"),
        (-90, "2 min ago"),
        (-3595, "1 h ago"),
        (1.5 * DAY, "in 36 h"),
        (-2 * DAY, "2 days ago"),
        (365 * DAY, "in 365 days"),
    ],
)
def test_moments_are_told_in_words(seconds: float, words: str) -> None:
    with mock.patch("models.time", Clock(NOON - seconds)):
        assert relative_time(NOON) == words, (
            "the same moment is told in other words as time goes on"
        )


@pytest.mark.parametrize("action", ["rename", "successor", "revoke"])
def test_key_that_has_expired_is_gone(ada: FlaskClient, action: str) -> None:
    """Although its row is not deleted yet."""
    change(key := secret_in(create_key(ada)), expires_at=now())
    answer = ada.post(
        f"{KEYS}/{key[8:16]}/{action}", data={"name": "back again"}, follow_redirects=True
    )
    assert re.search(f"(?s)<title>API keys .*{api_keys.KEY_IS_GONE}", answer.text), (
        f"{action} of an expired key does not say that it is gone: see ApiKey.valid() in api_keys"
    )
    assert key[8:16] not in ada.get(SECURITY).text, "an expired key is listed: see ApiKey.valid()"


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (f"{SECURITY}/rows/1", SECURITY),
        ("/settings/rows/1/edit", "/settings/rows"),
        ("/rows/1", "/rows"),
    ],
)
@pytest.mark.parametrize("statements", [1, 9], ids=["in an outage", ""])
def test_form_of_a_row_that_is_gone_leads_to_its_tab_or_list(
    app: Flask, log_in: LogIn, path: str, shown: str, statements: int
) -> None:
    app.add_url_rule(
        path,
        "web.gone",
        lambda: mock.Mock(side_effect=Changed("It is gone."))(),
        methods=["POST"],
    )
    ada = log_in("ada")
    with outage(after=statements):
        answer = ada.post(path, base_url="http://localhost/demo")
    assert (answer.status_code, answer.location) == (303, f"/demo{shown}"), (
        "it leads to another page than the form's tab or list: see form_tab in web/site.py, and "
        "nothing_was_changed"
    )


def test_chart_shows_24_hours_of_all_keys_of_the_user(log_in: LogIn, ada: FlaskClient) -> None:
    first, second = (secret_in(create_key(ada))[8:16] for _ in range(2))
    this_hour = int(time.time()) // 3600 * 3600
    with db.connection_context():
        ApiKey.update(last_used_at=this_hour - 23 * 3600).execute()
        HourlyUsage.insert_many(
            (this_hour - age * 3600, key, requests)
            for age, key, requests in [
                *((0, first, 5), (1, first, 1000), (1, second, 2000)),
                *((23, first, 7), (24, first, 9)),
            ]
        ).execute()
    page = ada.get(SECURITY).text
    shown = [display(this_hour - age * 3600) for age in range(24)]
    texts = (
        f'used <time datetime="{date_time(this_hour - 23 * 3600)}"',
        (
            f'created <time datetime="{date_time(made := stored_keys()[0].created_at)}"><span '
            f'aria-hidden="true" title="{display(made)}">just now</span><span class="unseen">'
            f"just now, {display(made)}</span></time>"
        ),
        "<strong>3,012</strong> requests</p>",
        "at most 3,000 in an hour",
        '<div aria-hidden="true">\n    <svg class="chart" viewBox="0 0 240 100"',
        f"<span>{shown[23][11:16]}</span><span>{shown[11][11:16]}</span><span>now</span>",
    )
    assert [text for text in texts if text not in page] == [], "see security.html"
    assert re.findall(">([^>]*)</time></th><td>(.*?)</td>", page) == [
        (each[:16], count)
        for each, count in zip(shown, ["5", "3,000", *["0"] * 21, "7"], strict=True)
    ], "the table has the newest hour first, and each hour once: see hourly_requests, security.html"
    assert re.findall(
        '<rect x="(.*?)" y="(.*?)".* height="(.*?)"><title>.*: (?:7|3,000)<', page
    ) == [
        ("1", "96", "2"),
        ("221", "0.0", "98.0"),
    ], "the oldest hour is first, its bar is on the ground, and that of the most is the highest"
    with mock.patch("models.time", Clock(this_hour - 1)):
        assert "<strong>3,016</strong>" in ada.get(SECURITY).text, "it moves on: see chart_hours"


def test_rotation_that_is_sent_twice_leaves_a_way_to_a_new_key(ada: FlaskClient) -> None:
    """Without a script, a second click drops the response to the first, and so the new key."""
    old_secret = secret_in(create_key(ada, "ci"))
    lost, again = [ada.post(f"{path_of(0)}/successor") for _ in range(2)]  # in 24 hours
    until = f"works until {display(row(old_secret).expires_at or 0)}"
    assert re.search(
        f'(?s)The key “ci” has already been replaced</h1>.*<div role="alert"><p>It {until}[.]',
        again.text,
    ), "the page does not say that the key is replaced, or until when it works: see change-key.html"
    assert ask_api(ada, old_secret).status_code == 200, "the old key ends before its grace"
    assert (
        "This key stops working at once, because it was never used. "
        f"The one before it, <code>{old_secret[:16]}…</code>, {until}, as before."
    ) in ada.get(f"{KEYS}/{secret_in(lost)[8:16]}/rotate").text
    again = ada.post(f"{KEYS}/{secret_in(lost)[8:16]}/successor", data={"grace": "in 5 minutes"})
    asked = [
        ask_api(ada, secret).status_code
        for secret in (old_secret, secret_in(lost), secret_in(again))
    ]
    assert (asked, count()) == ([200, 401, 200], 2), (
        "the successor that nobody has used ends, and the older key stays: see rotate_key"
    )
    assert row(old_secret).expires_at - now() == pytest.approx(DAY, abs=60), (
        "the older key keeps its time, which is a day from its rotation: see GRACES, rotate_key"
    )


def test_key_that_was_used_ends_the_one_that_it_has_replaced(ada: FlaskClient) -> None:
    """It was used a moment ago: neither that nor the window of the oldest key is saved yet.

    Nobody gets more by rotating a key, using up one of the two, and revoking the old one.
    """
    first = secret_in(create_key(ada, limit="five"))
    second = secret_in(ada.post(f"{KEYS}/{first[8:16]}/successor"))
    assert [ask_api(ada, key).status_code for key in [first] * 3 + [second]] == [200] * 4
    assert re.search(
        '">replaced<.*>3 of 5\\s.*<meter min="0" max="5" low="3.5" high="4.5" optimum="0" value='
        '"3".*this day, resets 00:00<'
        '.*data-label="Expires: "><div><span>\\s*<time [^>]*><span [^>]*>in 24 h<',
        ada.get(SECURITY).text,
        re.DOTALL,
    ), "the list does not show a replaced key with 3 of 5 and its meter: see security.html, peek"
    assert re.search(
        f"{second[:16]}…</code>, used just now<.*"
        f"The one before it, <code>{first[:16]}…</code>, stops working at once[.]",
        ada.get(f"{KEYS}/{second[8:16]}/rotate").text,
        re.DOTALL,
    ), "the page does not say that the key was used, or which one ends: see change-key.html"
    page = ada.post(f"{KEYS}/{second[8:16]}/successor", data={"grace": "in 5 minutes"}).text
    assert re.search(rf"{second[:16]}…</code>, works until .* \(in 5 min\)", page), (
        "the page of the successor does not say that the old key ends in 5 min: see key.html"
    )
    (third,) = set(SECRET.findall(page))
    assert [
        ask_api(ada, key).headers.get("X-RateLimit-Remaining") for key in (first, second, third)
    ] == [None, "3", "1"], (
        "the first key has ended, the second is in its grace, and the third has used what either "
        "of them has: see rotate_key (save_counts, `ended`) and successor in accounts/api_keys.py"
    )
    assert {ask_api(ada, second).status_code for _ in range(3)} == {200}
    assert ada.post(f"{KEYS}/{second[8:16]}/revoke").status_code == 303
    assert ask_api(ada, third).status_code == 429, (
        "the revoked key has used 5 of 5, and so has its successor: see revoke_key in api_keys.py"
    )


def test_rotation_that_would_end_another_key_than_the_page_said_ends_none(ada: FlaskClient) -> None:
    first = secret_in(create_key(ada))
    second = secret_in(ada.post(f"{KEYS}/{first[8:16]}/successor"))
    page = ada.get(f"{KEYS}/{second[8:16]}/rotate")
    ask_api(ada, second)
    [(action, fields)] = [form for form in forms_of(page).items() if "successor" in form[0]]
    answer = ada.post(action, data=fields)
    assert (answer.status_code, count()) == (422, 2), (
        "the page said that the second key ends, because it was unused: see only_if_unused"
    )
    assert re.search(
        "(?s)The keys have changed in the meantime.*"
        f"{first[:16]}…</code>, stops working at once[.]",
        answer.text,
    ), "the page does not say why nothing was done, or what ends now: see change-key.html"
    assert ask_api(ada, first).status_code == 200, "a rotation that is refused has ended a key"
    change(second, total=0)
    change(first, expires_at=now())  # its row may still be there
    assert re.search(
        "(?s)The keys have changed in the meantime(?!.*The one before)",
        ada.post(action, data=fields).text,
    ), "no page says until when a key works that has expired, and no rotation keeps it"


def test_change_in_a_page_holds_from_the_next_request_on(ada: FlaskClient) -> None:
    key = secret_in(create_key(ada, "<i>"))
    assert "never used" in ada.get(SECURITY).text
    assert ask_api(ada, key).status_code == 200, "a new key works at once"
    assert {text: text in ada.get(SECURITY).text for text in ("1 of 1,000", "never used")} == {
        "1 of 1,000": True,
        "never used": False,
    }, "the page tells a use before it is saved: see peek and usage_of in storage/sqlite.py"
    assert ' value="&lt;i&gt;"' in ada.get(f"{path_of(0)}/rename").text, "the present name"
    renamed = ada.post(f"{path_of(0)}/rename", data={"name": " <b> "}, follow_redirects=True)
    assert re.search("(?s)<title>API keys .*The key is now named “&lt;b&gt;”[.]", renamed.text), (
        f"{renamed.request.path} is no list that says the new name: see rename_key"
    )
    assert ask_api(ada, key).get_json()["api_key_name"] == "<b>", (
        "the API still has the old row: see clear_cache in `transaction` of storage/database.py"
    )
    revoked = ada.post(f"{path_of(0)}/revoke", follow_redirects=True)
    assert re.search("(?s)<title>API keys .*The key “&lt;b&gt;” was revoked[.]", revoked.text), (
        f"{revoked.request.path} is no list that says so: see revoke_key"
    )
    assert (ask_api(ada, key).status_code, count()) == (401, 0), (
        "a revoked key is still taken, or its row is there: see revoke_key and clear_cache"
    )


@pytest.mark.usefixtures("with_sample")
@pytest.mark.parametrize(("method", "place"), [("GET", "query_string"), ("POST", "data")])
def test_nothing_of_another_user_is_shown_or_changed(
    app: Service, ada: FlaskClient, read: set[str], method: str, place: str
) -> None:
    """Whatever a form or a parameter has, also an ID; and if the other user has just asked.

    What the fields of forms contain, rows of the other user contain, too.
    """
    hidden = row(add_hidden_user())
    name = api_keys.random_text(8)  # which nothing remembers from another test
    own = (secret := secret_in(create_key(ada, name)))[8:16]
    add_rows(row(secret), "tea", 1)
    evil = evil_form(app, ada)
    for text in {"tea", *evil.values()} - {own}:  # a field may list the keys of the user
        add_rows(hidden, text, 777_777)
    write(User.password_hash, users.hash_password(PASSWORD))  # so both can log in
    ids = {each["id"] for each in hidden_rows() if "id" in each and NAME not in each.values()}
    api_keys.create_key(users.find_user("HIDDEN") or User(), name)
    named = {  # which only the other user may open
        path
        for path in pages(app, method, NAME)
        if app.test_client().open(path, method=method).location == "/log-in"
    }
    before = hidden_rows()
    rows = snapshot(())
    for path in sorted(
        {*routes(app, method), *named} - (PUBLIC_FORMS if method == "POST" else set())
    ):
        if method == "GET":
            is_kept = own in browser_of(app, "HIDDEN").get(path).text and own not in path
            assert not is_kept, f"{path} remembers what another user has seen"
        changes = [("", "")]
        for field, value in changes:
            sent: dict[str, Any] = {place: evil | {field: value}}
            if method == "POST" or not field:  # a form may log out
                browser = browser_of(app, "ada")
            read.clear()  # of the log-in
            page = browser.open(path, method=method, follow_redirects=True, **sent)
            assert db.is_closed(), f"{path} keeps a connection: use connection_context"
            what = f"{path} with {field}={value[:20]}"
            is_kept = snapshot(()) == rows if method == "GET" else hidden_rows() == before
            assert is_kept, (
                f"{what} changes rows, let it be a POST"
                if method == "GET"
                else f"{what} changes rows of others: look among g.user's only"
            )
            assert path in TOTALS or not HIDDEN.search(page.text), (
                f"{what} shows rows of others: ask for g.user's only, or see TOTALS"
            )
            if method == "POST":
                restore(rows)
            odd = ("", "x" * 9000) if method == "POST" else (*NONSENSE, "1", "'", "%", "\0")
            changes += (
                []
                if field or path in named
                else product(sorted(read), (*odd, "tea", *map(str, ids)))
            )


@pytest.mark.usefixtures("with_sample")
def test_limit_of_rows_is_told_by_its_refusal_and_holds_for_two_at_once(
    app: Service, ada: FlaskClient, asked: list[tuple[str, Any]]
) -> None:
    """Each form, and each endpoint that takes a body, is sent until it stores nothing more.

    Another user has more rows than that, and each setting that limits rows is a small number.
    """
    usual = app.settings
    limited = [  # such as keys_per_user, because ApiKey is stored in api_key
        (table, each.name)
        for table, each in product(TABLES, dataclasses.fields(usual))
        if each.type is int
        and table._meta.table_name.rpartition("_")[2] in each.name.partition("_per_")[0]
    ]
    lowered: dict[str, Any] = {name: number for number, (_, name) in enumerate(limited, 3)}
    app.settings = dataclasses.replace(usual, **lowered)
    headers, others = [
        {"X-API-Key": secret_in(create_key(ada, name))} for name in ("ci", "another")
    ]
    own = snapshot()
    add_many_rows(row(add_hidden_user()))
    requests = {
        **{(e.method, e.url()): e.sent(e.example) for e in [*OPERATIONS, *sample.OPERATIONS]},
        **{
            ("POST", to): {"data": form | {"nonce": ""}} for to, form in all_forms(app, ada).items()
        },
    }
    kept = snapshot()
    limits: dict[Any, int | None] = {}
    for (method, path), sent in requests.items():
        how = {"method": method, "headers": headers} | sent
        for number in range(10):
            if number == 9 and is_refused_beside(kept, app, path, how, 1500):
                refused = partial(is_refused_beside, kept, app, path, how)
                refused(bisect_left(range(1500), True, key=refused))
            sizes = [*map(len, snapshot().values())]
            asked.clear()
            answer = browser_of(app, "ada").open(path, **how)
            if sizes == [*map(len, snapshot().values())]:
                break
        added = {
            table: size - len(rows) + len(own[table])
            for size, (table, rows) in zip(sizes, kept.items(), strict=True)
            if size > len(rows) + 1
        }
        if answer.status_code >= 400 and added:
            told = str(re.findall(r'role="alert">(.*?)</div>|"detail":\s*"(.*?)"', answer.text))
            assert {*added.values()} & {*map(int, re.findall(r"\d{1,9}", told.replace(",", "")))}, (
                f"{path}: {added} rows are stored, and its refusal must say so: {told}"
            )
            assert any(sql.startswith("UPDATE") for sql, _ in asked), (
                f"{path}: count and store in one `with transaction(user):`"
            )
            assert (
                not path.startswith("/api/")
                or not re.search(r"(?i)\b(a|each|this) key\b", told)
                or browser_of(app, "ada").open(path, **how | {"headers": others}).status_code < 400
            ), f"{path}: count the rows of the key, and not of all keys of the user"
        for table, name in [each for each in limited if each[0] in added]:
            most = added[table] if answer.status_code >= 400 else None
            assert {most, limits.setdefault((table, name), most)} in ({None}, {lowered[name]}), (
                f"{path} stores {most or 'any number of'} rows, though {name} is {lowered[name]}: "
                "read it from current_service().settings wherever such rows are stored"
            )
        restore(own)
        assert (
            answer.status_code < 400
            or sizes != [*map(len, kept.values())]
            or browser_of(app, "ada").open(path, **how).status_code >= 400
        ), f"{path} is refused because of the rows of others: count those of the user only"
        restore(kept)


def is_refused_beside(
    kept: dict[Any, list[Any]], app: Service, path: str, how: dict[str, Any], size: int
) -> bool:
    """Whether a request is refused when an added table in which it stores has so many new rows.

    The oldest of them stays, because one in another table may belong to it.
    """
    restore(
        {
            table: [
                *kept[table],
                *(new[0] | ({"id": 10**6 + n} if n else {}) for n in range(size) if new),
            ]
            if table in TABLES[3:]
            else rows
            for table, rows in snapshot().items()
            for new in [
                sorted(
                    (each for each in rows if each not in kept[table]),
                    key=lambda each: str(each.get("id")).zfill(20),
                )
            ]
        }
    )
    return browser_of(app, "ada").open(path, **how).status_code >= 400


@pytest.mark.usefixtures("with_sample")
def test_form_changes_only_the_row_in_its_path_and_says_whether_it_deletes(
    app: Service, ada: FlaskClient, log_in: LogIn
) -> None:
    """There are three rows in each table, and then many. What belongs to the row may also change.

    A message that one button or option has, such as "It is done", no other one may have. What
    Ada sends is stored, also if it has the nonce of a form that Bob has sent.
    """
    log_in("bob")
    keys = [row(secret_in(create_key(ada, name))) for name in "abc"]
    add_many_rows(keys[0], 1, 3)
    before = snapshot()
    said: dict[str, bool] = {}
    own_ids = {  # the ID, and those of the rows to which a row belongs, but not of the user
        table: {
            *("id", "key_id"),
            *(field.name for field, model in table._meta.refs.items() if model != User),
        }
        for table in TABLES
    }
    forms = all_forms(app, ada)
    for path, form in forms.items():
        rule = app.url_map.bind("").match(path, method="POST", return_rule=True)[0].rule
        page = browser_of(app, "ada").post(path, data=form | {"nonce": ""}, follow_redirects=True)
        after = snapshot()
        others = [
            each
            for table, rows in before.items()
            for each in rows
            if each not in after[table]
            and not {str(each.get(name)) for name in own_ids[table]} & {*path.split("/")}
        ]
        assert not others or "<" not in rule or rule in SEVERAL, (
            f"{path} also changes {others}: name the ID in where(), or see SEVERAL"
        )
        advice = left_behind() + ([] if form.keys() - {"nonce"} else remarked(before))
        assert not advice, f"{path} {advice}"
        deletes = any(len(rows) > len(after[table]) for table, rows in before.items())
        told = re.findall(f"{NOTICE}(.*?)</p>", page.text)
        for name, value in other_choices(page, path, form, str(told).lower()):
            other = browser_of(app, "ada").post(
                path, data=form | {"nonce": "", name: value}, follow_redirects=True
            )
            assert not told or told[0] not in other.text, (
                f"{path} says {told} whether {name} is {form[name]} or {value}: tell these apart"
            )
        for text in told:
            assert said.setdefault(re.sub("“.*?”", "", text), deletes) == deletes, (
                f"{path} {'deletes' if deletes else 'keeps'} rows, but another form that says the "
                f"same does not: {text}"
            )
        sent = [
            (browser_of(app, user).post(path, data=form), [*map(len, snapshot().values())])
            for user in ("", "bob", "ada")
            if "nonce" in form
        ]
        assert (
            not sent
            or [sent[0][1] != sent[1][1], sent[1][1] != sent[2][1]] != [True, False]
            or sent[2][0].status_code >= 400
        ), (
            f"{path} takes Ada's form for the one of Bob that has the same nonce: look for the "
            "nonce among the rows of g.user only"
        )
        restore(before)
    add_many_rows(keys[0], 4, 104)
    before = snapshot()
    for path in forms.keys() & {rule.rule for rule in app.url_map.iter_rules()}:
        sizes = [
            [*map(len, snapshot().values())]
            for sent in range(3)
            if not sent or browser_of(app, "ada").post(path, data=forms[path] | {"nonce": ""})
        ]
        assert all(old - new < 2 or new == last for old, new, last in zip(*sizes, strict=True)), (
            f"{path} deletes some rows, and others when it is sent again: delete also those that "
            "the page doesn't show"
        )
        restore(before)


# Forms of other tabs and other sites, and forms nobody should send


def test_every_page_and_form_of_a_user_needs_a_log_in(
    app: Flask, ada: FlaskClient, client: FlaskClient
) -> None:
    create_key(ada)
    before = snapshot()
    forms = set(routes(app, "POST")) - PUBLIC_FORMS
    evil = evil_form(app, ada)
    assert {KEYS, PROFILE, f"{path_of(0)}/rename"} < forms
    advice = "needs a log-in: bp.before_request(require_log_in); or name it in tests/test_web.py:"
    for path in forms:
        assert client.post(path, data=evil).location == "/log-in", f"{path} {advice} PUBLIC_FORMS"
        assert "You are logged out, so nothing was changed." in client.get("/log-in").text
    for path in set(routes(app, "GET")) - PUBLIC_PAGES:
        answer = client.get(path, buffered=True)
        assert answer.status_code >= 300, f"{path} {advice} PUBLIC_PAGES"
        if path.startswith("/settings"):
            assert answer.location == "/log-in", f"{path} {advice} PUBLIC_PAGES"
            assert "Log in to open Profile Settings." in client.get("/log-in").text
    assert snapshot() == before


def test_no_value_of_a_field_makes_a_page_fail_and_all_are_shown_as_text(
    app: Service, ada: FlaskClient, read: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Each field of each form, one at a time; and no form reads or sets what it does not show."""
    headers = {"X-API-Key": secret_in(create_key(ada, MARKUP))}
    caplog.set_level("INFO")
    before = snapshot()
    found, boxes, checked = {}, set[str](), dict[str, str]()
    typed_in: dict[str, bool] = {}  # by name, whether it is required
    for user, path in product(("", "ada"), routes(app, "GET")):
        page = browser_of(app, user).get(path, follow_redirects=True, buffered=True)
        found.update({to: (user, fields) for to, fields in forms_of(page).items()})
        assert not re.search(r"\bNone\b", page.text), f"{path}: {{% if %}} around a null"
        assert not re.search(
            r'<input(?![^>]*autocomplete=)[^>]*type="password"|'
            r'name="(?:password|current)" type="(?!password"[^>]*="(?:current|new)-password")|'
            r'name="(username|email)"(?![^>]*autocomplete="(\1|off)")|'  # off: of another person
            r'(?s:\A(?!.*="username").*="[a-z]+-password")|'
            r'="current-password"[^>]* minlength|="new-password"(?![^>]* minlength)|'
            r'<button(?![^>]* type="button")[^>]* data-|'
            r'-note">[^<]*?\b(?P<size>\d+)\b[^<]*(?:letter|character)[^<]*</p>\s*<div[^>]*>\s*'
            r'<input(?![^>]*length="(?P=size)")',
            page.text,
        ), (
            f"{page.request.path}: a password is shown while it is typed, or no browser fills it "
            "in: see autocomplete, new_password and the hidden field username; or a button of the "
            'script sends the form: give it type="button"; or a hint has another size than '
            "minlength or maxlength"
        )
        assert {*re.findall(r'type="radio" name="(\w+)"', page.text)} == {
            *re.findall(r'type="radio" name="(\w+)"[^>]* checked', page.text)
        }, f"{page.request.path}: check one of the options, because a browser sends no other"
        assert {*re.findall(LABELLED, page.text)} <= {*re.findall(r' for="(.*?)"', page.text)}, (
            f"{page.request.path}: no label"
        )
        boxes |= {*re.findall(r'type="checkbox"[^>]* name="(\w+)"', page.text)}
        checked |= {
            name: text if rule == "pattern" else f".{{{text},}}"
            for name, rule, text in re.findall(CHECKED, page.text)
        }
        for start, name, rest in re.findall(TYPED_IN, page.text):
            typed_in[name] = typed_in.get(name, False) or " required" in start + rest
    shown = read.union(*(fields for _, fields in found.values()))  # also parameters of pages
    for to, (user, fields) in found.items():
        for name, value in (("", ""), *product(fields, WRONG)):
            browser = browser_of(app, user)
            data = dict.fromkeys(ApiKey._meta.columns, "mallory") | fields | {name: value}
            # As from a browser, which sends no box that is not checked.
            data = {each: text for each, text in data.items() if name or each not in boxes}
            read.clear()  # what the log-in and endpoints have read
            answers = [browser.post(to, data=data, follow_redirects=True)]
            assert read <= shown, f"{to} reads {read - shown}, which no page shows as a field"
            is_taken = answers[0].status_code == 200
            assert PASSWORD not in answers[0].text, f"{to} sends a password back"
            assert is_taken or name or to == "/log-in", (
                f"{to} refuses {fields} without {boxes or 'boxes'}: add what it takes to TYPED"
            )
            assert (
                not is_taken
                or to in PASSWORDS_ONLY
                or all(
                    re.fullmatch(checked.get(each, ".*"), data.get(each, ""))
                    for each in fields  # what is optional and empty is not checked
                    if data.get(each) or typed_in.get(each, True)
                )
            ), f"{to} takes {data}, but no browser sends it: edit pattern or minlength: {checked}"
            assert is_taken or value or typed_in.get(name, True), (
                f"{to}: {name} is required, or optional"
            )
            assert value or not is_taken or to in PASSWORDS_ONLY or not typed_in.get(name, False), (
                f"{to}: {name} is not required"
            )
            assert answers[0].status_code != 422 or not UNNOTICED.search(answers[0].text), (
                f"{to} refuses {name} without a word, or where nobody notices it: use parts.field, "
                "parts.choice or parts.note; see UNNOTICED"
            )
            assert not is_taken or answers[0].history or SECRET.search(answers[0].text), (
                f"{to}: use redirect_with_message, or Reload sends the form again"
            )
            assert name or NOTICE not in browser.get(answers[0].request.url).text, (
                f"{to}: its message is shown again: use redirect_with_message, and session.pop"
            )
            if answers[0].status_code == 422:
                lost = [
                    each
                    for each in fields.keys() & typed_in.keys() & data.keys()
                    if each != name or value == LONG
                    if f'<input hidden name="{each}"' not in answers[0].text
                    if escape(data[each]) not in answers[0].text
                ]
                assert not lost, f"{to}: show what was typed as {lost} again"
            if is_taken and any(
                value in str(text)
                for rows in snapshot().values()
                for each in rows
                for text in each.values()
            ):
                answers += [
                    browser.get(path, headers=headers, buffered=True)
                    for path in (*routes(app, "GET"), *ENDPOINTS)
                ]
            if is_taken:
                check_texts()
                restore(before)
            for answer in answers:
                assert not UNSAFE.search(answer.text) or answer.is_json, (
                    f"{answer.request.path} shows {name} of {to} as markup, or without quotes"
                )
    assert PASSWORD not in caplog.text, "a password is logged"


@mock.patch.dict(TYPED, clear=True)  # so that fields contain what a page shows
@mock.patch("web.forms.throttle", mock.Mock())
def test_text_that_just_fits_its_field_is_stored_and_shown_whole_and_may_be_emptied(
    app: Flask, ada: FlaskClient, zones: Iterator[None]
) -> None:
    """Save without a change changes nothing, and what is longer than `maxlength` is refused.

    Rows are those that the examples of openapi.json store, so that their texts fit the fields.
    """
    next(zones)
    secret = secret_in(create_key(ada))
    for each in [each for each in OPERATIONS if each.method == "POST"]:
        ada.post(each.url(), headers={"X-API-Key": secret}, **each.sent(each.example))
    add_rows(
        row(secret),
        "tea",
        1,
        is_full=True,
        tables=[each for each, rows in snapshot().items() if each in TABLES[3:] and not rows],
    )
    write(User.email, "own@example.com")  # which no example has
    before = snapshot()

    def is_taken(to: str, form: dict[str, str]) -> bool:
        restore(before)
        return ada.post(to, data=form | {"nonce": ""}).status_code < 400

    for path, page in {path: ada.get(path, buffered=True) for path in routes(app, "GET")}.items():
        for (name, size), (to, form) in product(
            re.findall(SIZED, page.text), forms_of(page).items()
        ):
            taken = [
                text
                for n in (0, 10, int(size), int(size) + 1)
                for text in (
                    *(f"https://x.xx/{'x' * n}"[:n], "x" * n, f"x@{'x.' * n}"[: n - 2] + "xx"),
                    *(("x " * n)[: n - 1] + "x", "+1" + "1" * (n - 2)),
                    "" if n else form.get(name),
                )
                if text and name in form and is_taken(to, form | {name: text})
            ]  # what it shows, and others by size
            assert taken or name not in form or to in PASSWORDS_ONLY, (
                f"{to} takes no text as {name}, as {form}: let the example of a POST in "
                "docs/endpoints.json store a row that the form takes"
            )
            for longest in taken[-1:]:
                # A small number that is taken may be a coordinate, and no text of this size.
                assert len(longest) == int(size) or longest in (form[name], "+1"), (
                    f"{to} allows another maxlength of {name}"
                )
                is_taken(to, form | {name: longest})
                check_texts()
                wrong = neglected(before, longest)
                assert not wrong, (
                    f"{to} with another {name} must keep {wrong}, or set the time; and {path} "
                    "must show what is stored"
                )
                stored = str(snapshot()).count(longest)
                shown = forms_of(ada.get(path)).get(to, form)
                assert shown.get(name) == form[name] or (  # it shows what is stored
                    ada.post(to, data=shown).status_code < 400
                    and str(snapshot()).count(longest) >= stored
                ), f"{path} cuts or changes {name}"
                assert (
                    not form[name]
                    or not is_taken(to, form | {name: ""})
                    or str(snapshot()).count(form[name]) < max(1, str(before).count(form[name]))
                ), f"{to} keeps the {name} that was emptied"
            restore(before)


def browser_of(app: Service, user: str) -> FlaskClient:
    app.extensions["throttles"] = Limiter()
    browser = app.test_client()
    if user:
        log_in_as(browser, user)
    return browser


def forms_of(page: TestResponse) -> dict[str, dict[str, str]]:
    """The forms of a page by where they are sent, each with its fields and what these contain.

    Only those that can be sent: by POST, so that no address has what was typed, and with a button.
    """
    return {
        unescape(to) or page.request.path: fields_of(fields)
        for to, fields in re.findall(
            r'(?s)<form(?=[^>]* method="post")(?:[^>]* action="([^"]*)")?[^>]*>'
            r'((?:(?!</form>).)*<(?:button(?![^>]* type=)|(?:button|input)[^>]* type="submit")'
            r"(?:(?!</form>).)*)</form>",
            page.text,
        )
    }


def all_forms(app: Flask, user: FlaskClient) -> dict[str, dict[str, str]]:
    """Those of all pages, also of those with a query to which one of these leads."""
    pages = [user.get(path, follow_redirects=True) for path in routes(app, "GET")]
    found = {unescape(to) for page in pages for to in re.findall(' href="(/.*?[?].*?)"', page.text)}
    return {
        to: fields
        for page in [*map(user.get, found), *pages]
        for to, fields in forms_of(page).items()
    }


def evil_form(app: Flask, user: FlaskClient) -> dict[str, str]:
    """What Mallory sends to each form: every field of every form, in texts of his own."""
    return {
        name: text for fields in all_forms(app, user).values() for name, text in fields.items()
    } | {"username": "mallory", "email": "m@example.com", "password": "chosen by Mallory"}


def other_choices(
    page: TestResponse, path: str, form: dict[str, str], told: str
) -> set[tuple[str, str]]:
    """What else a form can send: by another button, or by an option, if its message names one.

    And what it would send now, if its page has changed, such as to undo what was done.
    """
    sent = {*forms_of(page).get(path, form).items(), *re.findall(BUTTONS, page.text)} | {
        (name, value)
        for name, options in re.findall('(?s)<select[^>]* name="(.*?)"(.*?)</select>', page.text)
        for value in re.findall('<option value="(.+?)"', options)
        if value.lower() in told or form.get(name, value).lower() in told
    }
    return {(name, text) for name, text in sent if form.get(name, text) != text and name != "nonce"}


def fields_of(form: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for kind, written, text in re.findall(
        r"<(input|textarea|select|option|button)\b([^>]*)>([^<]*)", form
    ):
        attributes = dict(re.findall(r' ([\w-]+)(?:="(.*?)")?', written))
        name = name if kind == "option" else attributes.get("name", "")
        text = attributes.get("value", text.strip()) or (
            "1@example.com" if ' type="email"' in written else "1"
        ) * (" required" in written)
        fields[name] = (
            (not attributes.keys() & {"selected", "checked"} and fields.get(name))
            or TYPED.get(name)
            or unescape(text)
        )
    return {name: text for name, text in fields.items() if name}


@db.connection_context()
@db.atomic()
def restore(rows: dict[Any, list[dict[str, Any]]]) -> None:
    for table in reversed(rows):
        table.delete().execute()
    for table, kept in rows.items():
        table.insert_many(kept).on_conflict_ignore().execute()


def check_texts() -> None:
    for table, rows in snapshot().items():
        for name, text in [field for each in rows for field in each.items() if field[1]]:
            size = getattr(table._meta.fields[name], "max_length", None)  # a CharField has one
            assert not size or (text.isprintable() and len(text) <= size and text != "mallory"), (
                f"{name} is {text!r}: see FIELD_RULES in models.py"
            )


def test_messages_that_nobody_reads_make_no_cookie_longer(client: FlaskClient) -> None:
    """A cookie may be much shorter than what it decompresses to."""
    assert [
        len({f"{client.post(KEYS).headers.get('Set-Cookie')}".split(".")[0] for _ in range(30)}),
        "Log in to open Profile Settings." in client.get(SECURITY, follow_redirects=True).text,
    ] == [1, True], "the session grows with each message, but it keeps the last one only"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://mallory.example"},
        {"Origin": "null"},
        {"Origin": "null", "Host": "my_host"},
        {"Origin": "http://", "Host": "localhost:99999"},
        {"Origin": "http://mallory/://localhost"},
        {"Origin": "http://["},  # which urlsplit doesn't take
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost"},
        {"Sec-Fetch-Site": "none", "Origin": "https://mallory.example"},
    ],
)
def test_no_form_is_taken_from_another_site(
    app: Flask, ada: FlaskClient, headers: dict[str, str]
) -> None:
    """Nor are these counted."""
    create_key(ada)
    evil = evil_form(app, ada)
    for path in routes(app, "POST") * 6:
        with outage():
            answer = ada.post(path, data=evil, headers=headers)
        assert (answer.status_code, "Set-Cookie" in answer.headers) == (403, False), (
            f"{path}: refuse it before the database is asked, and show an error page without it"
        )
        assert [
            text in answer.text for text in ("sent from another", "the form</a>", "Log in</a>")
        ] == [
            True,
            path != "/log-out",
            headers.get("Host") == "localhost:99999",  # which has a cookie of its own
        ], f"{path}: the page offers what is no help; it does not know whether she is logged in"
    assert ada.post(PROFILE).status_code == 422, (
        "a form of another site logs Ada out, or counts for her: see check_form in web/forms.py"
    )


def test_log_out_from_our_own_pages_is_taken_and_may_be_sent_again(ada: FlaskClient) -> None:
    assert ada.get("/log-out").status_code == 405
    for headers in [
        {"Sec-Fetch-Site": "same-origin", "Origin": "null"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "https://localhost"},  # TLS ended in front of us
        {"Origin": "http://my_host", "Host": "my_host"},
        {"Origin": "http://localhost:99999", "Host": "localhost:99999"},
        {},
    ]:
        assert ada.post("/log-out", headers=headers).location == "/", (
            f"our own form is refused: see sent_from_here: {headers}"
        )
        assert not is_logged_in(ada), "see log_out in web/log_in.py"


@pytest.mark.parametrize(
    "host", ["xn--strae-oqa.de", "xn--", "a..b", "a b", "[::1", "é.de", '"><i>']
)
@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_no_host_name_makes_a_page_fail(
    app: Flask, ada: FlaskClient, monkeypatch: pytest.MonkeyPatch, host: str, upgrade: str
) -> None:
    inner = app.wsgi_app  # the client of the tests fails for these names itself
    sent = {"HTTP_HOST": host, "HTTP_CONNECTION": "Upgrade", "HTTP_UPGRADE": upgrade}
    monkeypatch.setattr(app, "wsgi_app", lambda environ, start: inner(environ | sent, start))
    answers = [*map(ada.get, ["/", SECURITY, "/nowhere"]), page := create_key(ada)]
    assert {answer.status_code for answer in answers} <= {200, 400, 404}, f"Host: {host}"
    assert len(set(SECRET.findall(page.text))) == count() == 1, (
        f"with Host: {host}, a form makes no key, or the page does not show it: {page}"
    )
    assert not [answer for answer in answers if "<i>" in answer.text], "the host is not escaped"


# What every page carries


def test_everything_has_the_security_headers(client: FlaskClient) -> None:
    static_urls = re.findall('"(/static/.*?)"', client.get("/").text)
    for path in ["/", "/log-in", "/nowhere", "/static/nowhere", *static_urls]:
        headers = client.get(path).headers
        secure = client.get(path, base_url="https://localhost").headers
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert policy == {
            **dict.fromkeys(("default-src", "base-uri", "frame-ancestors"), "'none'"),
            **dict.fromkeys(("script-src", "style-src", "img-src"), "'self'"),
            **dict.fromkeys(("connect-src", "form-action"), "'self'"),
        }, f"{path}: see SECURITY_HEADERS in web/site.py"
        assert {
            "Referrer-Policy": headers.get("Referrer-Policy"),
            "X-Content-Type-Options": headers.get("X-Content-Type-Options"),
            "Cache-Control": headers.get("Cache-Control"),
            "Strict-Transport-Security": headers.get("Strict-Transport-Security"),
            "and on https": secure.get("Strict-Transport-Security"),
        } == {
            "Referrer-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache" if path in static_urls else "no-store",
            "Strict-Transport-Security": None,
            "and on https": "max-age=31536000",
        }, f"{path}: see SECURITY_HEADERS and add_security_headers in web/site.py"
        assert "Access-Control" not in str(headers), "pages are for their own origin only"


def test_console_shows_what_is_added_to_the_descriptions(app: Flask, client: FlaskClient) -> None:
    described: dict[str, Any] = app.jinja_env.globals
    rest, sockets = described["openapi"], described["asyncapi"]
    rest["paths"] |= {
        "/api/v1/greetings/{name}": {
            "get": {
                "summary": "A `greeting` <i>",
                "security": [{"apiKey": []}],
                "parameters": [
                    {"name": "name", "in": "path", "example": "ada & co"},
                    {"name": "page", "in": "query", "example": 2},
                    {"name": "order", "in": "query"},
                    {"name": "open", "in": "query", "example": False},
                ],
            }
        },
        "/api/v1/invoices": {
            "get": {"summary": "New.", "tags": ["billing"], "responses": {"204": {}}}
        },
    }
    rest["tags"].append({"name": "billing", "description": "For `money`."})
    rest["x-codes"].append({"status": 409, "code": "conflict", "when": "Why.", "then": "What."})
    sockets["channels"] |= {
        "count": {"address": "/api/v1/ws/count", "summary": "It is new."},
        "shout": {"address": "/api/v1/ws/shout", "summary": "It is new."},
    }
    sockets["operations"] |= {
        "count": {"action": "send", "channel": {"$ref": "#/channels/count"}, "security": [{}]},
        "shout": {"action": "receive", "channel": {"$ref": "#/channels/shout"}, "security": []},
    }
    sockets["x-close-codes"]["4000"] = {"when": "Why not.", "then": "Do that."}
    page = unescape(client.get("/").text).replace("<wbr>", "")
    card = dict(re.findall('<article [^>]* id="(.*?)"(.*?)</art', page, re.DOTALL))
    path = "/api/v1/greetings/ada%20%26%20co?page=2&open=false"
    url = f'"http://localhost{path}"'
    for card_id, texts in {
        "/api/v1/greetings/{name}": (
            "A <code>greeting</code> <i>.",
            f'data-path="{path}"',
            f'<code>curl -H "X-API-Key: $KEY" {url}</code>',
            '<code>import os\nimport requests\n\nheaders = {"X-API-Key": os.environ["KEY"]}\n'
            f"print(requests.get({url}, headers=headers).json())</code>",
            '<code>const headers = { "X-API-Key": process.env.KEY };\n'
            f"const response = await fetch({url}, {{ headers }});\n"
            "console.log(await response.json());</code>",
        ),
        STATUS: (  # the code sends a key, as the button does
            f'curl -H "X-API-Key: $KEY" http://localhost{STATUS}',
            *(f'data-path="{STATUS}" aria', "key optional<"),
        ),
        YEAR: (
            f"<code>curl http://localhost{YEAR}</code>",
            f'<code>import requests\n\nprint(requests.get("http://localhost{YEAR}").json())</code>',
            f'<code>const response = await fetch("http://localhost{YEAR}");\n'
            "console.log(await response.json());</code>",
            *(f'data-path="{YEAR}" data-public aria', "public<"),
        ),
        "/api/v1/invoices": (  # whose success has no body
            "<code>curl -i http://localhost/api/v1/invoices</code>",
            '\nprint(requests.get("http://localhost/api/v1/invoices"))</code>',
            "\nconsole.log(response);</code>",
        ),
        "/api/v1/ws/count": (
            "API key<",
            f'data-check="{TEST}" aria',
            '<code>npx -y wscat -c "ws://localhost/api/v1/ws/count?api_key=$KEY"</code>',
            "<code>import os\nfrom websockets.sync.client import connect\n\n"
            'with connect("ws://localhost/api/v1/ws/count?api_key=" + os.environ["KEY"]) as socket:'
            "\n    for message in socket:\n        print(message)</code>",
            '("ws://localhost/api/v1/ws/count?api_key=" + process.env.KEY);\n'
            "socket.onmessage = ({ data }) => console.log(data);\n"
            'socket.onerror = () => console.log("refused or disconnected");\n'
            "socket.onclose = ({ code, reason }) => console.log(code, reason);</code>",
            'role="log" aria-live="off"',  # what comes by itself is not read aloud
        ),
        "/api/v1/ws/shout": (
            *("public<", "<form", 'data-check="/asyncapi.json" data-public aria'),
            '<code>npx -y wscat -c "ws://localhost/api/v1/ws/shout"</code>',
            '<code>from websockets.sync.client import connect\n\nwith connect("ws://localhost'
            '/api/v1/ws/shout") as socket:\n    socket.send("Hello")\n'
            "    print(socket.recv())</code>",
            '<code>const socket = new WebSocket("ws://localhost/api/v1/ws/shout");\n'
            'socket.onopen = () => socket.send("Hello");\n'
            "socket.onmessage = ({ data }) => console.log(data);\n",
            'role="log" aria-live="polite"',
        ),
    }.items():
        assert not [text for text in texts if text not in card[card_id]], (
            f"{card_id}: edit reference.html or parts.html: {texts}"
        )
    listed, _, apart = page.partition("<h2>Billing</h2>")
    assert "For <code>money</code>." in apart
    assert ("/api/v1/invoices" in listed, "/api/v1/invoices" in apart) == (False, True)
    assert re.search(r'{\n  "year": \d+,\n  "message"', page), "as the API sends it"
    rows = dict(re.findall("<dt>(.*?)</dt>\\s*<dd>(.*?)</dd>", page))
    assert {
        '<span class="chip">409</span> <code>conflict</code>': "Why. What.",
        '<span class="chip">4000</span>': '<span id="close-4000">Why not.</span> Do that.',
        "<code>once</code>": "1 request per day",
    }.items() <= rows.items(), "see `dl` in reference.html and parts.html"
    assert re.findall(r'(\w+)</h2> <span class="hint">(\d+)', page)[-2:] == [
        ("Errors", f"{len(rest['x-codes'])}"),
        ("codes", f"{len(sockets['x-close-codes'])}"),
    ]


@pytest.mark.parametrize(
    ("http", "ws"),
    [
        ("http://http_host", "ws://http_host"),  # for which `request.host` is empty
        ("https://a.example/demo", "wss://a.example/demo"),
    ],
)
def test_console_has_the_address_that_was_asked_for(
    client: FlaskClient, http: str, ws: str
) -> None:
    """Whatever address the request before had."""
    assert client.get("/", base_url="http://b.example/other").status_code == 200
    page = unescape(client.get("/", base_url=http).text).replace("<wbr>", "")
    prefix = http.partition("a.example")[2]
    assert [
        code
        for code in (
            f"curl {http}{YEAR}",
            f'WebSocket("{ws}{ECHO}")',
            f"<code>{prefix}{YEAR}</code>",
            f"Only <code>{prefix}{STATS}</code>",
        )
        if code not in page
    ] == [], "the console shows another address than the one of the request: see reference()"


def test_path_prefix_is_part_of_all_links_and_forms_and_everything_is_linked(
    app: Flask, ada: FlaskClient
) -> None:
    """Also of the redirect from a form's address to its tab, and of the page of a replaced key."""
    ada.post(f"{KEYS}/{secret_in(create_key(ada))[8:16]}/successor")
    for is_full in (False, True):  # such as a project, and one that is archived
        add_rows(stored_keys()[0], f"~{is_full}", 1, is_full)
    linked = {"/log-in", "/sign-up", "/settings", "/console"}  # of others, or typed by hand
    for answer in [
        create_key(ada, base_url="http://localhost/demo"),
        *(
            ada.get(path, base_url="http://localhost/demo", buffered=True)
            for path in (*routes(app, "GET"), "/nowhere", KEYS)
        ),
    ]:
        leads = re.findall(
            ' (?:href|src|action|data-path|data-check|data-take)="((?!mailto:|tel:|~)[^#].*?)"',
            answer.text,
        )
        assert (
            ("/demo/log-out" in leads and {"/demo/log-in", "/demo/sign-up"}.isdisjoint(leads))
            or answer.location
            or answer.is_json
        ), f"{answer.request.path} looks logged out, or offers what only others need"

        for back in re.findall('href="/demo(.*?)">Cancel<', answer.text):
            assert f'href="{answer.request.path}"' in ada.get(back).text, (
                f"{answer.request.path}: Cancel leads to {back}, which doesn't lead to this page"
            )
        for lead in (*leads, answer.location or "/demo/"):
            assert re.match(f"/demo/(?!.*{SECRET.pattern})", lead), (
                f"{answer.request.path}: a link lacks the prefix, or has a key: {lead[:20]}"
            )
            # A form that its own page sends leads nobody there.
            linked |= {lead.removeprefix("/demo").partition("#")[0]} - {answer.request.path}
    needed = {path for method in ("GET", "POST") for path in routes(app, method)}
    needed -= {path for path in needed if path.startswith(f"{KEYS}/ada/")}  # no key has this ID
    needed -= {f"{path_of(0)}/{action}" for action in ("rotate", "successor")}  # it is replaced
    # Of other rows, one that has a link is enough: these numbers and texts are made up.
    ids = "|".join([r"ada|\d[\d.-]*", *(key.id for key in stored_keys())])
    shapes = {path: re.sub(rf"(?<!{KEYS})/(?:{ids})(?=/|$)", "/[^/]+", path) for path in needed}
    alone = [
        path
        for paths, method in (
            (linked, "GET"),
            (all_forms(app, ada) | all_forms(app, app.test_client()), "POST"),
        )
        for path in needed.intersection(routes(app, method))
        if not re.search(f"^{shapes[path]}$", "\n".join(paths), re.M)
    ]
    assert not alone, (
        f"no page leads to {alone}, or has the form for it with a button: link it, show the form, "
        "or name a page in `linked`"
    )


@pytest.mark.parametrize(
    ("path", "links", "heading"),
    [
        ("/", ['page">Console'], "A live API to test your client against"),
        (SECURITY, ['true">API keys', 'page">Security'], "API keys"),
        (PROFILE, ['true">Profile Settings', 'page">Profile'], "Profile Settings"),
    ],
)
def test_page_is_headed_as_the_link_that_leads_to_it(
    ada: FlaskClient, path: str, links: list[str], heading: str
) -> None:
    page = ada.get(path, base_url="http://localhost/demo").text
    assert [
        *re.findall('href="/demo([^"]*)" aria-current="(.*?)</a>', page),
        *re.findall("<h1>(.*?)</h1>|Version ([0-9.]+[0-9])", page),
    ] == [*((path, link) for link in links), (heading, ""), ("", API["info"]["version"])], (
        f"{path}: the links that are current, here and in no other place, the heading, and the "
        "version in the footer: see layout.html and settings.html"
    )


def test_form_says_what_a_type_sets_and_no_page_names_a_command(ada: FlaskClient) -> None:
    assert re.search(
        '(?s)<div class="new-key">.*value="production" checked>.*'
        "sets the prefix only: sk_live_ for Production, sk_test_ for Development[.]",
        re.sub("</?code>", "", ada.get(SECURITY).text),
    ), "the form is open where there is no key"
    assert [
        file.name
        for file in (settings.PROJECT / "web/templates").glob("*.html")
        if "<code>flask" in file.read_text()
    ] == [], "visitors cannot run commands: name them in docs/operating.md, not in these templates"


@pytest.mark.parametrize("config", [{}, {"API_URL": "https://api.example.com"}], indirect=True)
def test_page_of_a_visitor_is_the_same_whoever_was_the_first(
    app: Flask, ada: FlaskClient, client: FlaskClient
) -> None:
    """Some pages are rendered once for all visitors."""
    at_the_start = {**app.extensions}
    pages = {path: client.get(path).text for path in PUBLIC_PAGES}
    app.extensions = at_the_start
    for path, text in pages.items():
        ada.get(path)
        assert re.sub(r"\d", "", client.get(path).text) == re.sub(r"\d", "", text), (
            f"{path} shows to all what the first one sees: see reference()"
        )


@pytest.mark.parametrize("config", [{}, {"API_URL": "https://api.example.com"}], indirect=True)
def test_links_to_the_reference_lead_to_what_is_there(client: FlaskClient) -> None:
    """What is folded has its anchor inside, because browsers open only that."""
    page = client.get("/").text
    links = re.findall('<a href="/#(.*?)">(.*?)</a>', page.partition("<footer>")[2])
    assert {"rate-limits", "errors"} <= {anchor for anchor, _ in links}
    for anchor, title in links:
        folded = (
            f'<details class="fold">\\s*<summary><h2>{title}</h2>.*?</summary>\\s*'
            f'<div [^>]*id="{anchor}"'
        )
        assert re.search(f'{folded}|<section id="{anchor}"', page), (
            f"no part of the page has the anchor {anchor} and the title {title}, or it is folded "
            "with its anchor outside: see reference.html, api.html"
        )


@pytest.mark.parametrize(
    ("cookies", "status"),
    [
        ("session=another; OURS; session=b", 200),
        ('a="b; OURS; session=b', 200),
        ("not-OURSx; OURS; session=b", 200),
        ("a=b; OURS; session=b", 200),
        ("a=b,OURS", 200),  # as gunicorn joins two headers
        # Of our name, as other paths or subdomains may have set them:
        (f"demo_service=; demo_service=a;{' OURSx;' * 5} OURS", 200),
        (f"demo_service=; demo_service=a;{' OURSx;' * 6} OURS", 303),
        (f"a={',OURSx' * 8}; OURS", 200),  # those are a part of the value of another cookie
    ],
)
def test_log_in_lasts_beside_other_cookies_of_the_host_and_seven_of_its_name(
    ada: FlaskClient, cookies: str, status: int
) -> None:
    cookie = ada.get_cookie("demo_service")
    assert cookie
    visitor = ada.application.test_client(use_cookies=False)
    assert (
        visitor.get(
            SECURITY,
            headers={"Cookie": cookies.replace("OURS", f"demo_service={cookie.value}")},
        ).status_code,
        "allow cookies for this site" in visitor.get("/log-in").text,
    ) == (status, True), (
        "eight cookies named demo_service are looked at: see open_session in web/log_in.py; and "
        "whose browser keeps none is told so on the log-in page"
    )


def test_cookie_is_out_of_reach_of_scripts_subdomains_and_services_on_other_ports(
    ada: FlaskClient,
) -> None:
    for url, name in {
        "http://localhost:8000": "demo_service_8000",
        "http://localhost:8001": "demo_service_8001",
        "https://localhost:8001": "__Host-demo_service_8001",
        "http://[::1]:8000": "demo_service_8000",
        "http://localhost": "demo_service",
        "https://[::1]": "__Host-demo_service",
        "https://localhost/demo": "demo_service",  # browsers refuse __Host- with a path
    }.items():
        path = ada.application.config["SESSION_COOKIE_PATH"] = (
            re.sub("^https?://[^/]*", "", url) or "/"
        )
        value, *attributes = log_in_as(ada, "ada", base_url=url).headers["Set-Cookie"].split("; ")
        assert {value.partition("=")[0], *attributes} == (
            {name, f"Path={path}", "HttpOnly", "SameSite=Lax"}
            | ({"Secure"} if url.startswith("https") else set())
        ), f"so each service under {url} has a cookie of its own"


# Errors


@pytest.mark.parametrize(
    ("status", "seconds", "words"),
    [
        (400, 0, "Bad request The request is invalid. Go to the console"),
        (403, 0, "Not allowed You don't have permission to do this. Go back to the form"),
        (404, 0, "Page not found There is nothing at this address. The API is described in /demo/"),
        (405, 0, "Nothing was changed This address does not accept POST requests. Go to the"),
        (408, 0, "The form took too long It did not arrive in time. Send it again. Go back to"),
        (409, 0, "Conflict A conflict happened while processing the request."),
        (413, 0, "The form is too large Nothing was changed. Go to the console"),
        (415, 0, "The form was not understood It came in another format. Go to the console"),
        (429, 59, "Too many attempts There is a limit on how often this may be done. Try again in"),
        (429, 59, "Try again in 59 s. Go back to the form"),
        (429, 3569, "Try again in 59 min. Go back to the form"),
        (500, 0, "Something went wrong This is an error on our side. Go to the console"),
        (503, 119, "Not available right now The service is busy, or its database cannot be used."),
        (503, 119, "Try again in 2 min. Go back to the form"),
        (503, 3600, "Try again in 1 h. Go back to the form"),
    ],
)
def test_error_page_says_what_happened_and_what_to_do(
    client: FlaskClient, status: int, seconds: int, words: str
) -> None:
    client.application.add_url_rule(
        "/busy",
        "busy",
        lambda: abort(status, **({"retry_after": seconds} if seconds else {})),
        methods=["POST"],
    )
    page = client.post("/busy?next=/settings", base_url="http://localhost/demo").text
    text = " ".join(unescape(re.sub("<.*?>", " ", page)).split())
    assert (words in text, 'back to <a href="/demo/busy?next=/settings">the form</a>' in page) == (
        True,
        status in (403, 408, 429, 503),  # it may be sent again
    ), f"{status}: edit error.html: {text}"


@pytest.mark.parametrize(
    ("ahead", "is_valid"), [(59, True), (120, False), (-30 * DAY, True), (-32 * DAY, False)]
)
def test_session_lasts_a_month_also_one_of_a_machine_whose_clock_is_ahead(
    ada: FlaskClient, monkeypatch: pytest.MonkeyPatch, ahead: int, is_valid: bool
) -> None:
    monkeypatch.setattr("itsdangerous.timed.time", Clock(time.time() + ahead))
    log_in_as(ada, "ada")
    monkeypatch.undo()
    assert (ada.get(SECURITY).status_code == 200) == is_valid, (
        f"a session that began {-ahead} s ago is {'good' if is_valid else 'too old or too new'}: "
        "see open_session in web/log_in.py"
    )
