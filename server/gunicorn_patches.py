"""Repairs of gunicorn 27.0, and what makes it faster.

Those that use private APIs are in the table of docs/design.md.
"""

import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import gevent
from gunicorn import http, util
from werkzeug.exceptions import RequestEntityTooLarge

from service.responses import API_HEADERS, Problem

PARSE_ERRORS = {  # why gunicorn refuses a request
    "ExpectationFailed": "The only expectation that is supported is 100-continue.",
    "InvalidHTTPVersion": "The version of HTTP is not supported; use HTTP/1.1.",
    "InvalidHeader": "A header is malformed.",
    "InvalidHeaderName": "The name of a header is malformed.",
    "InvalidRequestLine": "The first line of the request is malformed.",
    "InvalidRequestMethod": "The method is malformed.",
    "LimitRequestHeaders": "The headers are too large.",
    "LimitRequestLine": "The first line of the request is too long.",
    "NoMoreData": "The request is incomplete.",
    "ObsoleteFolding": "A header has several lines.",
    "UnsupportedTransferCoding": "The only transfer coding that is supported is chunked.",
}

FRAMING_BYTES = 4096  # of a body: sizes and extensions of chunks, line breaks, and trailers


def patch_gunicorn(cfg: Any, **settings: int) -> None:
    """Patch gunicorn in a worker, once, before it serves, and give it these settings."""
    # What gunicorn would look up or make for each request: some thirty settings (with
    # Config.__getattr__; now they are plain attributes), the Date header, and `wsgi.errors`.
    cfg.__dict__.update(
        {name: getattr(cfg, name) for name in cfg.settings}
        | {"limit_request_field_size": 32_768, **settings}  # of one header, and of all together
    )
    date = lru_cache(maxsize=1)(util.http_date)
    util.http_date = lambda: date(int(time.time()))
    http.wsgi.WSGIErrorsWrapper = lru_cache(maxsize=1)(http.wsgi.WSGIErrorsWrapper)

    # What gunicorn reads and sends. It allows 3 MiB of headers, and searches all of them again
    # whenever a part arrives. It sets this limit for each request, which the property ignores.
    http.message.Message.max_buffer_headers = property(
        lambda self: self.limit_request_field_size, lambda *_: None
    )
    http.parser.SocketUnreader = Unreader
    http.message.ChunkedReader = BoundedChunks
    http.wsgi.Response = FastResponse

    # What gunicorn says of a request that it can't parse: to the client, and in the log, where the
    # text of these errors would quote passwords and cookies.
    util.write_error = write_error
    for error in (http.errors.NoMoreData, *http.errors.ParseException.__subclasses__()):
        error.__str__ = lambda self: PARSE_ERRORS.get(
            type(self).__name__, "The request is malformed."
        )


def write_error(sock: Any, status: int, reason: str, message: str) -> None:
    """Answer a request that gunicorn cannot parse with a problem.

    gunicorn's own function of this name sends HTML, and from Python 3.14 on a malformed header.
    Some of its messages are like this: Invalid Method 'The method is malformed.'
    """
    response = Problem(
        status,
        detail=message.rstrip("'").rpartition("'")[2],
        headers={**dict(API_HEADERS), "Connection": "close", "Date": util.http_date()},
    ).get_response()
    # The headers end in an empty line.
    util.write_nonblock(
        sock, f"HTTP/1.1 {response.status}\r\n{response.headers}".encode() + response.data
    )


class FastResponse(http.wsgi.Response):
    """Sends a body that is complete in one packet with its header."""

    def process_headers(self, headers: list[tuple[str, str]]) -> None:
        """Take over the headers, which werkzeug has checked already.

        gunicorn would check them again. It has to see those of the connection, such as Date and
        Transfer-Encoding, which it sends itself.
        """
        values = {name.lower(): value for name, value in headers}
        if values.keys() & util.hop_headers:
            super().process_headers(headers)
            return
        if "content-length" in values:
            self.response_length = int(values["content-length"])
        self.headers.extend(headers)

    def write(self, arg: bytes) -> None:
        if self.headers_sent or len(arg) != self.response_length:
            super().write(arg)
            return
        lines = [f"{name}: {value}\r\n" for name, value in self.headers]
        header = "".join([*self.default_headers(), *lines, "\r\n"]).encode("latin-1")
        self.headers_sent: bool = True  # not before, because a header may fail to be encoded
        self.sent = len(arg)  # for the access log
        # The kernel nearly always takes all of it. `sendall` would ask for its buffer first, and
        # limit the time for all of it, although the client reads.
        data = memoryview(header + arg)  # its slices are no copies
        while data:
            data = data[self.sock.send(data) :]


class Unreader(http.parser.SocketUnreader):
    """Reads a connection for gunicorn, which asks for part after part until a request is whole."""

    parts = 0  # of this header, or of this body
    # How many bytes of framing may still be received; only a body in chunks has a limit. Such a
    # request is the last one of its connection, so nothing has to reset this.
    room = float("inf")

    def chunk(self, size_hint: int | None = None) -> bytes:
        """Read the next part; raises RequestEntityTooLarge if there is no room for it.

        Each wait is longer than the one before: what a client sends in many small parts arrives as
        a few larger ones, which cost less.
        """
        if self.parts:
            gevent.sleep(self.parts / 10_000)
        self.parts += 1
        # What is left of the current chunk, `size_hint`, is no framing. A part of 4,000 bytes takes
        # 3 ms to parse at most.
        size = min(4000, max(self.room, size_hint or 0))
        if size <= 0:
            raise RequestEntityTooLarge
        data: bytes = self.sock.recv(size)
        self.room -= len(data)
        return data


class BoundedChunks(http.message.ChunkedReader):
    """A body in chunks; it raises RequestEntityTooLarge if its framing is long."""

    def parse_chunked(self, unreader: Any) -> Iterator[bytes]:
        """The parts of the body as they are received."""
        unreader.room = FRAMING_BYTES - unreader.buf.tell()  # what came with the header
        for data in super().parse_chunked(unreader):
            unreader.room += len(data)  # `chunk` subtracts all that it receives; this is no framing
            yield data
