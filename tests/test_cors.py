"""Which other sites may read what: the API, with a key in the header, and no page."""

import pytest
from flask.testing import FlaskClient

from helpers.documents import API
from helpers.paths import SOCKETS
from helpers.rawsocket import RawSocket
from helpers.server import Server
from test_documents import filled_in, misfits, parameters

EXPOSED = {
    *("RateLimit", "RateLimit-Policy", "Retry-After", "WWW-Authenticate"),
    *("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"),
}


DESCRIBED = {
    filled_in(path, parameters(each["get"])): each["get"]["responses"]["200"]
    for path, each in API["paths"].items()
}
ENDPOINTS = list(DESCRIBED)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_cors_and_json_everywhere(server: Server, server_key: str, path: str) -> None:
    with RawSocket(server.port) as connection:
        head = connection.request(path, "HEAD", X_API_Key=server_key)
        get = connection.request(path, X_API_Key=server_key, Origin="https://a.example")
    assert head.status == get.status == 200
    assert set(head.headers) == set(get.headers)
    assert get.headers["Content-Type"] == "application/json"
    assert get.headers["Cache-Control"] == "no-store"
    assert get.headers["Access-Control-Allow-Origin"] == "*"
    assert set(get.headers["Access-Control-Expose-Headers"].split(", ")) >= EXPOSED
    assert "Set-Cookie" not in get.headers
    assert get.body.endswith(b"}\n")
    schema = DESCRIBED[path]["content"]["application/json"]["schema"]
    assert not misfits(get.json(), schema, API), f"{path}: not as in docs/openapi.json"


@pytest.mark.parametrize("path", [*ENDPOINTS, *SOCKETS, "/api/v1/x", "//api/v1/status"])
def test_cors_preflight_allows_the_key_header(server: Server, path: str) -> None:
    asked = {"Access_Control_Request_Method": "GET", "Origin": "https://a.example"}
    answer = server.ask(path, "OPTIONS", Access_Control_Request_Headers="x-api-key", **asked)
    assert (answer.status, answer.body, "Content-Type" in answer.headers) == (204, b"", False)
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}
    assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert answer.headers["Access-Control-Allow-Headers"].startswith("X-API-Key, Content-Type")
    assert "GET" in answer.headers["Access-Control-Allow-Methods"]


def test_pages_are_for_their_own_origin_only(client: FlaskClient) -> None:
    preflight = {"Access-Control-Request-Method": "GET"}
    for answer in (client.get("/"), client.options("/log-in", headers=preflight)):
        assert not [name for name, _ in answer.headers if name.startswith("Access-Control")]
