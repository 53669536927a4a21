"""The headers of every response under /api/: caching, CORS (Fetch standard) and rate limits."""

from typing import Any

from flask import Response
from werkzeug.exceptions import BadRequest

from protocol.problems import Problem
from ratelimit import Allowance
from settings import MAX_BODY_BYTES

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
PREFLIGHT = Response(status=204)
del PREFLIGHT.headers["Content-Type"]  # there is no content
PREFLIGHT.headers["Access-Control-Allow-Methods"] = "GET, HEAD, OPTIONS"
PREFLIGHT.headers["Access-Control-Allow-Headers"] = "X-API-Key, Content-Type, Authorization, *"
PREFLIGHT.headers["Access-Control-Max-Age"] = "86400"


def with_api_headers(wsgi_app: Any) -> Any:
    """Add the API's headers, and answer what no view has to see.

    As WSGI middleware, because werkzeug takes 25 µs for so many headers: a tenth of a request.
    """

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        def start(status: str, headers: list[tuple[str, str]], *args: Any) -> Any:
            headers += API_HEADERS
            if ALLOWANCE in environ:
                headers += limit_headers(environ[ALLOWANCE])
            return start_response(status, headers, *args)

        if not environ["PATH_INFO"].lstrip("/").startswith("api/"):  # as Flask reads the path
            return (BadRequest() if _lacks_host(environ) else wsgi_app)(environ, start_response)
        return (_answer_early(environ) or wsgi_app)(environ, start)

    return application


def _answer_early(environ: dict[str, Any]) -> Any:
    """The response to a request that no view has to see, as a WSGI application."""
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if length > MAX_BODY_BYTES or "HTTP_TRANSFER_ENCODING" in environ:
        return Problem(413)
    if _lacks_host(environ) and "/ws/" not in environ["PATH_INFO"]:  # `negotiate` checks it there
        return Problem(400)
    if environ["REQUEST_METHOD"] == "OPTIONS" and "HTTP_ACCESS_CONTROL_REQUEST_METHOD" in environ:
        return PREFLIGHT
    return None


def _lacks_host(environ: dict[str, Any]) -> bool:
    """RFC 9112 part 3.2."""
    return environ["SERVER_PROTOCOL"] == "HTTP/1.1" and not environ.get("HTTP_HOST")


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
