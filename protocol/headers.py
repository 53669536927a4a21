"""The headers of every response under /api/: caching, CORS (Fetch standard) and rate limits."""

from typing import Any

from ratelimit import Allowance

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


def with_api_headers(wsgi_app: Any) -> Any:
    """Add the API's headers.

    This is WSGI middleware, because werkzeug would take 25 µs for these headers: a tenth of a
    request.
    """

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        def start(status: str, headers: list[tuple[str, str]], *args: Any) -> Any:
            more = limit_headers(environ[ALLOWANCE]) if ALLOWANCE in environ else []
            return start_response(status, [*headers, *API_HEADERS, *more], *args)

        is_api = environ["PATH_INFO"].lstrip("/").startswith("api/")  # as Flask reads the path
        return wsgi_app(environ, start if is_api else start_response)

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
