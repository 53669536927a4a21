"""The API as the specification shows it; then how the app is made, its errors, and proxies."""

import dataclasses
import json
import re
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import peewee
import pytest
from flask import Flask, abort, request
from flask.testing import FlaskClient
from websockets.sync.client import connect

import app as service
import models
import settings
from models import User
from protocol import problems
from protocol.addresses import caller
from serving import Server
from settings import Settings
from storage.outage import Outage

YEAR, STATUS = "/api/v1/demo/year", "/api/v1/status"
TEST, ME, STATS = "/api/v1/protected/test", "/api/v1/user/me", "/api/v1/usage/stats"
ECHO, TIME = "/api/v1/ws/echo", "/api/v1/ws/time"


@dataclasses.dataclass(eq=False)
class Like:
    """Equals every text of this form."""

    form: str

    def __eq__(self, text: object) -> bool:
        return isinstance(text, str) and bool(re.fullmatch(self.form, text))


SECOND = Like(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
MILLISECOND = Like(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
DISPLAY = Like(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")


# The five endpoints and the two sockets, as the specification shows them


def get(server: Server, path: str, **headers: str) -> Any:
    answer = server.ask(path, **headers)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    return answer.json()


def test_year(server: Server) -> None:
    year = datetime.now(timezone.utc).year
    message = f"The current year is {year}."
    assert get(server, YEAR) == {"year": year, "message": message, "timestamp": MILLISECOND}


def test_status_says_whether_a_key_is_good(server: Server, server_key: str) -> None:
    for key, good in [("", False), ("nonsense", False), (server_key, True)]:
        body = {"status": "operational", "version": "1.0.0", "authenticated": good}
        assert get(server, STATUS, X_API_Key=key) == body


def test_protected_test(server: Server) -> None:
    key = server.new_key("laptop", tier="pro", type="development")
    assert get(server, TEST, X_API_Key=key) == {
        "success": True,
        "message": "Your API key is valid.",
        "api_key_name": "laptop",
        "api_key_type": "development",
        "rate_limit_tier": "pro",
        "timestamp": MILLISECOND,
    }


def test_user_me(server: Server, server_key: str) -> None:
    ((user_id, name),) = server.execute(
        'SELECT id, username FROM "user" WHERE id = (SELECT user_id FROM api_key WHERE id = ?)',
        server_key[8:16],
    )
    body = get(server, ME, X_API_Key=server_key)
    assert body.pop("api_key_count") >= 1
    assert body == {
        "user_id": user_id,
        "username": name,
        "email": f"{name}@example.com",
        "created_at": SECOND,
    }


def test_usage_stats_count_the_asking_request(server: Server) -> None:
    key = server.new_key("counter")
    get(server, TEST, X_API_Key=key)
    assert get(server, STATS, X_API_Key=key) == {
        "api_key_name": "counter",
        "total_requests": 2,
        "rate_limit_tier": "free",
        "requests_remaining": 998,
        "reset_time": SECOND,
    }


def test_echo_socket_sends_each_message_back(server: Server) -> None:
    times = {"timestamp": MILLISECOND, "server_time": DISPLAY}
    with connect(server.ws_url + ECHO) as ws:
        for text in ("hello", "wörld"):
            ws.send(text)
            assert json.loads(ws.recv()) == {"type": "echo", "message": text, **times}


def five_seconds_in_order(updates: list[Any]) -> bool:
    """Whether the last five show one second each."""
    last = [datetime.fromisoformat(update["formatted"][:19]) for update in updates[-5:]]
    return last == [last[0] + timedelta(seconds=number) for number in range(5)]


def test_time_socket_greets_and_sends_each_second_once(server: Server, server_key: str) -> None:
    with connect(f"{server.ws_url}{TIME}?api_key={server_key}") as ws:
        assert json.loads(ws.recv()) == {"type": "auth_success", "api_key_name": "shared key"}
        greeted = time.monotonic()
        updates = [json.loads(ws.recv())]
        # Within 0.2 s, as test_ticker.py shows; a machine may pause, but not for a whole second.
        assert time.monotonic() - greeted < 0.9
        while not five_seconds_in_order(updates):
            assert len(updates) < 30  # five, unless the machine pauses
            updates.append(json.loads(ws.recv()))
    times = {"formatted": DISPLAY, "timestamp": MILLISECOND}
    assert updates == [{"type": "time_update", **times}] * len(updates)
    last = datetime.fromisoformat(updates[-1]["timestamp"][:19])
    assert datetime.now(timezone.utc).replace(tzinfo=None) - last < timedelta(minutes=1)
    shown = [update["timestamp"][:19].replace("T", " ") + " UTC" for update in updates]
    assert shown == [update["formatted"] for update in updates]


def test_app_is_made_without_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gunicorn app:app` and `flask` want it."""
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path}/test.db")
    made = service.app
    assert isinstance(made, Flask)
    assert made.test_client().get(STATUS).status_code == 200
    assert not list(tmp_path.iterdir())


def test_user_who_was_just_deleted_has_no_key(client: FlaskClient, key: str, owner: User) -> None:
    assert client.get(ME, headers={"X-API-Key": key}).status_code == 200
    with models.database.connection_context():
        models.database.execute_sql("PRAGMA foreign_keys = 0")
        owner.delete_instance()
    answer = client.get(ME, headers={"X-API-Key": key})
    assert (answer.status_code, answer.get_json(force=True)["code"]) == (401, "invalid_api_key")


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


@pytest.mark.parametrize("path", ["/api/failing", "/failing"])
def test_only_what_is_a_bug_is_logged_as_one(
    app: Flask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    errors = [peewee.DataError("a NUL"), peewee.IntegrityError("the user was deleted meanwhile")]
    errors += [ConnectionResetError(), peewee.OperationalError("gone\nDETAIL: a value")]
    view = mock.Mock(side_effect=errors)
    monkeypatch.setattr(problems, "outage", Outage())  # none has been logged yet
    app.add_url_rule(path, path, lambda: view())
    answers = [app.test_client().get(path) for _ in errors]
    assert [answer.status_code for answer in answers] == [400, 400, 400, 503]
    assert ["Retry-After" in answer.headers for answer in answers] == [False] * 3 + [True]
    assert caplog.messages == ["database unavailable: gone"]


@pytest.mark.parametrize(
    ("status", "title"), [(403, "Forbidden"), (409, "Conflict"), (418, "I'm a teapot")]
)
def test_any_abort_is_a_problem(app: Flask, client: FlaskClient, status: int, title: str) -> None:
    app.add_url_rule("/api/aborting", "aborting", lambda: abort(status, "Not on Mondays."))
    answer = client.get("/api/aborting")
    assert (answer.status_code, answer.mimetype) == (status, "application/problem+json")
    words = {"type": "about:blank", "title": title, "status": status, "detail": "Not on Mondays."}
    code = title.lower().replace(" ", "_")
    assert answer.get_json(force=True) == words | {"code": code}


# Proxies in front, and who is one caller

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
    "RAILWAY_ENVIRONMENT_NAME": [CLIENT, "152.233.1.9"],
}


@pytest.mark.parametrize("spoofed", [[], ["198.51.100.1", "10.0.0.1", "unknown", ""]])
@pytest.mark.parametrize("platform", CHAINS)
def test_platform_gives_the_address(config: Settings, platform: str, spoofed: list[str]) -> None:
    hops = settings.load({platform: "anything"}).proxy_hops
    app = service.create_app(dataclasses.replace(config, proxy_hops=hops))
    app.add_url_rule("/seen", "seen", lambda: f"{request.remote_addr} {request.root_url}")
    headers = FORWARDED | {"X-Forwarded-For": ", ".join(spoofed + CHAINS[platform])}
    scheme = "https" if platform else "http"
    seen = app.test_client().get("/seen", headers=headers).text
    assert seen == f"{CHAINS[platform][0]} {scheme}://localhost/"


@pytest.mark.parametrize(
    ("address", "who"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("::ffff:203.0.113.7", "203.0.113.7"),  # IPv4, as a socket for both shows it
        ("fe80::1%eth0", "fe80::"),
        ("unknown", "unknown"),
        (None, ""),  # a Unix socket
    ],
)
def test_ipv6_address_is_one_caller_with_its_64(address: str | None, who: str) -> None:
    assert caller(address) == who
