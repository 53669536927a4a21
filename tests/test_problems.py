"""Errors under /api/ are problem+json; a bug and an outage are logged, and leak nothing."""

import logging
import secrets
from collections.abc import Callable
from http import HTTPStatus

import peewee
import pytest
from flask import Flask, abort
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

import models
from models import ApiKey
from protocol import problems
from protocol.problems import Problem
from storage.outage import Outage

SECRET = secrets.token_hex()
Failing = Callable[[BaseException], TestResponse]


@pytest.fixture(autouse=True)
def outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """No outage has been logged yet."""
    monkeypatch.setattr(problems, "outage", Outage())


@pytest.fixture(params=["/api/failing", "/failing"])
def failing(app: Flask, client: FlaskClient, request: pytest.FixtureRequest) -> Failing:
    """Asks for a path of the API, or for a page, whose view raises this error."""
    path: str = request.param

    def ask(error: BaseException) -> TestResponse:
        def fail() -> str:
            raise error

        app.add_url_rule(path, path, fail)
        return client.get(path, query_string={"api_key": SECRET}, headers={"X-API-Key": SECRET})

    return ask


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "bad_request"),
        (404, "not_found"),
        (405, "method_not_allowed"),
        (413, "content_too_large"),
        (500, "internal_error"),
        (503, "unavailable"),
    ],
)
def test_each_status_has_its_own_code(
    app: Flask, client: FlaskClient, status: int, code: str
) -> None:
    app.add_url_rule("/api/abort", "abort", lambda: abort(status))
    answer = client.get("/api/abort")
    title = "Content Too Large" if status == 413 else HTTPStatus(status).phrase
    assert (answer.status_code, answer.content_type) == (status, "application/problem+json")
    body = answer.get_json(force=True)
    assert body.pop("detail")
    assert body == {"type": "about:blank", "title": title, "status": status, "code": code}


@pytest.mark.parametrize("status", [411, 415, 418, 422])
def test_other_error_of_the_client_is_a_bad_request(
    app: Flask, client: FlaskClient, status: int
) -> None:
    app.add_url_rule("/api/abort", "abort", lambda: abort(status))
    answer = client.get("/api/abort")
    assert (answer.status_code, answer.get_json(force=True)["code"]) == (400, "bad_request")


def test_members_and_headers_are_added() -> None:
    problem = Problem(429, "too_fast", "Wait.", headers={"Retry-After": "7"}, reset_time="\u00e4")
    answer = problem.get_response()
    assert answer.headers["Retry-After"] == "7"
    assert answer.get_data(as_text=True) == (
        '{"type":"about:blank","title":"Too Many Requests","status":429,'
        '"detail":"Wait.","code":"too_fast","reset_time":"\u00e4"}\n'
    )


def test_bug_leaks_no_detail_and_is_logged_once_without_the_key(
    failing: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    answer = failing(RuntimeError("it went wrong in here"))
    assert answer.status_code == 500
    assert "in here" not in answer.text
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()[:10]) == (logging.ERROR, "bug in GET")
    assert "RuntimeError: it went wrong in here" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [
        (peewee.OperationalError("gone\nDETAIL: a value"), 503, ["database unavailable: gone"]),
        (peewee.InterfaceError("closed"), 503, ["database unavailable: closed"]),
        (peewee.DataError("a NUL"), 400, []),
        (peewee.IntegrityError("the user was deleted meanwhile"), 400, []),
        (ConnectionResetError(), 400, []),
    ],
)
def test_database_that_is_away_and_a_wrong_value_are_no_bugs(
    failing: Failing,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
    lines: list[str],
) -> None:
    answer = failing(error)
    assert answer.status_code == status
    assert caplog.messages == lines
    assert ("Retry-After" in answer.headers) == (status == 503)


@pytest.mark.parametrize("failing", ["/failing"], indirect=True)
def test_client_that_is_too_slow_gets_408_and_is_no_bug(
    failing: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    assert failing(TimeoutError()).status_code == 408
    assert not caplog.messages


def test_outage_is_logged_once_and_public_endpoints_go_on(
    client: FlaskClient, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with models.database.connection_context():
        models.database.drop_tables([ApiKey])
    for _ in range(3):
        answer = client.get("/api/v1/user/me", headers={"X-API-Key": key})
        assert (answer.status_code, answer.get_json(force=True)["code"]) == (503, "unavailable")
        assert client.get("/api/v1/status").status_code == 200
    assert caplog.messages == ["database unavailable: no such table: api_key"]
