"""Checks of every request, to the API or the pages, before a view is called."""

from flask import Response, request
from werkzeug.exceptions import MethodNotAllowed, abort

MAX_BODY_BYTES = 16 * 1024  # forms are small, and the API takes no body

PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, HEAD, OPTIONS",
    "Access-Control-Allow-Headers": "X-API-Key, Content-Type, Authorization, *",
    "Access-Control-Max-Age": "86400",
}


def is_api() -> bool:
    return request.path.startswith("/api/")


def check_request() -> Response | None:
    """Refuse a request that no view could answer, and answer a CORS preflight."""
    environ = request.environ
    if environ["REQUEST_METHOD"] == "CONNECT":  # of which gunicorn makes some path
        raise MethodNotAllowed(["GET", "HEAD", "OPTIONS"])
    lacks_host = environ["SERVER_PROTOCOL"] == "HTTP/1.1" and not environ.get("HTTP_HOST")
    if lacks_host and "/ws/" not in request.path:  # a bad handshake has an error of its own
        abort(400)  # RFC 9112 part 3.2
    if "HTTP_TRANSFER_ENCODING" in environ:  # a body of unknown length
        abort(413 if is_api() else 411)
    if int(environ.get("CONTENT_LENGTH") or 0) > MAX_BODY_BYTES:
        abort(413)
    if "HTTP_ACCESS_CONTROL_REQUEST_METHOD" in environ and request.method == "OPTIONS" and is_api():
        preflight = Response(status=204, headers=PREFLIGHT)
        del preflight.headers["Content-Type"]  # there is no content
        return preflight
    return None
