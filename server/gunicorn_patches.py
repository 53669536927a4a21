"""Repairs of gunicorn 27.0, and what makes it faster.

What uses private APIs is in a row of the table in docs/design.md, and works without the others.
"""

import errno
import time
from functools import lru_cache
from typing import Any

from gunicorn import http, util

from rest.problems import Problem

HEADER_BYTES = 32_768  # of a request's header
DETAIL_CHARACTERS = 100  # of the answer to a request that gunicorn cannot parse


def apply(cfg: Any) -> None:
    """Called once in each worker, before it serves."""
    read_settings_once(cfg)
    write_date_once_a_second()
    share_error_stream()
    limit_header()
    util.write_error = write_error


def read_settings_once(cfg: Any) -> None:
    """Make gunicorn's settings plain attributes, which saves 10 % of a request.

    Config.__getattr__ looks each of them up some thirty times in a request.
    """
    cfg.__dict__.update({name: getattr(cfg, name) for name in cfg.settings})


def write_date_once_a_second() -> None:
    """Format the Date header once a second: with share_error_stream, it saves 8 % of a request."""
    date = lru_cache(maxsize=1)(util.http_date)
    util.http_date = lambda: date(int(time.time()))


def share_error_stream() -> None:
    """Let all requests have the same `wsgi.errors`: see write_date_once_a_second."""
    http.wsgi.WSGIErrorsWrapper = lru_cache(maxsize=1)(http.wsgi.WSGIErrorsWrapper)


def limit_header() -> None:
    """Limit a request's header to HEADER_BYTES.

    gunicorn's own limit is 800 KiB, and it searches all of a header again whenever a part of it
    arrives. It sets that limit for each request, which this property ignores. This can go when
    gunicorn searches a header only once, or has a setting for its size.
    """
    http.message.Message.max_buffer_headers = property(lambda _: HEADER_BYTES, lambda *_: None)


def write_error(sock: Any, status: int, reason: str, message: str) -> None:
    """Answer a request that gunicorn cannot parse with a problem, in which little of it is quoted.

    gunicorn's own function of this name sends HTML, and from Python 3.14 on a malformed header.
    """
    body = Problem(status, detail=message[:DETAIL_CHARACTERS]).get_response().data
    header = f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Length: {len(body)}"
    kind = "Content-Type: application/problem+json"
    util.write_nonblock(sock, f"{header}\r\n{kind}\r\n\r\n".encode() + body)


class ResponseSocket:
    """A client's socket, to which gunicorn writes one response.

    gunicorn calls `sendall` for the header, and for each part of the body. Here the header waits
    for the first part, and both are sent at once, which saves 10 % of a request. A WebSocket only
    uses `send`.
    """

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._header: bytes | None = None  # not sent yet; empty afterwards

    def sendall(self, data: bytes) -> None:
        """Raises BrokenPipeError, which gunicorn ignores, for a client that does not read."""
        if self._header is None:
            self._header = data
            return
        whole, self._header = self._header + data, b""
        try:
            sent = self._sock.send(whole)  # mostly all; sendall would first ask for a buffer's size
            if sent < len(whole):
                self._sock.sendall(whole[sent:])
        except TimeoutError as error:
            raise BrokenPipeError(errno.EPIPE, "the client does not read") from error

    def __enter__(self) -> "ResponseSocket":
        return self

    def __exit__(self, *error: object) -> None:
        if self._header:  # of a response without a body
            self.sendall(b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)
