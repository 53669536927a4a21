"""What is checked of each request, before a view is called."""

from flask import Response, current_app, request
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import abort

from service.headers import PREFLIGHT, is_api

SOCKETS = "/api/v1/ws/"  # under which all paths are WebSockets
MAX_BODY_BYTES = 16 * 1024  # forms are small, and so is what the API takes
MAX_HOST_BYTES = 255  # RFC 1035 part 2.3.4


def check_request() -> ResponseReturnValue | None:
    """Refuse a request that no view could answer, and answer OPTIONS for the API."""
    environ = request.environ
    for name in ("HTTP_RANGE", "HTTP_IF_MODIFIED_SINCE"):  # files are small, and have an ETag
        environ.pop(name, None)
    host = environ.get("HTTP_HOST", "")
    is_missing = not host and environ["SERVER_PROTOCOL"] != "HTTP/1.0"  # RFC 9112 part 3.2
    is_bad = is_missing or len(host) > MAX_HOST_BYTES
    if is_bad and not request.path.startswith(SOCKETS):  # a bad handshake has an error of its own
        abort(400)
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if length > MAX_BODY_BYTES or "HTTP_TRANSFER_ENCODING" in environ:  # of unknown length
        abort(413)
    if request.method == "OPTIONS" and is_api(request.path):
        return preflight()
    return None


def preflight() -> Response:
    """The answer to OPTIONS, with the methods of the path."""
    # Where there is no path, a page may read the 404 of a GET.
    taken = current_app.url_map.bind("").allowed_methods(request.path)
    methods = ", ".join(sorted(taken)) or "GET, HEAD, OPTIONS"
    allowed = {"Allow": methods, "Access-Control-Allow-Methods": methods}
    response = Response(status=204, headers=PREFLIGHT | allowed)
    del response.headers["Content-Type"]
    return response
