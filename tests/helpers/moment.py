"""A test client that reads a response for a moment only, because it may be an endless stream."""

import time
from typing import Any
from unittest import mock

import gevent
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

MOMENT_SECONDS = 0.2


class MomentClient(FlaskClient):
    """Reads each response to its end, or for a moment, and closes it."""

    def open(self, *args: Any, buffered: bool = True, **kwargs: Any) -> TestResponse:
        # As in the service, where gevent has patched it: other greenlets run meanwhile.
        with mock.patch("time.sleep", gevent.sleep):
            answer = super().open(*args, **kwargs)
            parts: list[bytes] = []
            end = time.monotonic() + MOMENT_SECONDS
            with gevent.Timeout(MOMENT_SECONDS, False):
                for part in answer.iter_encoded():
                    parts.append(part)
                    if time.monotonic() > end:
                        break
            answer.close()
        answer.response = parts
        return answer
