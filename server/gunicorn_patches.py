"""Repairs of gunicorn 27.0, and what makes it faster.

Each of them can be removed alone. Those that use private APIs are in the table of docs/design.md.
"""

import time
from functools import lru_cache
from typing import Any

from gunicorn import http, util

from service.headers import API_HEADERS
from service.problems import Problem

HEADER_BYTES = 32_768  # of a request's header
DETAIL_CHARACTERS = 100  # of the answer to a request that gunicorn cannot parse


def patch_gunicorn(cfg: Any) -> None:
    """Patch gunicorn in a worker, once, before it serves; later changes of `cfg` have no effect."""
    # Plain attributes: Config.__getattr__ looks each setting up some thirty times in a request.
    cfg.__dict__.update({name: getattr(cfg, name) for name in cfg.settings})
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
