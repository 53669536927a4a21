"""Repairs of gunicorn 27.0, and what makes it faster.

Each of them can be removed alone. Those that use private APIs are in the table of docs/design.md.
"""

import errno
import time
from functools import lru_cache
from typing import Any

from gunicorn import http, util

from http_api.headers import API_HEADERS
from http_api.problems import Problem

HEADER_BYTES = 32_768  # of a request's header
DETAIL_CHARACTERS = 100  # of the answer to a request that gunicorn cannot parse


def apply(cfg: Any, **changed: object) -> None:
    """Called once in each worker, before it serves, with the settings that differ in a worker."""
    # Plain attributes: Config.__getattr__ looks each setting up some thirty times in a request.
    cfg.__dict__.update({name: getattr(cfg, name) for name in cfg.settings} | changed)
    # The Date header is formatted once a second, and all requests have the same `wsgi.errors`.
    date = lru_cache(maxsize=1)(util.http_date)
    util.http_date = lambda: date(int(time.time()))
    http.wsgi.WSGIErrorsWrapper = lru_cache(maxsize=1)(http.wsgi.WSGIErrorsWrapper)
    # gunicorn's own limit is 800 KiB, and it searches all of a header again whenever a part of it
    # arrives. It sets that limit for each request, which this property ignores.
    http.message.Message.max_buffer_headers = property(lambda _: HEADER_BYTES, lambda *_: None)
    util.write_error = write_error


def write_error(sock: Any, status: int, reason: str, message: str) -> None:
    """Answer a request that gunicorn cannot parse with a problem, in which little of it is quoted.

    gunicorn's own function of this name sends HTML, and from Python 3.14 on a malformed header.
    """
    problem = Problem(status, detail=message[:DETAIL_CHARACTERS], headers=dict(API_HEADERS))
    response = problem.get_response()
    response.headers["Connection"] = "close"
    header = f"HTTP/1.1 {response.status}\r\n{response.headers}"  # which ends in an empty line
    util.write_nonblock(sock, header.encode() + response.data)


class ResponseSocket:
    """A client's socket, to which gunicorn writes one response: its header with the first part.

    gunicorn calls `sendall` for the header, and for each part of the body. A WebSocket uses `send`.
    """

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._header: bytes | None = None  # b"" once it is sent

    def sendall(self, data: bytes) -> None:
        """Raises BrokenPipeError, which gunicorn ignores, for a client that does not read."""
        if self._header is None:
            self._header = data
            return
        data = self._header + data
        self._header = b""
        try:
            sent = self._sock.send(data)  # nearly always all of it; sendall has more to do
            if sent < len(data):
                self._sock.sendall(data[sent:])
        except TimeoutError as error:
            raise BrokenPipeError(errno.EPIPE, "the client does not read") from error

    def end(self) -> None:
        """Send the header of a response that had no body, unless gunicorn has closed the socket."""
        if self._header and self._sock.fileno() >= 0:
            self.sendall(b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)
