"""What responses under /api/ share: headers for caching, CORS and limits, and the form of JSON."""

import json

from ratelimit import Allowance

API_HEADERS = [
    ("Cache-Control", "no-store"),
    ("Access-Control-Allow-Origin", "*"),
    (
        "Access-Control-Expose-Headers",
        "RateLimit-Policy, RateLimit, Retry-After, WWW-Authenticate, "
        "X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset",
    ),
]
PREFLIGHT = {  # Fetch standard
    "Access-Control-Allow-Headers": "X-API-Key, Content-Type, Authorization, *",
    "Access-Control-Max-Age": "86400",
}


def is_api(path: str) -> bool:
    """Whether a path is under /api/; Flask ignores how many slashes it begins with."""
    return f"{path.lstrip('/')}/".startswith("api/")


def limit_headers(allowance: Allowance) -> list[tuple[str, str]]:
    """Both header families: draft-ietf-httpapi-ratelimit-headers, and X-RateLimit."""
    quota, left = allowance.quota, allowance.remaining
    return [
        ("RateLimit-Policy", f'"{quota.tier}";q={quota.limit};w={quota.seconds}'),
        ("RateLimit", f'"{quota.tier}";r={left};t={allowance.seconds_left}'),
        ("X-RateLimit-Limit", str(quota.limit)),
        ("X-RateLimit-Remaining", str(left)),
        ("X-RateLimit-Reset", str(allowance.reset)),
    ]


# The encoder is made once, because json.dumps would make one each time.
json_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
