"""How the app is made, what its endpoints need, what it takes from proxies, and its errors."""

import dataclasses
from pathlib import Path

import peewee
import pytest
from flask import Flask, abort, request
from flask.testing import FlaskClient

import app as service
import models
import settings
from conftest import NewKey
from models import User
from protocol import problems
from rows import change
from settings import Settings
from storage.outage import Outage

TEST, ME, STATUS = "/api/v1/protected/test", "/api/v1/user/me", "/api/v1/status"


# Starting


def test_app_is_made_when_it_is_asked_for_and_asks_nothing_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gunicorn app:app` and `flask` want it; an import alone reads no settings."""
    assert "app" not in vars(service)
    assert not hasattr(service, "application")
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path}/test.db")
    made = service.app
    assert isinstance(made, Flask)
    assert made.test_client().get(STATUS).status_code == 200
    assert not list(tmp_path.iterdir())


# Endpoints (what each answers: test_wire_http.py)


def test_user_me_counts_live_keys_only(client: FlaskClient, new_key: NewKey) -> None:
    key, revoked, expired, _ = [new_key() for _ in range(4)]
    change(revoked, revoked_at=1)
    change(expired, expires_at=models.now())
    assert client.get(ME, headers={"X-API-Key": key}).get_json()["api_key_count"] == 2


def test_user_who_was_deleted_meanwhile_has_no_key(
    client: FlaskClient, key: str, ada: User
) -> None:
    assert client.get(ME, headers={"X-API-Key": key}).status_code == 200
    with models.database.connection_context():
        models.database.execute_sql("PRAGMA foreign_keys = 0")
        ada.delete_instance()
    answer = client.get(ME, headers={"X-API-Key": key})
    assert (answer.status_code, answer.get_json(force=True)["code"]) == (401, "invalid_api_key")


# Paths, methods and bodies


@pytest.mark.parametrize("path", ["/api/v1//status", "/api/v1/status//"])
def test_other_doubled_slash_is_no_redirect(client: FlaskClient, path: str) -> None:
    """It would lead to whatever Host was sent."""
    assert client.get(path, base_url="http://mallory.example").status_code == 404


def test_pages_are_for_their_own_origin_only(client: FlaskClient) -> None:
    preflight = {"Access-Control-Request-Method": "GET"}
    for answer in (client.get("/"), client.options("/log-in", headers=preflight)):
        assert not [name for name, _ in answer.headers if name.startswith("Access-Control")]


@pytest.mark.parametrize("path", [TEST, STATUS, "/api/v1/ws/echo", "/api/v1/ws/time", "/"])
def test_options_lists_the_methods(client: FlaskClient, path: str) -> None:
    answer = client.options(path)
    assert (answer.status_code, answer.data) == (200, b"")
    assert "Content-Type" not in answer.headers
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}


# Errors


@pytest.mark.parametrize("path", ["/api/failing", "/failing"])
@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [
        (peewee.OperationalError("gone\nDETAIL: a value"), 503, ["database unavailable: gone"]),
        (peewee.DataError("a NUL"), 400, []),
        (peewee.IntegrityError("the user was deleted meanwhile"), 400, []),
        (ConnectionResetError(), 400, []),
    ],
)
def test_only_what_is_a_bug_is_logged_as_one(
    app: Flask,
    client: FlaskClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    error: Exception,
    status: int,
    lines: list[str],
) -> None:
    def fail() -> str:
        raise error

    monkeypatch.setattr(problems, "outage", Outage())  # none has been logged yet
    app.add_url_rule(path, path, fail)
    answer = client.get(path)
    assert answer.status_code == status
    assert caplog.messages == lines
    assert ("Retry-After" in answer.headers) == (status == 503)


@pytest.mark.parametrize(
    ("status", "title"), [(403, "Forbidden"), (409, "Conflict"), (418, "I'm a teapot")]
)
def test_status_that_a_view_aborts_with_is_a_problem_of_its_own(
    app: Flask, client: FlaskClient, status: int, title: str
) -> None:
    app.add_url_rule("/api/aborting", "aborting", lambda: abort(status, "Not on Mondays."))
    answer = client.get("/api/aborting")
    assert (answer.status_code, answer.mimetype) == (status, "application/problem+json")
    words = {"type": "about:blank", "title": title, "status": status, "detail": "Not on Mondays."}
    code = title.lower().replace(" ", "_")
    assert answer.get_json(force=True) == words | {"code": code}


# Proxies in front

FORWARDED = {
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Host": "mallory.example",
    "X-Forwarded-Prefix": "/mallory",
    "Forwarded": "for=203.0.113.9;host=mallory.example",
}
CLIENT = "203.0.113.7"
CHAINS = {  # X-Forwarded-For as each platform sends it; the first is the client
    "": ["127.0.0.1"],  # nobody is in front, so the address is that of the connection
    "DYNO": [CLIENT],
    "FLY_APP_NAME": [CLIENT, "66.241.124.5"],
    "RENDER": [CLIENT, "172.68.1.9", "10.214.3.4"],
    "RAILWAY_ENVIRONMENT": [CLIENT, "152.233.1.9"],
}


@pytest.mark.parametrize("spoofed", [[], ["198.51.100.1", "10.0.0.1", "unknown", ""]])
@pytest.mark.parametrize("platform", CHAINS)
def test_client_address_is_the_one_that_the_platform_appended(
    config: Settings, platform: str, spoofed: list[str]
) -> None:
    hops = settings.load({platform: "anything"}).proxy_hops
    app = service.create_app(dataclasses.replace(config, proxy_hops=hops))
    app.add_url_rule("/seen", "seen", lambda: f"{request.remote_addr} {request.root_url}")
    headers = FORWARDED | {"X-Forwarded-For": ", ".join(spoofed + CHAINS[platform])}
    scheme = "https" if platform else "http"
    seen = app.test_client().get("/seen", headers=headers).text
    assert seen == f"{CHAINS[platform][0]} {scheme}://localhost/"
