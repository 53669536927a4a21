"""A test client that reads a response for a moment only, because it may be an endless stream."""

import socket
import time
from contextlib import suppress
from typing import Any
from unittest import mock

import gevent
from flask.testing import FlaskClient
from peewee import PeeweeException
from werkzeug.test import TestResponse

from helpers.paths import CALLS

MOMENT_SECONDS = 0.2
ADVICE = (
    "calls another service while its client waits: do that in the background, see Calls to other "
    "services in CONTRIBUTING.md; or name the path in CALLS in tests/helpers/paths.py"
)


class MomentClient(FlaskClient):
    """Reads each response to its end, or for a moment, and closes it."""

    def open(self, *args: Any, buffered: bool = True, **kwargs: Any) -> TestResponse:
        calls = mock.Mock(side_effect=ConnectionRefusedError)
        with (
            # As in the service, where gevent has patched it: other greenlets run meanwhile.
            mock.patch("time.sleep", gevent.sleep),
            mock.patch("socket.getaddrinfo", calls),
            mock.patch.object(socket.socket, "connect", calls),
        ):
            answer = super().open(*args, **kwargs)
            parts: list[bytes] = []
            end = time.monotonic() + MOMENT_SECONDS
            # In an outage, a response that has begun can only be cut.
            with gevent.Timeout(MOMENT_SECONDS, False), suppress(PeeweeException):
                for part in answer.iter_encoded():
                    parts.append(part)
                    if time.monotonic() > end:
                        break
            answer.close()
        answer.response = parts
        path = answer.request.path
        assert path in CALLS or not calls.called, f"{path} {ADVICE}"
        return answer
