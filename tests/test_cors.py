"""Which other sites may read what: the API, with a key in the header, and no page.

What each endpoint sends is in test_descriptions.py.
"""

from flask.testing import FlaskClient

from helpers.paths import STATUS
from helpers.server import Server

EXPOSED = {
    *("RateLimit", "RateLimit-Policy", "Retry-After", "WWW-Authenticate"),
    *("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"),
}


def test_page_may_read_the_headers_of_the_limit(server: Server) -> None:
    for path in (STATUS, f"/{STATUS}"):
        asked = {"Access_Control_Request_Method": "GET", "Origin": "https://a.example"}
        answer = server.ask(path, "OPTIONS", Access_Control_Request_Headers="x-api-key", **asked)
        assert answer.status == 204
        assert set(answer.headers["Access-Control-Expose-Headers"].split(", ")) >= EXPOSED
        assert "Set-Cookie" not in answer.headers


def test_pages_are_for_their_own_origin_only(client: FlaskClient) -> None:
    preflight = {"Access-Control-Request-Method": "GET"}
    for answer in (client.get("/"), client.options("/log-in", headers=preflight)):
        assert not [name for name, _ in answer.headers if name.startswith("Access-Control")]
