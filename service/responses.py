"""What responses under /api/ share: headers, the form of JSON, and errors (RFC 9457)."""

import json
import logging
from collections.abc import Callable
from typing import Any

from flask import Flask, Response, request
from flask.typing import ResponseReturnValue
from peewee import DataError, PeeweeException
from werkzeug import exceptions
from werkzeug.exceptions import HTTPException
from werkzeug.http import HTTP_STATUS_CODES

from ratelimit import UNIT_NAMES, Allowance
from service.timestamps import date_time
from storage.outage import is_outage, log_outage

log = logging.getLogger(__name__)

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
DEFAULTS = {
    400: ("bad_request", "The request could not be understood."),
    404: ("not_found", "There is nothing here; openapi.json and asyncapi.json list the paths."),
    405: ("method_not_allowed", "This path does not take this method."),
    413: ("content_too_large", "The request body is too large."),
    426: ("upgrade_required", "Connect with a WebSocket client."),
    500: ("internal_error", "Something went wrong on our side."),
    503: ("unavailable", "The service or its database cannot be used; try again shortly."),
}
RFC_9110_TITLES = {413: "Content Too Large", 414: "URI Too Long"}  # werkzeug has older ones
# The encoder is made once, because json.dumps would make one each time.
json_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def is_api(path: str) -> bool:
    """Whether a path is under /api/; Flask ignores how many slashes it begins with."""
    return f"{path.lstrip('/')}/".startswith("api/")


def limit_headers(allowance: Allowance) -> list[tuple[str, str]]:
    """Both header families: draft-ietf-httpapi-ratelimit-headers, and X-RateLimit."""
    quota = allowance.quota
    return [
        ("RateLimit-Policy", f'"{quota.tier}";q={quota.limit};w={quota.seconds}'),
        ("RateLimit", f'"{quota.tier}";r={allowance.remaining};t={allowance.seconds_left}'),
        ("X-RateLimit-Limit", str(quota.limit)),
        ("X-RateLimit-Remaining", str(allowance.remaining)),
        ("X-RateLimit-Reset", str(allowance.reset)),
    ]


class Problem(HTTPException):
    """An error response: a status, a stable code for programs, a sentence for people.

    DEFAULTS has the code and the sentence of a status; for other statuses the code is made from the
    title. Give a new code where the error is raised, and list it under `codes` of the endpoint in
    docs/endpoints.json.

    `headers` are added to the response, and `members` to its body.
    """

    def __init__(
        self, status: int, code: str = "", detail: str = "", headers: Any = None, **members: object
    ) -> None:
        title = title_of(status)
        known = DEFAULTS.get(status, (title.lower().replace(" ", "_"), title))
        body = {
            "type": "about:blank",
            "title": title,
            "status": status,
            "detail": detail or known[1],
            "code": code or known[0],
            **members,
        }
        super().__init__(
            detail, Response(json_text(body) + "\n", status, headers, "application/problem+json")
        )
        self.code = status


def title_of(status: int) -> str:
    """The phrase of a status; not Python's, because these differ from version to version."""
    return RFC_9110_TITLES.get(status) or HTTP_STATUS_CODES.get(status) or f"Error {status}"


def rate_limited(allowance: Allowance) -> Problem:
    """The 429 of a key whose limit is used up."""
    quota = allowance.quota
    return Problem(
        429,
        "rate_limited",
        f"The limit of {quota.limit:,} request{'s' * (quota.limit > 1)} "
        f"per {UNIT_NAMES[quota.seconds]} is used up.",
        headers={"Retry-After": str(allowance.seconds_left)},
        **{
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "violated-policies": [quota.tier],
        },
        reset_time=date_time(allowance.reset),
    )


def register(app: Flask, page: Callable[[HTTPException], ResponseReturnValue]) -> None:
    """Turn every error under /api/ into a problem, and every other one into a page."""

    @app.errorhandler(HTTPException)
    def respond(error: HTTPException) -> ResponseReturnValue:
        return problem_response(error) if is_api(request.path) else page(error)

    @app.errorhandler(PeeweeException)
    def database_error(error: PeeweeException) -> ResponseReturnValue:
        if isinstance(error, DataError) and "NUL" in str(error):  # PostgreSQL cannot store it
            return respond(exceptions.BadRequest())
        if not is_outage(error):
            return internal_error(error)
        log_outage(error)
        return respond(exceptions.ServiceUnavailable(retry_after=1))

    @app.errorhandler(Exception)
    def internal_error(error: Exception) -> ResponseReturnValue:
        log.exception("bug in %s %s", request.method, request.path)
        return respond(exceptions.InternalServerError())


def problem_response(error: HTTPException) -> ResponseReturnValue:
    """The response to an error under /api/."""
    if error.response is None:  # an error of werkzeug, not a Problem
        error = Problem(
            error.code or 500,
            # What a view gave to `abort` is in the object; werkzeug's own words are in its class.
            detail=vars(error).get("description") or "",
            # These bring Allow and Retry-After; the problem has a Content-Type of its own.
            headers=error.get_headers(),
        )
    response = error.get_response()
    if request.path.removesuffix("/") == "/api/v1/gate":
        # The body in ASCII, for a proxy that discards bodies.
        response.headers["X-Gate-Problem"] = json.dumps(response.json, separators=(",", ":"))
        if "return=minimal" in request.headers.get("Prefer", ""):  # RFC 7240: leave out the body
            response.set_data("")
    return response
