"""Which other sites may read what: the API, with a key in the header, and no page.

The methods and headers of each endpoint are in test_descriptions.py.
"""

from flask.testing import FlaskClient

from helpers.paths import STATUS
from helpers.server import Server

EXPOSED = {
    *("RateLimit", "RateLimit-Policy", "Retry-After", "WWW-Authenticate"),
    *("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"),
}


def test_page_of_another_origin_may_read_the_limit(server: Server) -> None:
    for path in (STATUS, f"/{STATUS}"):
        headers = server.ask(path, "OPTIONS", Origin="https://a.example").headers
        assert set(headers["Access-Control-Expose-Headers"].split(", ")) >= EXPOSED
        assert "Set-Cookie" not in headers


def test_pages_are_for_their_own_origin_only(client: FlaskClient) -> None:
    preflight = {"Access-Control-Request-Method": "GET"}
    for answer in (client.get("/"), client.options("/log-in", headers=preflight)):
        assert not [name for name, _ in answer.headers if name.startswith("Access-Control")]
