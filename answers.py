"""What every answer of the API is made of: its JSON and its headers."""

import json
from typing import Any

from flask import Response
from flask.json.provider import DefaultJSONProvider

from problems import Problem
from ratelimit import Allowance

MAX_BODY_BYTES = 16 * 1024
ALLOWANCE = "demo.allowance"  # in the WSGI environ: the limiter's answer to this request
EXPOSED = (
    "RateLimit-Policy, RateLimit, Retry-After, WWW-Authenticate, "
    "X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset"
)
API_HEADERS = [
    ("Cache-Control", "no-store"),
    ("Access-Control-Allow-Origin", "*"),
    ("Access-Control-Expose-Headers", EXPOSED),
]
PREFLIGHT_HEADERS = [
    ("Access-Control-Allow-Methods", "GET"),
    ("Access-Control-Allow-Headers", "X-API-Key"),
    ("Access-Control-Max-Age", "86400"),
]


class Json(DefaultJSONProvider):
    """Flask's, with an encoder made once instead of for every answer."""

    encode = json.JSONEncoder(separators=(",", ":")).encode

    def response(self, *args: Any, **kwargs: Any) -> Response:
        return Response(self.encode(args[0]) + "\n", content_type="application/json")


def with_api_headers(wsgi_app: Any) -> Any:
    """Add what every answer of the API carries, and refuse what is no request for it.

    At the WSGI level, because werkzeug takes 25 µs for so many headers: a tenth of a request.
    """

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        def start(status: str, headers: list[tuple[str, str]], *args: Any) -> Any:
            headers += API_HEADERS
            if ALLOWANCE in environ:
                headers += limit_headers(environ[ALLOWANCE])
            if environ["REQUEST_METHOD"] == "OPTIONS":
                headers += PREFLIGHT_HEADERS
            return start_response(status, headers, *args)

        if not environ["PATH_INFO"].lstrip("/").startswith("api/"):  # as Flask reads it
            return wsgi_app(environ, start_response)
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if length > MAX_BODY_BYTES or "HTTP_TRANSFER_ENCODING" in environ:  # may be of any length
            return Problem(413)(environ, start)
        host = environ.get("HTTP_HOST") or environ["SERVER_PROTOCOL"] == "HTTP/1.0"
        if not (host or "HTTP_UPGRADE" in environ):  # RFC 9112 part 3.2; a handshake has its own
            return Problem(400)(environ, start)
        return wsgi_app(environ, start)

    return application


def limit_headers(allowance: Allowance) -> list[tuple[str, str]]:
    """Both header families: draft-ietf-httpapi-ratelimit-headers, and X-RateLimit."""
    (tier, limit, seconds), _, remaining, reset, seconds_left, _ = allowance
    return [
        ("RateLimit-Policy", f'"{tier}";q={limit};w={seconds}'),
        ("RateLimit", f'"{tier}";r={remaining};t={seconds_left}'),
        ("X-RateLimit-Limit", str(limit)),
        ("X-RateLimit-Remaining", str(remaining)),
        ("X-RateLimit-Reset", str(reset)),
    ]
