"""The pages: who may do what, what comes back for bad input, and what leaks nowhere.

Ada and Bob have accounts; Mallory knows their names and writes forms on another site.
"""

import re
import secrets
import time
from collections.abc import Callable
from typing import Any

import gevent
import pytest
from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

import accounts
import app as service
import auth
import models
import settings
from models import ApiKey, HourlyUsage, User
from ratelimit import Limiter
from storage import background

PASSWORD = secrets.token_urlsafe()
SECRET = re.compile(r"sk_(?:live|test)_\w{8}_\w{38}")
WRONG = "The user name, the email or the password is wrong."
ELSEWHERE = {"Origin": "https://mallory.example"}
FORMS = [
    "/sign-up",
    "/log-in",
    "/log-out",
    "/settings/profile",
    "/settings/security/password",
    "/settings/security/keys",
    "/settings/security/keys/{key}",
    "/settings/security/keys/{key}/revoke",
    "/settings/security/keys/{key}/successor",
]

LogIn = Callable[[str], FlaskClient]


class Browser(FlaskClient):
    """Sends a form as the pages make it: with the account that it is for, and a token."""

    def post(self, *args: Any, **options: Any) -> TestResponse:
        data = options.get("data", {})
        if isinstance(data, dict):
            options["data"] = {"form": f"{self.account}.{secrets.token_hex()}"} | data
        return super().post(*args, **options)

    @property
    def account(self) -> object:
        with self.session_transaction() as session:
            return session.get("user", "")


@pytest.fixture
def app(app: Flask) -> Flask:
    app.test_client_class = Browser
    started = time.time()
    app.extensions["throttles"] = Limiter(clock=lambda: started)  # no minute turns in a test
    return app


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
    form = {"username": name, "email": f"{name}@example.com", "password": PASSWORD}
    return browser.post("/sign-up", data=form | fields)


def log_in_as(browser: FlaskClient, username: str, password: str = PASSWORD) -> TestResponse:
    return browser.post("/log-in", data={"username": username, "password": password})


def create_key(
    browser: FlaskClient, name: str = "ci", type: str = "production", **fields: str
) -> TestResponse:
    data = {"name": name, "type": type} | fields
    return browser.post("/settings/security/keys", data=data)


def path_of(number: int) -> str:
    return f"/settings/security/keys/{stored_keys()[number].id}"


def secret_in(response: TestResponse) -> str:
    found = SECRET.search(response.text)
    assert found, response.text
    return found[0]


def is_logged_in(browser: FlaskClient) -> bool:
    return browser.get("/settings/security").status_code == 200


def stored_keys() -> list[ApiKey]:
    with models.database.connection_context():
        return list(ApiKey.select().order_by(ApiKey.created_at))


def stored_user(username: str) -> User | None:
    with models.database.connection_context():
        return accounts.find(username)


# Signing up, logging in and out


def test_sign_up_logs_in_and_leads_to_the_keys(client: FlaskClient) -> None:
    assert sign_up(client, "ada").location == "/settings/security"
    assert "Create New API Key" in client.get("/settings/security").text


def test_password_is_stored_as_scrypt_only(ada: FlaskClient) -> None:
    user = stored_user("ada")
    assert user
    assert user.password_hash.startswith("scrypt:")
    assert PASSWORD not in user.password_hash


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("username", "a", "Use 2 to 32 letters"),
        ("username", "ada lovelace", "Use 2 to 32 letters"),
        ("email", "nowhere", "Enter an address like ada@example.com."),
        ("password", "too short", "Use 10 to 256 characters."),
    ],
)
def test_bad_sign_up_comes_back_with_a_message(
    client: FlaskClient, field: str, value: str, message: str
) -> None:
    answer = sign_up(client, "ada", **{field: value})
    assert answer.status_code == 422
    assert re.search(rf'id="{field}-error" role="alert">{message}', answer.text)
    assert re.search(rf'id="{field}"[^>]*{field}-error"[^>]*aria-invalid="true"', answer.text)
    assert stored_user("ada") is None


def test_bad_sign_up_keeps_what_was_typed_but_the_password(client: FlaskClient) -> None:
    answer = sign_up(client, "<b>", email="ada@example.com")
    assert 'value="&lt;b&gt;"' in answer.text
    assert 'value="ada@example.com"' in answer.text
    assert PASSWORD not in answer.text


@pytest.mark.parametrize("fields", [{"username": "ADA"}, {"email": "ADA@example.com"}])
def test_taken_name_or_address_is_told(
    ada: FlaskClient, client: FlaskClient, fields: dict[str, str]
) -> None:
    answer = sign_up(client, "bob", **fields)
    assert answer.status_code == 422
    assert f'id="{next(iter(fields))}-error" role="alert">This is already taken.' in answer.text


def test_two_sign_ups_for_one_name_at_once_make_one_user(app: Flask) -> None:
    race = [
        gevent.spawn(sign_up, app.test_client(), "ada", email=f"{n}@example.com") for n in range(2)
    ]
    answers = [runner.get() for runner in race]
    assert sorted(answer.status_code for answer in answers) == [303, 422]
    assert any("This is already taken." in answer.text for answer in answers)


def test_closed_sign_ups_are_gone(config: settings.Settings) -> None:
    browser = service.create_app(
        config.__class__(**vars(config) | {"signups": False})
    ).test_client()
    assert "Sign up" not in browser.get("/log-in").text
    assert "sign up" not in browser.get("/").text.lower()
    assert '<a href="/log-in">Log in</a> to create a key.' in browser.get("/").text
    assert browser.get("/sign-up").status_code == 404
    assert sign_up(browser, "ada").status_code == 404
    assert stored_user("ada") is None


def test_right_password_logs_in_whatever_the_capitals_of_the_name(
    ada: FlaskClient, client: FlaskClient
) -> None:
    assert log_in_as(client, " Ada ").status_code == 303
    assert is_logged_in(client)


def test_every_failed_log_in_says_the_same(ada: FlaskClient, client: FlaskClient) -> None:
    for username, password in [("ada", "wrong password"), ("nobody", PASSWORD), ("", "")]:
        answer = log_in_as(client, username, password)
        assert answer.status_code == 422
        assert WRONG in answer.text
    assert not is_logged_in(client)


def test_log_out_ends_the_session(ada: FlaskClient) -> None:
    assert ada.post("/log-out").location == "/"
    assert not is_logged_in(ada)


def test_log_out_by_get_is_refused(ada: FlaskClient) -> None:
    assert ada.get("/log-out").status_code == 405
    assert is_logged_in(ada)


def test_log_in_keeps_nothing_of_the_session_before(ada: FlaskClient, client: FlaskClient) -> None:
    with client.session_transaction() as session:
        session["planted"] = "by Mallory"
    log_in_as(client, "ada")
    with client.session_transaction() as session:
        assert set(session) == {"user", "mark"}


@pytest.mark.parametrize("page", ["/settings", "/settings/profile", "/settings/security"])
def test_settings_lead_strangers_to_the_log_in_and_back(
    ada: FlaskClient, client: FlaskClient, page: str
) -> None:
    answer = client.get(page)
    assert (answer.status_code, answer.location) == (303, f"/log-in?next={page}")
    assert "Log in to open Profile Settings." in client.get(answer.location).text
    form = {"username": "ada", "password": PASSWORD}
    assert client.post(answer.location, data=form).location == page


@pytest.mark.parametrize(
    "page",
    [
        "//mallory.example",
        "https://mallory.example",
        "/\\mallory.example",
        "/settings//mallory.example/%0d",
        "/settings@mallory.example",
        "settings/profile",
        "/settings/profile?next=//mallory.example",
        "/settings/profile\n",
    ],
)
def test_log_in_leads_to_no_other_site(ada: FlaskClient, client: FlaskClient, page: str) -> None:
    form = {"username": "ada", "password": PASSWORD}
    answer = client.post("/log-in", query_string={"next": page}, data=form)
    assert answer.location == "/settings/security"


def test_email_address_logs_in(ada: FlaskClient, client: FlaskClient) -> None:
    assert log_in_as(client, "ADA@example.com").status_code == 303


@pytest.mark.parametrize("page", ["/log-in", "/sign-up"])
def test_who_is_logged_in_is_led_past_the_entrance(ada: FlaskClient, page: str) -> None:
    assert ada.get(page).location == "/settings/security"


def test_settings_begin_with_the_profile(ada: FlaskClient) -> None:
    assert "Member since" in ada.get("/settings").text


def test_user_who_is_gone_is_logged_out(ada: FlaskClient) -> None:
    with models.database.connection_context():
        User.delete().execute()
    assert not is_logged_in(ada)


# Throttles


def test_ten_wrong_passwords_close_the_account_for_a_minute(
    ada: FlaskClient, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "verify_password", lambda user, password: password == PASSWORD)
    answers = [log_in_as(client, "ada", "wrong").status_code for _ in range(11)]
    assert answers == [422] * 10 + [429]
    refused = log_in_as(client, "Ada")
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert re.search("Too many attempts.*Try again in [0-9]+ s", refused.text, re.DOTALL)
    assert not is_logged_in(client)


def test_right_password_among_too_many_at_once_gets_no_answer(
    ada: FlaskClient, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten others fail while this one is being checked."""

    def check(user: User | None, password: str) -> bool:
        monkeypatch.setattr(accounts, "verify_password", lambda user, password: False)
        for _ in range(10):
            log_in_as(client.application.test_client(), "ada", "wrong")
        return True

    monkeypatch.setattr(accounts, "verify_password", check)
    assert log_in_as(client, "ada").status_code == 429
    assert not is_logged_in(client)


def test_good_log_ins_are_not_counted_as_failures(app: Flask, ada: FlaskClient) -> None:
    assert {log_in_as(app.test_client(), "ada").status_code for _ in range(12)} == {303}


def test_thirty_attempts_a_minute_are_what_an_address_gets(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "verify_password", lambda user, password: False)
    answers = [log_in_as(client, f"user{n}").status_code for n in range(31)]
    assert answers == [422] * 30 + [429]
    elsewhere = {"REMOTE_ADDR": "192.0.2.7"}
    assert client.post("/log-in", environ_base=elsewhere, data={}).status_code == 422


def test_twenty_sign_ups_an_hour_are_what_an_address_gets(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "hash_password", lambda password: "no hash")
    mistakes = [sign_up(client, "a").status_code for _ in range(5)]
    browsers = [client.application.test_client() for _ in range(21)]
    answers = [sign_up(browser, f"user{n}").status_code for n, browser in enumerate(browsers)]
    assert mistakes == [422] * 5
    assert answers == [303] * 20 + [429]


def test_ten_sign_ups_a_minute_are_what_a_name_gets(app: Flask, ada: FlaskClient) -> None:
    answers = []
    for n in range(10):
        browser = app.test_client()
        browser.environ_base["REMOTE_ADDR"] = f"192.0.2.{n}"
        answers.append(sign_up(browser, "Ada").status_code)
    assert answers == [422] * 9 + [429]  # the first of ten was Ada's own


# The profile and the password


def test_profile_can_be_changed(ada: FlaskClient) -> None:
    form = {"username": "countess", "email": "ada@lovelace.example"}
    answer = ada.post("/settings/profile", data=form, follow_redirects=True)
    assert "Your profile is saved." in answer.text
    assert "countess" in answer.text
    user = stored_user("countess")
    assert user
    assert user.email == "ada@lovelace.example"


def test_profile_cannot_take_what_is_anothers(log_in: LogIn, ada: FlaskClient) -> None:
    log_in("bob")
    form = {"username": "Bob", "email": "ada@example.com"}
    answer = ada.post("/settings/profile", data=form)
    assert answer.status_code == 422
    assert "This is already taken." in answer.text
    assert 'value="Bob"' in answer.text
    assert stored_user("ada")


def test_new_password_ends_the_other_sessions_but_not_this_one(
    ada: FlaskClient, client: FlaskClient
) -> None:
    log_in_as(client, "ada")
    form = {"current": PASSWORD, "password": "a brand new one"}
    answer = ada.post("/settings/security/password", data=form, follow_redirects=True)
    assert "Your password is changed" in answer.text
    assert is_logged_in(ada)
    assert not is_logged_in(client)
    assert log_in_as(client, "ada").status_code == 422
    assert log_in_as(client, "ada", "a brand new one").status_code == 303


@pytest.mark.parametrize(
    ("current", "new", "message"),
    [
        ("not my password", "a brand new one", "This is not your current password."),
        (PASSWORD, "short", "Use 10 to 256 characters."),
    ],
    ids=["not the current one", "too short"],
)
def test_password_stays_when_the_form_is_wrong(
    ada: FlaskClient, client: FlaskClient, current: str, new: str, message: str
) -> None:
    form = {"current": current, "password": new}
    answer = ada.post("/settings/security/password", data=form)
    assert answer.status_code == 422
    assert message in answer.text
    assert current not in answer.text
    assert log_in_as(client, "ada").status_code == 303


def test_of_two_new_passwords_at_once_one_wins(
    ada: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(password: str) -> str:
        with models.database.connection_context():
            User.update(password_hash="set meanwhile").execute()
        return "too late"

    monkeypatch.setattr(accounts, "hash_password", slow)
    form = {"current": PASSWORD, "password": "a brand new one"}
    assert ada.post("/settings/security/password", data=form).status_code == 422
    user = stored_user("ada")
    assert user
    assert user.password_hash == "set meanwhile"


def test_saving_the_profile_does_not_bring_back_an_old_password(
    ada: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = accounts.save

    def slow(user: User) -> User:
        with models.database.connection_context():
            User.update(password_hash="set meanwhile").execute()
        return save(user)

    monkeypatch.setattr(accounts, "save", slow)
    ada.post("/settings/profile", data={"username": "countess", "email": "ada@example.com"})
    user = stored_user("countess")
    assert user
    assert user.password_hash == "set meanwhile"


# Keys


@pytest.mark.parametrize(
    ("type", "prefix"), [("production", "sk_live_"), ("development", "sk_test_")]
)
def test_new_key_is_shown_once_and_works(ada: FlaskClient, type: str, prefix: str) -> None:
    answer = create_key(ada, "my laptop", type)
    assert answer.status_code == 200
    assert answer.headers["Cache-Control"] == "no-store"
    assert "Set-Cookie" not in answer.headers
    secret = secret_in(answer)
    assert secret.startswith(prefix)
    body = ada.get("/api/v1/protected/test", headers={"X-API-Key": secret}).get_json()
    assert (body["api_key_name"], body["api_key_type"]) == ("my laptop", type)
    assert f"-H &#34;X-API-Key: {secret}&#34; http://localhost/api/v1" in answer.text


def test_secret_is_nowhere_after_its_answer(ada: FlaskClient, config: settings.Settings) -> None:
    secret = secret_in(create_key(ada))[-38:]
    pages = ["/", "/settings/profile", "/settings/security", "/settings/security/keys"]
    assert not [page for page in pages if secret in ada.get(page).text]
    cookie = ada.get_cookie("session")
    assert cookie
    assert secret not in cookie.value
    files = config.sqlite.parent.glob("*")
    assert not [file for file in files if secret.encode() in file.read_bytes()]


@pytest.mark.parametrize("name", ["", "   ", "n" * 65, "two\nlines"])
def test_bad_name_makes_no_key(ada: FlaskClient, name: str) -> None:
    answer = create_key(ada, name)
    assert answer.status_code == 422
    assert 'id="name-error" role="alert">Give the key a name' in answer.text
    assert stored_keys() == []


def test_longest_name_makes_a_key(ada: FlaskClient) -> None:
    create_key(ada, "n" * 64)
    assert [key.name for key in stored_keys()] == ["n" * 64]


def test_unknown_type_makes_no_key(ada: FlaskClient) -> None:
    answer = create_key(ada, type="admin")
    assert answer.status_code == 422
    assert "Choose Development or Production." in answer.text
    assert stored_keys() == []


def test_bad_key_form_keeps_the_chosen_type(ada: FlaskClient) -> None:
    assert '<option value="production" selected>' in create_key(ada, "").text


def test_twenty_sixth_key_is_refused(ada: FlaskClient) -> None:
    for _ in range(25):
        create_key(ada)
    answer = create_key(ada)
    assert answer.status_code == 422
    assert "You have 25 keys, the maximum." in answer.text
    assert len(stored_keys()) == 25


def test_list_shows_a_key_and_what_it_used(app: Flask, ada: FlaskClient) -> None:
    secret = secret_in(create_key(ada, "<i>"))
    assert "never" in ada.get("/settings/security").text
    for _ in range(3):
        ada.get("/api/v1/protected/test", headers={"X-API-Key": secret})
    background.Background(app).sync()
    page = ada.get("/settings/security").text
    assert '<th scope="row">&lt;i&gt;' in page
    assert f"{secret[:16]}…" in page
    assert "3 of 1000" in page
    assert '<td data-label="Last used">never' not in page


def test_revoked_key_stops_at_once(ada: FlaskClient) -> None:
    header = {"X-API-Key": secret_in(create_key(ada, "ci"))}
    assert ada.get("/api/v1/protected/test", headers=header).status_code == 200
    [key] = stored_keys()
    path = f"/settings/security/keys/{key.id}/revoke"
    assert "The key ci is revoked." in ada.post(path, follow_redirects=True).text
    assert ada.get("/api/v1/protected/test", headers=header).status_code == 401


def test_second_click_on_revoke_is_no_error(ada: FlaskClient) -> None:
    create_key(ada, "ci")
    [key] = stored_keys()
    path = f"/settings/security/keys/{key.id}/revoke"
    assert ada.post(path).status_code == 303
    with models.database.connection_context():
        ApiKey.update(revoked_at=1).execute()  # as if it had been long ago
    assert ada.post(path).status_code == 303
    assert stored_keys()[0].revoked_at == 1


def test_key_of_another_cannot_be_revoked(log_in: LogIn, ada: FlaskClient) -> None:
    create_key(ada)
    [key] = stored_keys()
    answer = log_in("bob").post(f"/settings/security/keys/{key.id}/revoke")
    assert answer.status_code == 404
    assert stored_keys()[0].revoked_at is None


def test_key_of_another_is_not_listed(log_in: LogIn, ada: FlaskClient) -> None:
    create_key(ada, "the key of Ada")
    assert "the key of Ada" not in log_in("bob").get("/settings/security").text


def test_chart_shows_24_hours_of_all_keys_of_the_user(log_in: LogIn, ada: FlaskClient) -> None:
    create_key(ada)
    create_key(ada)
    create_key(log_in("bob"))
    this_hour = int(time.time()) // 3600 * 3600
    with models.database.connection_context():
        for number, key in enumerate(ApiKey.select().order_by(ApiKey.user), 1):
            HourlyUsage.create(hour=this_hour - 3600, key_id=key.id, requests=10 * number)
        HourlyUsage.create(hour=this_hour - 24 * 3600, key_id=key.id, requests=1000)
    page = ada.get("/settings/security").text
    assert "<strong>30</strong> requests, busiest hour: 30" in page
    assert page.count("<title>") == 1 + 24
    assert page.count("<td>30</td>") == 1


def test_key_can_be_renamed(ada: FlaskClient) -> None:
    header = {"X-API-Key": secret_in(create_key(ada, "ci"))}
    ada.get("/api/v1/protected/test", headers=header)
    answer = ada.post(path_of(0), data={"name": "cd"}, follow_redirects=True)
    assert "The key ci is now named cd." in answer.text
    body = ada.get("/api/v1/protected/test", headers=header).get_json()
    assert body["api_key_name"] == "cd"


def test_bad_new_name_comes_back_in_its_row_only(ada: FlaskClient) -> None:
    create_key(ada, "ci")
    answer = ada.post(path_of(0), data={"name": ""})
    assert answer.status_code == 422
    assert 'id="rename-error"' in answer.text
    assert 'id="name-error"' not in answer.text
    assert stored_keys()[0].name == "ci"


@pytest.mark.parametrize(("choice", "days"), [("30 days", 30), ("90 days", 90), ("1 year", 365)])
def test_key_ends_when_it_was_told_to(ada: FlaskClient, choice: str, days: int) -> None:
    create_key(ada, expires=choice)
    [key] = stored_keys()
    assert key.expires_at - key.created_at == days * models.DAY


def test_key_without_a_choice_never_ends(ada: FlaskClient) -> None:
    create_key(ada)
    assert stored_keys()[0].expires_at is None


def test_end_that_is_not_in_the_list_is_refused(ada: FlaskClient) -> None:
    assert create_key(ada, expires="2 days").status_code == 400
    assert stored_keys() == []


@pytest.mark.parametrize(("grace", "seconds"), [({}, 86400), ({"grace": "now"}, 0)])
def test_rotated_key_ends_after_the_grace(
    ada: FlaskClient, grace: dict[str, str], seconds: int
) -> None:
    create_key(ada, "ci")
    answer = ada.post(path_of(0) + "/successor", data=grace)
    old, new = sorted(stored_keys(), key=lambda key: key.expires_at is None)
    assert secret_in(answer)[8:16] == new.id
    assert (new.name, new.type, new.expires_at) == (old.name, old.type, None)
    assert 0 <= old.expires_at - old.created_at - seconds <= 1


def test_rotated_key_says_so_and_cannot_be_rotated_again(ada: FlaskClient) -> None:
    create_key(ada, "ci")
    rotated = path_of(0)
    ada.post(f"{rotated}/successor")
    page = ada.get("/settings/security").text
    assert page.count(">rotated<") == 1
    assert f'href="{rotated}/rotate"' not in page
    assert f'href="{rotated}/revoke"' in page
    assert "The key ci is already rotated" in ada.get(f"{rotated}/rotate").text
    again = ada.post(f"{rotated}/successor")
    assert again.status_code == 422
    assert 'role="alert">This key has ended or was rotated; create a new one.' in again.text
    assert "aria-invalid" not in again.text


def test_key_that_was_rotated_now_is_refused_now(ada: FlaskClient) -> None:
    header = {"X-API-Key": secret_in(create_key(ada, "ci"))}
    assert ada.get("/api/v1/protected/test", headers=header).status_code == 200
    ada.post(path_of(0) + "/successor", data={"grace": "now"})
    assert ada.get("/api/v1/protected/test", headers=header).status_code == 401


@pytest.mark.parametrize("form", ["", "/successor", "/revoke"])
def test_key_of_another_cannot_be_changed(log_in: LogIn, ada: FlaskClient, form: str) -> None:
    create_key(ada)
    before = snapshot()
    bob = log_in("bob")
    assert bob.post(path_of(0) + form, data={"name": "mine"}).status_code == 404
    assert [row for row in snapshot() if row in before] == before


@pytest.mark.parametrize("action", ["rotate", "revoke"])
def test_key_of_another_is_not_spoken_of(log_in: LogIn, ada: FlaskClient, action: str) -> None:
    create_key(ada)
    assert log_in("bob").get(f"{path_of(0)}/{action}").status_code == 404


@pytest.mark.parametrize("action", ["rotate", "revoke"])
def test_ended_key_is_not_asked_about(ada: FlaskClient, action: str) -> None:
    create_key(ada, "ci")
    ada.post(f"{path_of(0)}/revoke")
    page = ada.get(f"{path_of(0)}/{action}").text
    assert "The key ci is revoked" in page
    assert "<button class" not in page.partition("<main")[2]


def test_keys_of_one_second_are_in_the_order_of_their_names(ada: FlaskClient) -> None:
    for name in ["b", "C", "a"]:
        create_key(ada, name)
    with models.database.connection_context():
        ApiKey.update(created_at=models.now()).execute()
    page = ada.get("/settings/security").text
    assert re.findall('<th scope="row">(.)', page)[:3] == ["a", "b", "C"]


def test_last_key_that_was_revoked_is_not_called_none_yet(ada: FlaskClient) -> None:
    create_key(ada)
    page = ada.post(f"{path_of(0)}/revoke", follow_redirects=True).text
    assert "You have no API keys." in page


# One form, one account, one key


@pytest.mark.parametrize("path", FORMS)
def test_form_of_another_account_changes_nothing(
    log_in: LogIn, ada: FlaskClient, path: str
) -> None:
    create_key(ada)
    log_in("bob")
    before = snapshot()
    form = {"username": "mallory", "email": "m@example.com", "name": "m", "type": "production"}
    form |= {"password": "another password", "current": PASSWORD}
    for account in ["2", "", "1x", "-1"]:
        data = form | {"form": f"{account}.0123456789abcdef"}
        answer = ada.post(path.format(key=stored_keys()[0].id), data=data)
        assert answer.status_code == 409
        assert (
            "for another account, or before you logged in. You are now logged in as ada."
            in answer.text
        )
    assert snapshot() == before
    assert is_logged_in(ada)


def test_form_after_the_log_out_changes_nothing_and_says_so(
    ada: FlaskClient, client: FlaskClient
) -> None:
    answer = client.post(
        "/settings/security/keys", data={"form": "1.0123456789abcdef", "name": "ci"}
    )
    assert answer.location == "/log-in?next=/settings/security/keys"
    assert "You are logged out, so nothing was changed." in client.get(answer.location).text


def test_same_form_again_shows_the_same_key(ada: FlaskClient) -> None:
    data = {"form": "1.0123456789abcdef", "name": "ci", "type": "production"}
    answers = [ada.post("/settings/security/keys", data=data) for _ in range(2)]
    assert secret_in(answers[0]) == secret_in(answers[1])
    assert len(stored_keys()) == 1


def test_same_form_without_a_token_makes_another_key(ada: FlaskClient) -> None:
    data = {"form": "1", "name": "ci", "type": "production"}
    answers = [ada.post("/settings/security/keys", data=data) for _ in range(2)]
    assert secret_in(answers[0]) != secret_in(answers[1])


def test_same_form_of_the_last_allowed_key_shows_it_again(ada: FlaskClient) -> None:
    for _ in range(24):
        create_key(ada)
    data = {"form": "1.0123456789abcdef", "name": "ci", "type": "production"}
    answers = [ada.post("/settings/security/keys", data=data) for _ in range(2)]
    assert secret_in(answers[0]) == secret_in(answers[1])


def test_same_form_of_a_rotation_shows_the_same_successor(ada: FlaskClient) -> None:
    create_key(ada)
    data = {"form": "1.0123456789abcdef", "grace": "now"}
    path = path_of(0) + "/successor"
    answers = [ada.post(path, data=data) for _ in range(2)]
    assert secret_in(answers[0]) == secret_in(answers[1])
    assert len(stored_keys()) == 2


def test_same_form_later_shows_no_key_and_makes_none(ada: FlaskClient) -> None:
    data = {"form": "1.0123456789abcdef", "name": "ci", "type": "production"}
    ada.post("/settings/security/keys", data=data)
    with models.database.connection_context():
        ApiKey.update(created_at=models.now() - 61).execute()
    answer = ada.post("/settings/security/keys", data=data, follow_redirects=True)
    assert "This form has already made the key ci." in answer.text
    assert not SECRET.search(answer.text)
    assert len(stored_keys()) == 1


@pytest.mark.parametrize(
    "change", [{"form": "1.other"}, {"name": "cd"}, {"type": "development"}, {"expires": "1 year"}]
)
def test_another_form_makes_another_key(ada: FlaskClient, change: dict[str, str]) -> None:
    data = {"form": "1.0123456789abcdef", "name": "ci", "type": "production"}
    for form in [data, data | change]:
        ada.post("/settings/security/keys", data=form)
    assert len(stored_keys()) == 2


def test_forms_of_a_page_have_tokens_of_their_own(ada: FlaskClient) -> None:
    create_key(ada)
    tokens = re.findall('name="form" value="(.*?)"', ada.get("/settings/security").text)
    assert len(tokens) == len(set(tokens)) == 4
    assert {token.partition(".")[0] for token in tokens} == {"1"}


# Other sites, and forms nobody should send


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize(
    "headers",
    [
        ELSEWHERE,
        {"Origin": "null"},
        {"Origin": "http://localhost.mallory.example"},
        {"Origin": "http://mallorylocalhost"},
        {"Origin": "http://mallory/://localhost"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost"},
        {"Sec-Fetch-Site": "none", **ELSEWHERE},
    ],
)
def test_post_from_another_site_changes_nothing(
    app: Flask, ada: FlaskClient, path: str, headers: dict[str, str]
) -> None:
    create_key(ada)
    before = snapshot()
    form = {"username": "mallory", "email": "m@example.com", "name": "m", "type": "production"}
    form |= {"password": "chosen by Mallory", "current": PASSWORD}
    answer = ada.post(path.format(key=stored_keys()[0].id), data=form, headers=headers)
    assert answer.status_code == 403
    assert "sent from another site" in answer.text
    assert "Set-Cookie" not in answer.headers
    assert snapshot() == before
    assert is_logged_in(ada)


def snapshot() -> list[tuple[object, ...]]:
    with models.database.connection_context():
        return [*User.select().tuples(), *ApiKey.select().tuples()]


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "null"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://localhost"},
        {"Origin": "https://localhost"},  # TLS ended in front of us
        {},
    ],
)
def test_post_from_our_own_pages_is_taken(ada: FlaskClient, headers: dict[str, str]) -> None:
    assert ada.post("/log-out", headers=headers).status_code == 303


def test_large_form_is_refused_unread(client: FlaskClient) -> None:
    answer = client.post("/log-in", data=b"x" * (16 * 1024 + 1))
    assert answer.status_code == 413
    assert "The form is too large" in answer.text


def test_largest_form_is_taken(client: FlaskClient) -> None:
    form = b"username=" + b"x" * (16 * 1024 - 9)
    kind = "application/x-www-form-urlencoded"
    assert client.post("/log-in", data=form, content_type=kind).status_code == 422


def test_form_without_a_length_is_refused(client: FlaskClient) -> None:
    chunked = {"HTTP_TRANSFER_ENCODING": "chunked", "CONTENT_LENGTH": ""}
    answer = client.post("/log-in", environ_overrides=chunked)
    assert answer.status_code == 411
    assert "came without its length" in answer.text


@pytest.mark.parametrize("body", [b"\xff\x00%00%ff=&&;", b"username=%00&password=%ff", b""])
def test_garbage_is_just_another_bad_form(ada: FlaskClient, body: bytes) -> None:
    kind = "application/x-www-form-urlencoded"
    client = ada.application.test_client()
    assert client.post("/sign-up", data=body, content_type=kind).status_code == 422
    assert client.post("/log-in", data=body, content_type=kind).status_code == 422
    assert ada.post("/settings/profile", data=body, content_type=kind).status_code == 422


# What every page carries


@pytest.mark.parametrize(
    "path", ["/", "/log-in", "/nowhere", "/static/app.css", "/static/app.js", "/static/icon.svg"]
)
def test_everything_has_the_security_headers(client: FlaskClient, path: str) -> None:
    with client.get(path) as answer:
        headers = answer.headers
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["Referrer-Policy"] == "same-origin"
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/settings/profile", "/settings/security"])
def test_pages_of_a_user_are_not_stored(ada: FlaskClient, path: str) -> None:
    assert ada.get(path).headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "path", ["/", "/log-in", "/nowhere", "/settings/profile", "/settings/security"]
)
def test_every_page_says_what_it_is(ada: FlaskClient, client: FlaskClient, path: str) -> None:
    browser = client if path == "/log-in" else ada
    assert re.search('<meta name="description" content=".{40,160}">', browser.get(path).text)


@pytest.mark.parametrize("path", ["/", "/sign-up", "/settings/profile", "/settings/security"])
def test_no_page_has_inline_style_or_script(ada: FlaskClient, path: str) -> None:
    page = ada.get(path).text
    assert not re.search(r"\sstyle=|<style|\son[a-z]+=|<script(?! src)|//(?!localhost)", page)


def test_cookie_is_out_of_reach_of_scripts_and_sites(client: FlaskClient) -> None:
    cookie = sign_up(client, "ada").headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert "Secure" not in cookie


def test_cookie_is_secure_on_https(client: FlaskClient) -> None:
    form = {"username": "ada", "email": "ada@example.com", "password": PASSWORD}
    answer = client.post("/sign-up", data=form, base_url="https://localhost")
    assert "Secure" in answer.headers["Set-Cookie"]


def test_api_never_opens_the_session(ada: FlaskClient) -> None:
    answer = ada.get("/api/v1/status")
    assert "Set-Cookie" not in answer.headers
    assert "Vary" not in answer.headers
    assert "Content-Security-Policy" not in answer.headers


# Errors


def test_unknown_page_is_an_error_in_the_layout(ada: FlaskClient) -> None:
    answer = ada.get("/nowhere")
    assert answer.status_code == 404
    assert "There is nothing at this address." in answer.text
    assert "Profile Settings" in answer.text


def test_wrong_method_says_what_is_allowed(client: FlaskClient) -> None:
    answer = client.delete("/log-in")
    assert answer.status_code == 405
    assert "POST" in answer.headers["Allow"]
    assert "<h1>" in answer.text


def test_api_errors_stay_problems(client: FlaskClient) -> None:
    answer = client.get("/api/nowhere")
    assert answer.mimetype == "application/problem+json"
    assert answer.get_json()["code"] == "not_found"


def test_bug_is_a_page_without_details(
    ada: FlaskClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create_key(ada)
    monkeypatch.delattr(auth, "guard")
    answer = ada.get("/settings/security")
    assert answer.status_code == 500
    assert "Something went wrong" in answer.text
    assert "guard" not in answer.text
    assert "bug in GET /settings/security" in caplog.text


def test_database_that_is_away_is_a_page(
    ada: FlaskClient, config: settings.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.database.obj, "database", config.sqlite / "gone")
    models.database.close_all()
    answer = ada.get("/settings/security")
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"
    assert "its database cannot be reached." in answer.text
