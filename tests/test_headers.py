"""The headers of every API response, and the requests that are refused before any view."""

import pytest
from flask.testing import FlaskClient

from protocol.headers import limit_headers
from ratelimit import Allowance, Quota
from settings import MAX_BODY_BYTES

STATUS, TEST = "/api/v1/status", "/api/v1/protected/test"
NOWHERE, SOCKET = "/api/v1/nowhere", "/api/v1/ws/echo"
NOON = 1_795_262_400  # 2026-11-21T12:00:00Z


@pytest.mark.parametrize("path", [STATUS, TEST, NOWHERE, SOCKET])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
def test_every_response_is_uncached_and_open_to_any_origin(
    client: FlaskClient, key: str, method: str, path: str
) -> None:
    headers = client.open(path, method=method, headers={"X-API-Key": key}).headers
    assert headers["Cache-Control"] == "no-store"
    assert headers["Access-Control-Allow-Origin"] == "*"
    assert "X-RateLimit-Remaining" in headers["Access-Control-Expose-Headers"]
    assert "Set-Cookie" not in headers


@pytest.mark.parametrize("path", [STATUS, TEST, NOWHERE, SOCKET, "/api/v2/nowhere", "/api/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_preflight_of_any_path_needs_no_key(client: FlaskClient, path: str, method: str) -> None:
    answer = client.options(path, headers={"Access-Control-Request-Method": method})
    assert (answer.status_code, answer.data) == (204, b"")
    assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert "Content-Type" not in answer.headers


def test_preflight_allows_the_headers_of_a_page(client: FlaskClient) -> None:
    headers = client.options(TEST, headers={"Access-Control-Request-Method": "GET"}).headers
    allowed = headers["Access-Control-Allow-Headers"].split(", ")
    assert {"X-API-Key", "Content-Type", "Authorization", "*"} <= set(allowed)
    assert headers["Access-Control-Allow-Methods"] == "GET, HEAD, OPTIONS"


def test_preflight_outside_of_the_api_is_not_allowed(client: FlaskClient) -> None:
    headers = client.options("/log-in", headers={"Access-Control-Request-Method": "GET"}).headers
    assert "Access-Control-Allow-Headers" not in headers


@pytest.mark.parametrize("path", [TEST, "/api/v1/status", "/api/v1/ws/echo", "/api/v1/ws/time"])
def test_options_lists_the_methods(client: FlaskClient, path: str) -> None:
    answer = client.options(path)
    assert (answer.status_code, answer.data) == (204, b"")
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}


def test_pages_are_for_their_own_origin_only(client: FlaskClient) -> None:
    assert "Access-Control-Allow-Origin" not in client.get("/").headers


@pytest.mark.parametrize("path", [STATUS, NOWHERE])
def test_large_body_is_refused_unread(client: FlaskClient, path: str) -> None:
    answer = client.post(path, data=bytes(MAX_BODY_BYTES + 1))
    assert (answer.status_code, answer.get_json(force=True)["code"]) == (413, "content_too_large")
    assert answer.headers["Access-Control-Allow-Origin"] == "*"


def test_body_of_the_largest_size_is_not_too_large(client: FlaskClient) -> None:
    assert client.post(STATUS, data=bytes(MAX_BODY_BYTES)).status_code == 405


def test_chunked_body_is_refused(client: FlaskClient) -> None:
    answer = client.get(STATUS, environ_overrides={"HTTP_TRANSFER_ENCODING": "chunked"})
    assert answer.status_code == 413


def test_doubled_slash_gets_the_same_headers(client: FlaskClient, key: str) -> None:
    environ = {"PATH_INFO": f"/{TEST}"}
    answer = client.get(headers={"X-API-Key": key}, environ_overrides=environ)
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-RateLimit-Remaining"] == "999"


@pytest.mark.parametrize(("protocol", "status"), [("HTTP/1.1", 400), ("HTTP/1.0", 200)])
def test_http_1_1_request_without_host_is_refused(
    client: FlaskClient, protocol: str, status: int
) -> None:
    environ = {"HTTP_HOST": "", "SERVER_PROTOCOL": protocol}
    assert client.get(STATUS, environ_overrides=environ).status_code == status


def test_asking_for_a_websocket_does_not_replace_host(client: FlaskClient) -> None:
    environ = {"HTTP_HOST": "", "SERVER_PROTOCOL": "HTTP/1.1", "HTTP_UPGRADE": "websocket"}
    answer = client.get(STATUS, environ_overrides=environ)
    assert (answer.status_code, answer.get_json(force=True)["code"]) == (400, "bad_request")


def test_limit_headers_show_the_allowance() -> None:
    allowance = Allowance(Quota("pro", 10, 60), True, 7, NOON + 60, 42, total=1234)
    assert limit_headers(allowance) == [
        ("RateLimit-Policy", '"pro";q=10;w=60'),
        ("RateLimit", '"pro";r=7;t=42'),
        ("X-RateLimit-Limit", "10"),
        ("X-RateLimit-Remaining", "7"),
        ("X-RateLimit-Reset", str(NOON + 60)),
    ]
