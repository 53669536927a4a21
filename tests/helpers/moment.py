"""A test client that reads a response for a moment only, because it may be an endless stream.

It also fails where a view has a bug, where a request that is refused has stored something, and
where a page refers to what it does not have.
"""

import re
import socket
import time
from contextlib import suppress
from traceback import extract_tb
from typing import Any
from unittest import mock

import gevent
from flask.testing import FlaskClient
from peewee import PeeweeException
from werkzeug.test import TestResponse

from helpers.paths import AUDITED, CALLS
from helpers.stored import snapshot
from settings import PROJECT

MOMENT_SECONDS = 0.2
ADVICE = (
    "calls another service while its client waits: do that in the background, see Calls to other "
    "services in CONTRIBUTING.md; or name the path in CALLS in tests/helpers/paths.py"
)
# Finds what must be the ID of exactly one element. For an error in a <details> that is closed, it
# finds `alert`, which is no ID, so this is reported, too.
REFERENCE = (
    r'(?:\s(?:(?:for|aria-\w+by|aria-controls|data-copy|data-show)="|href="#)|'
    r'<details(?![^>]* open)[^>]*>(?:[^<]|<(?!/details>))*? role="(?=alert"))([^"]+)'
)
# What to do about the error of a view, by what it says.
CAUSES = {
    r"invalid literal for int|int\(\) argument": "isdigit also takes \u00b2 and \u0663: use "
    'fullmatch("[0-9]+", text), and limit the length',
    "surrogates|NUL|null|encode": "check str.isprintable of a text before it is stored or sent",
    "too large|out of range|too long": "refuse what no row can have: check the bounds",
    "not opened|closed": "iterate a query inside connection_context, for example with list()",
    "no column|no such|does not exist|syntax": "let peewee write it, for SQLite and PostgreSQL",
    "^Changed": "answer it with a 409; transaction(user) needs a User that was read, because "
    "another one has no password_hash",
    "^InvalidInput": "add @show_errors_on(the page of the form)",
    "FOREIGN KEY|foreign key": "the user may be deleted meanwhile: raise auth.invalid_key(); if a "
    'row is deleted here, give what refers to it on_delete="CASCADE"',
    "NOT NULL|not-null": "give the column a default, see Rows in CONTRIBUTING.md",
    "UNIQUE|unique": "refuse it where the IntegrityError is raised",
    "^KeyError": "check what was sent first: use form_option",
    "DoesNotExist|NoneType": "get_or_none and get_json(silent=True) may be None: refuse that",
}


class MomentClient(FlaskClient):
    """Reads each response to its end, or for a moment if its length isn't known, and closes it."""

    def open(self, *args: Any, buffered: bool = True, **kwargs: Any) -> TestResponse:
        calls = mock.Mock(side_effect=ConnectionRefusedError)
        raised = mock.Mock(side_effect=self.application.handle_user_exception)
        before = snapshot() if kwargs.get("method") in ("POST", "PUT", "PATCH", "DELETE") else {}
        with (
            mock.patch.object(self.application, "handle_user_exception", raised),
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
                    if time.monotonic() > end and answer.content_length is None:
                        break
            answer.close()
        answer.response = parts
        first = (*answer.history, answer)[0].request
        what = f"{first.method} {first.url[:300]} (sent: {str(kwargs.get('data'))[:300]})"
        assert first.path in CALLS or not calls.called, f"{what} {ADVICE}"
        cause = cause_of(raised.call_args.args[0]) if raised.called else ""
        assert answer.status_code != 500 or "test_" in cause, f"{what} is a bug: {cause}"
        ids = re.findall(r'\sid="(.*?)"', answer.text)
        assert not [
            name
            for name in " ".join(re.findall(REFERENCE, answer.text)).split()
            if ids.count(name) != 1
        ] + [
            name
            for name in ids
            if name.endswith("-hint") or (name.endswith("-note") and name[:-5] in ids)
            if not re.search(rf'\saria-describedby="(?:[^"]* )?{re.escape(name)}[" ]', answer.text)
        ], (
            f"{what}: for, aria-labelledby, aria-describedby, data-copy, data-show or href names "
            "an id that no element has, or several; or no field names its hint: see parts.html; or "
            "an error is folded: let g.errors open its <details>"
        )
        if before and answer.status_code >= 400 and first.path not in AUDITED:
            assert snapshot() == before, (
                f"{what} is refused after something was stored: check all of it before, or store "
                "all in one `with transaction():`, or name the path in AUDITED in "
                f"tests/helpers/paths.py: {answer} {cause}"
            )
        return answer


def cause_of(error: Exception) -> str:
    """What is wrong, in which lines of this repository, and what to do."""
    lines = [
        f"{frame.filename.removeprefix(f'{PROJECT}/')}:{frame.lineno}"
        for frame in extract_tb(error.__traceback__)
        if frame.filename.startswith(str(PROJECT)) and "site-packages" not in frame.filename
    ]
    found = f"{type(error).__name__}: {error}"
    advice = [each for cause, each in CAUSES.items() if re.search(cause, found)]
    return f"{found[:300]} in {', '.join(lines)}: {', or: '.join(advice)}"
