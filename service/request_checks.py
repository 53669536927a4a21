"""What is checked of each request: before a view is called, and when a view reads the body."""

from io import BytesIO
from typing import IO

import gevent
from flask import Request, request
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import abort
from werkzeug.utils import cached_property

SOCKETS = "/api/v1/ws"  # under which all paths are WebSockets
MAX_BODY_BYTES = 16 * 1024
BODY_SECONDS = 10  # for a body to arrive, in total


class BoundedRequest(Request):
    """A request whose body is small and arrives in time, whether or not its length is announced."""

    @cached_property
    def stream(self) -> IO[bytes]:
        """All of the body. `form`, `get_json` and `get_data` read it here, when a view asks.

        Raises RequestEntityTooLarge (413), RequestTimeout (408), or BadRequest (400) for a body
        that is malformed or incomplete.
        """
        try:
            with gevent.Timeout(BODY_SECONDS, TimeoutError()):
                body = self.environ["wsgi.input"].read(MAX_BODY_BYTES + 1)
        except TimeoutError:
            abort(408)
        except (OSError, ParseException):
            abort(400)
        if len(body) > MAX_BODY_BYTES:
            abort(413)
        if len(body) < (self.content_length or 0):  # the connection broke
            abort(400)
        return BytesIO(body)


def check_request() -> None:
    """Refuse a request that no view could answer."""
    environ = request.environ
    # Files are small and have an ETag; parsing a long If-Match would take 20 ms.
    for name in ("HTTP_RANGE", "HTTP_IF_MODIFIED_SINCE", "HTTP_IF_MATCH"):
        environ.pop(name, None)
    host = environ.get("HTTP_HOST", "")
    is_missing = not host and environ["SERVER_PROTOCOL"] != "HTTP/1.0"  # RFC 9112 part 3.2
    # No name is longer (RFC 1035 part 2.3.4). A bad handshake has an error of its own.
    if (is_missing or len(host) > 255) and not request.path.startswith(f"{SOCKETS}/"):
        abort(400)
    if int(environ.get("CONTENT_LENGTH") or 0) > MAX_BODY_BYTES:
        abort(413)
