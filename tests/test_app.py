"""The five responses, member by member as in SPEC part 2, and the proxies in front."""

import dataclasses
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone

import pytest
from flask import Flask, request
from flask.testing import FlaskClient

import app as service
import models
import settings
from conftest import NewKey
from models import User
from ratelimit import Limiter, Quota
from settings import Settings

YEAR, STATUS = "/api/v1/demo/year", "/api/v1/status"
TEST, ME, STATS = "/api/v1/protected/test", "/api/v1/user/me", "/api/v1/usage/stats"
PUBLIC, PROTECTED = [YEAR, STATUS], [TEST, ME, STATS]
MILLISECONDS = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
SECONDS = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
MEMBERS: dict[str, dict[str, type]] = {
    YEAR: {"year": int, "message": str, "timestamp": str},
    STATUS: {"status": str, "version": str, "authenticated": bool},
    TEST: {
        "success": bool,
        "message": str,
        "api_key_name": str,
        "api_key_type": str,
        "rate_limit_tier": str,
        "timestamp": str,
    },
    ME: {
        "user_id": int,
        "username": str,
        "email": str,
        "created_at": str,
        "api_key_count": int,
    },
    STATS: {
        "api_key_name": str,
        "total_requests": int,
        "rate_limit_tier": str,
        "requests_remaining": int,
        "reset_time": str,
    },
}


def ask(client: FlaskClient, path: str, key: str = "") -> dict[str, object]:
    """The JSON of a good answer."""
    answer = client.get(path, headers={"X-API-Key": key} if key else {})
    assert answer.status_code == 200
    body: dict[str, object] = answer.get_json()
    return body


def parsed(text: object) -> datetime:
    assert isinstance(text, str)
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def spent(app: Flask, key: str) -> int:
    limiter: Limiter = app.extensions["guard"].limiter
    return limiter.hit(key[8:16], Quota("free", 1000, 3600), cost=0).total


# Bodies


@pytest.mark.parametrize("path", MEMBERS)
def test_body_has_exactly_the_members_of_the_specification(
    client: FlaskClient, key: str, path: str
) -> None:
    body = ask(client, path, key)
    assert {name: type(value) for name, value in body.items()} == MEMBERS[path]


@pytest.mark.parametrize("path", MEMBERS)
def test_body_is_json_and_ends_in_a_newline(client: FlaskClient, key: str, path: str) -> None:
    answer = client.get(path, headers={"X-API-Key": key})
    assert answer.content_type == "application/json"
    assert answer.data.endswith(b"}\n")


def test_year_is_the_current_one_in_utc(client: FlaskClient) -> None:
    body = ask(client, YEAR)
    assert body["year"] == parsed(body["timestamp"]).year
    assert str(body["year"]) in str(body["message"])


@pytest.mark.parametrize("path", [YEAR, TEST])
def test_timestamp_is_now_with_milliseconds(client: FlaskClient, key: str, path: str) -> None:
    before = datetime.now(timezone.utc).timestamp()
    text = ask(client, path, key)["timestamp"]
    after = datetime.now(timezone.utc).timestamp()
    assert MILLISECONDS.fullmatch(str(text))
    assert before - 0.001 <= parsed(text).timestamp() <= after


def test_status_without_a_key(client: FlaskClient) -> None:
    assert ask(client, STATUS) == {
        "status": "operational",
        "version": "1.0.0",
        "authenticated": False,
    }


@pytest.mark.parametrize(("type", "tier"), [("production", "free"), ("development", "pro")])
def test_protected_test_describes_the_key(
    client: FlaskClient, new_key: NewKey, type: str, tier: str
) -> None:
    body = ask(client, TEST, new_key(name="Ada's <key> \u00e4", type=type, tier=tier))
    assert body["success"] is True
    assert "valid" in str(body["message"])
    assert body["api_key_name"] == "Ada's <key> \u00e4"
    assert (body["api_key_type"], body["rate_limit_tier"]) == (type, tier)


def test_user_me_describes_the_owner(client: FlaskClient, key: str, ada: User) -> None:
    body = ask(client, ME, key)
    assert (body["user_id"], body["username"]) == (ada.id, "ada")
    assert (body["email"], body["api_key_count"]) == ("ada@example.com", 1)
    assert SECONDS.fullmatch(str(body["created_at"]))
    assert parsed(body["created_at"]).timestamp() == ada.created_at


def test_user_me_counts_live_keys_only(client: FlaskClient, new_key: NewKey) -> None:
    keys = [new_key() for _ in range(3)]
    with models.database.connection_context():
        models.revoke_key(keys[0][8:16])
    assert ask(client, ME, keys[1])["api_key_count"] == 2


def test_usage_stats_include_the_asking_request(client: FlaskClient, new_key: NewKey) -> None:
    key = new_key(name="stats")
    for path in PROTECTED:
        body = ask(client, path, key)
    assert (body["api_key_name"], body["total_requests"]) == ("stats", 3)


def test_usage_stats_are_those_of_the_headers(client: FlaskClient, key: str) -> None:
    answer = client.get(STATS, headers={"X-API-Key": key})
    body = answer.get_json()
    assert str(body["requests_remaining"]) == answer.headers["X-RateLimit-Remaining"]
    assert SECONDS.fullmatch(body["reset_time"])
    reset = parsed(body["reset_time"]).timestamp()
    assert str(int(reset)) == answer.headers["X-RateLimit-Reset"]


# Keys


@pytest.mark.parametrize("path", PROTECTED)
def test_protected_endpoint_without_a_key_is_refused(client: FlaskClient, path: str) -> None:
    assert client.get(path).status_code == 401


@pytest.mark.parametrize("path", PROTECTED)
def test_protected_endpoint_spends_one(
    app: Flask, client: FlaskClient, key: str, path: str
) -> None:
    ask(client, path, key)
    assert spent(app, key) == 1


@pytest.mark.parametrize("path", PUBLIC)
def test_public_endpoint_spends_nothing(
    app: Flask, client: FlaskClient, key: str, path: str
) -> None:
    ask(client, path, key)
    assert spent(app, key) == 0


def test_status_tells_a_good_key_from_a_bad_one(client: FlaskClient, key: str) -> None:
    assert ask(client, STATUS, key)["authenticated"] is True
    assert ask(client, STATUS, f"{key}a")["authenticated"] is False


def test_status_of_a_revoked_key_is_not_authenticated(client: FlaskClient, key: str) -> None:
    with models.database.connection_context():
        models.revoke_key(key[8:16])
    assert ask(client, STATUS, key)["authenticated"] is False


def test_status_of_a_used_up_key_is_authenticated(client: FlaskClient, new_key: NewKey) -> None:
    key = new_key(tier="five")
    while client.get(TEST, headers={"X-API-Key": key}).status_code == 200:
        pass
    assert ask(client, STATUS, key)["authenticated"] is True


@pytest.mark.parametrize("given", ["good", "bad"])
def test_status_carries_no_limit_headers(client: FlaskClient, key: str, given: str) -> None:
    answer = client.get(STATUS, headers={"X-API-Key": key if given == "good" else "bad"})
    assert not [name for name, _ in answer.headers if "RateLimit" in name]


# All of them


@pytest.mark.parametrize("path", MEMBERS)
def test_head_is_get_without_a_body(client: FlaskClient, key: str, path: str) -> None:
    answer = client.head(path, headers={"X-API-Key": key})
    assert (answer.status_code, answer.data) == (200, b"")


@pytest.mark.parametrize("path", ["/api/v1//status", "//api/v1/status", "/api/v1/status//"])
def test_doubled_slash_is_no_redirect(client: FlaskClient, path: str) -> None:
    assert client.get(path, base_url="http://mallory.example").status_code == 404


def test_openapi_lists_the_five_paths_to_any_origin(client: FlaskClient) -> None:
    with client.get("/openapi.json") as answer:
        assert set(MEMBERS) <= {
            path if path.startswith("/api/v1") else f"/api/v1{path}"
            for path in answer.get_json()["paths"]
        }
        assert answer.headers["Access-Control-Allow-Origin"] == "*"


# Proxies in front

FORWARDED = {
    "X-Forwarded-For": "203.0.113.1, 203.0.113.2, 203.0.113.3",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Host": "mallory.example",
    "X-Forwarded-Prefix": "/mallory",
    "Forwarded": "for=203.0.113.9;host=mallory.example",
}


@pytest.fixture
def behind(config: Settings) -> Iterator[Callable[[int], FlaskClient]]:
    """Makes a client of an app behind so many hops; `/seen` shows what the app takes for true."""

    def make(hops: int) -> FlaskClient:
        app = service.create_app(dataclasses.replace(config, proxy_hops=hops))
        app.add_url_rule("/seen", "seen", lambda: f"{request.remote_addr} {request.root_url}")
        return app.test_client()

    yield make
    models.database.close_all()


@pytest.mark.parametrize(
    ("hops", "address", "scheme"),
    [(0, "127.0.0.1", "http"), (1, "203.0.113.3", "https"), (2, "203.0.113.2", "https")],
)
def test_forwarded_headers_are_trusted_as_far_as_proxy_hops(
    behind: Callable[[int], FlaskClient], hops: int, address: str, scheme: str
) -> None:
    seen = behind(hops).get("/seen", headers=FORWARDED)
    assert seen.text == f"{address} {scheme}://localhost/"


CLIENT, APP, CDN, INNER = "203.0.113.7", "66.241.124.5", "172.68.1.9", "10.214.3.4"
CHAINS = {  # X-Forwarded-For as each platform sends it; a client may have sent values of its own
    "DYNO": [CLIENT],
    "FLY_APP_NAME": [CLIENT, APP],
    "RENDER": [CLIENT, CDN, INNER],
}


@pytest.mark.parametrize(
    "spoofed", [[], ["198.51.100.1"], ["198.51.100.1", "198.51.100.2", "10.0.0.1", "unknown", ""]]
)
@pytest.mark.parametrize("platform", CHAINS)
def test_client_address_is_the_one_that_the_platform_appended(
    behind: Callable[[int], FlaskClient], platform: str, spoofed: list[str]
) -> None:
    client = behind(settings.load({platform: "anything"}).proxy_hops)
    headers = {
        "X-Forwarded-For": ", ".join(spoofed + CHAINS[platform]),
        "X-Forwarded-Proto": "https",
    }
    assert client.get("/seen", headers=headers).text == f"{CLIENT} https://localhost/"


def test_railway_trusts_nothing_until_proxy_hops_is_set(
    behind: Callable[[int], FlaskClient],
) -> None:
    client = behind(settings.load({"RAILWAY_ENVIRONMENT": "production"}).proxy_hops)
    assert client.get("/seen", headers=FORWARDED).text == "127.0.0.1 http://localhost/"


@pytest.mark.parametrize("hops", [1, 2, 3, 10])
@pytest.mark.parametrize("scheme", ["https", "http"])
def test_cookies_are_secure_on_https_whatever_the_hops(
    behind: Callable[[int], FlaskClient], hops: int, scheme: str
) -> None:
    chain = ", ".join([CLIENT] * hops)
    user = {"username": "ada", "email": "ada@example.com", "password": secrets.token_urlsafe()}
    headers = {"X-Forwarded-For": chain, "X-Forwarded-Proto": scheme}
    answer = behind(hops).post("/sign-up", data=user, headers=headers)
    assert answer.status_code == 303
    assert ("; Secure;" in answer.headers["Set-Cookie"]) == (scheme == "https")


def test_two_apps_share_no_counts(config: Settings, app: Flask, key: str) -> None:
    ask(app.test_client(), TEST, key)
    models.database.close_all()
    assert spent(service.create_app(config), key) == 0


# Starting


def test_app_app_is_made_when_it_is_first_asked_for(
    monkeypatch: pytest.MonkeyPatch, config: Settings
) -> None:
    """`gunicorn app:app` and `flask` want it; an import alone opens no database."""
    assert "app" not in vars(service)
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{config.sqlite}")
    assert isinstance(service.app, Flask)
    models.database.close_all()


def test_other_attributes_of_app_are_missing() -> None:
    assert not hasattr(service, "application")


def test_on_windows_the_error_is_one_line() -> None:
    without = "import sys; sys.modules['resource'] = None; import app"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert done.returncode != 0
    assert re.fullmatch(r"[^\n]*POSIX[^\n]*\n", done.stderr)
