"""Every error under /api/ as `application/problem+json` (RFC 9457)."""

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus

from flask import Flask, Response, request
from peewee import DatabaseError, InterfaceError
from werkzeug import exceptions
from werkzeug.exceptions import HTTPException
from werkzeug.routing.exceptions import WebsocketMismatch

import models

log = logging.getLogger(__name__)

KNOWN = {
    400: ("bad_request", "The request could not be understood."),
    404: ("not_found", "There is nothing at this path."),
    405: ("method_not_allowed", "This path does not answer that method."),
    413: ("content_too_large", "The request body is too large; this API takes none."),
    500: ("internal_error", "Something went wrong on our side."),
    503: ("unavailable", "The database cannot be reached; try again shortly."),
}


class Problem(HTTPException):
    """An answer that is an error: a status, a stable word for programs, a sentence for people.

    `headers` go onto the answer, further members into its body.
    """

    def __init__(
        self,
        status: int,
        word: str,
        detail: str,
        headers: Mapping[str, str] | None = None,
        **members: object,
    ) -> None:
        body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status}
        body |= {"detail": detail, "code": word, **members}
        response = Response(json.dumps(body) + "\n", status, headers)
        response.content_type = "application/problem+json"
        super().__init__(detail, response)


def known(status: int, headers: Mapping[str, str] | None = None) -> Problem:
    """A problem that its status says all about."""
    return Problem(status, *KNOWN[status], headers)


def bad_handshake(detail: str) -> Problem:
    """400: it asks for a WebSocket in a way that RFC 6455 does not allow."""
    return Problem(400, "bad_handshake", detail)


def upgrade_required(detail: str, **headers: str) -> Problem:
    """426: this path speaks WebSocket version 13 and nothing else."""
    headers |= {"Connection": "upgrade", "Upgrade": "websocket"}
    return Problem(426, "upgrade_required", detail, headers)


def register(app: Flask) -> None:
    """Answer every error under /api/ with a problem; errors elsewhere stay what they are."""
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(DatabaseError, _unavailable)
    app.register_error_handler(InterfaceError, _unavailable)
    app.register_error_handler(Exception, _bug)


def _http_error(error: HTTPException) -> HTTPException:
    if isinstance(error, Problem) or not request.path.startswith("/api/"):
        return error
    if isinstance(error, WebsocketMismatch):
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return bad_handshake("This path is no WebSocket, or Connection: Upgrade is missing.")
        return upgrade_required("Connect to this path with a WebSocket client.")
    status = error.code if error.code in KNOWN else 400
    headers = {
        name: value for name, value in error.get_headers() if name in ("Allow", "Retry-After")
    }
    return known(status, headers)


def _unavailable(error: Exception) -> HTTPException:
    models.outage.began(error)
    return _http_error(exceptions.ServiceUnavailable(retry_after=1))


def _bug(error: Exception) -> HTTPException:
    log.exception("bug in %s %s", request.method, request.path, exc_info=error)
    return _http_error(exceptions.InternalServerError())
