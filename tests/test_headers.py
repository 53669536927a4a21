"""Which requests get the headers of the API, and which are refused before any view."""

import pytest
from flask.testing import FlaskClient

from protocol.requests import MAX_BODY_BYTES

STATUS, TEST = "/api/v1/status", "/api/v1/protected/test"
PREFLIGHT = {"Access-Control-Request-Method": "GET"}


@pytest.mark.parametrize("path", [STATUS, "/api/v1/nowhere", "/api/v1/ws/echo", "/api/"])
@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST"])
def test_every_response_of_the_api_is_uncached_and_open_to_any_origin(
    client: FlaskClient, method: str, path: str
) -> None:
    headers = client.open(path, method=method).headers
    assert headers["Cache-Control"] == "no-store"
    assert headers["Access-Control-Allow-Origin"] == "*"
    assert headers["Access-Control-Expose-Headers"]
    assert "Set-Cookie" not in headers


def test_path_with_two_slashes_at_the_start_is_the_same_path(client: FlaskClient, key: str) -> None:
    """Flask reads it so, and the request is counted."""
    answer = client.get(headers={"X-API-Key": key}, environ_overrides={"PATH_INFO": f"/{TEST}"})
    assert answer.status_code == 200
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-RateLimit-Remaining"] == "999"


@pytest.mark.parametrize("path", ["/api/v1//status", "/api/v1/status//"])
def test_other_doubled_slash_is_no_redirect(client: FlaskClient, path: str) -> None:
    """It would lead to whatever Host was sent."""
    assert client.get(path, base_url="http://mallory.example").status_code == 404


def test_pages_are_for_their_own_origin_only(client: FlaskClient) -> None:
    for answer in (client.get("/"), client.options("/log-in", headers=PREFLIGHT)):
        assert not [name for name, _ in answer.headers if name.startswith("Access-Control")]


@pytest.mark.parametrize("path", [TEST, STATUS, "/api/v1/ws/echo", "/api/v1/ws/time"])
def test_options_lists_the_methods(client: FlaskClient, path: str) -> None:
    answer = client.options(path)
    assert (answer.status_code, answer.data) == (200, b"")
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}


@pytest.mark.parametrize(("more", "status"), [(0, 405), (1, 413)])
def test_body_may_have_16_kib(client: FlaskClient, more: int, status: int) -> None:
    assert client.post(STATUS, data=bytes(MAX_BODY_BYTES + more)).status_code == status


@pytest.mark.parametrize(("path", "status"), [(STATUS, 413), ("/log-in", 411)])
def test_body_without_a_length_is_refused(client: FlaskClient, path: str, status: int) -> None:
    chunked = {"HTTP_TRANSFER_ENCODING": "chunked"}
    assert client.post(path, environ_overrides=chunked).status_code == status


@pytest.mark.parametrize("path", [STATUS, "/"])
@pytest.mark.parametrize(("protocol", "status"), [("HTTP/1.1", 400), ("HTTP/1.0", 200)])
def test_request_of_http_1_1_names_a_host(
    client: FlaskClient, path: str, protocol: str, status: int
) -> None:
    environ = {"HTTP_HOST": "", "SERVER_PROTOCOL": protocol}
    assert client.get(path, environ_overrides=environ).status_code == status
