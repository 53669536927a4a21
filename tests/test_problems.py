"""What views raise and return: problems and JSON under /api/, pages elsewhere; bugs are logged."""

from unittest import mock

import peewee
import pytest
from flask import Flask, abort
from flask.testing import FlaskClient

import models
from storage import outage


@pytest.mark.parametrize("path", ["/api/failing", "/failing"])
@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (peewee.DataError("a NUL"), 400, ""),
        (ConnectionResetError(), 400, ""),
        (peewee.OperationalError("gone\nDETAIL: a value"), 503, "database unavailable: gone"),
        (peewee.InterfaceError("cursor already closed"), 503, "database unavailable: cursor"),
        (peewee.IntegrityError("UNIQUE"), 500, "bug in GET"),
    ],
)
def test_only_what_is_a_bug_is_logged_as_one(
    app: Flask,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    error: Exception,
    status: int,
    line: str,
) -> None:
    monkeypatch.setattr(outage.log, "filters", [])
    view = mock.Mock(side_effect=error)
    app.add_url_rule(path, path, lambda: view())
    answer = app.test_client().get(path)
    assert answer.status_code == status
    assert ("Retry-After" in answer.headers) == (status == 503)
    assert "".join(caplog.messages).startswith(line)
    assert bool(caplog.messages) == bool(line)


def test_query_without_a_connection_is_a_bug_whose_log_says_what_to_do(
    app: Flask, client: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    app.add_url_rule("/api/count", "count", lambda: {"users": models.User.select().count()})
    assert client.get("/api/count").status_code == 500
    assert "bug in GET /api/count: query the database inside `with models" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("status", "title", "code"),
    [
        (400, "Bad Request", "bad_request"),
        (404, "Not Found", "not_found"),
        (409, "Conflict", "conflict"),
        (418, "I'm a teapot", "i'm_a_teapot"),
        (503, "Service Unavailable", "unavailable"),
    ],
)
def test_any_abort_is_a_problem_with_the_words_of_the_view(
    app: Flask, client: FlaskClient, status: int, title: str, code: str
) -> None:
    app.add_url_rule("/api/aborting", "aborting", lambda: abort(status, "Not on Mondays."))
    app.add_url_rule("/api/plain", "plain", lambda: abort(400))
    answer = client.get("/api/aborting")
    assert (answer.status_code, answer.mimetype) == (status, "application/problem+json")
    words = {"type": "about:blank", "title": title, "status": status, "code": code}
    assert answer.get_json(force=True) == words | {"detail": "Not on Mondays."}
    detail = client.get("/api/plain").get_json(force=True)["detail"]
    assert detail == "The request could not be understood."


def test_a_bug_is_logged_and_leaks_nothing(
    app: Flask, client: FlaskClient, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    app.add_url_rule("/api/bug", "bug", lambda: str(1 / 0))
    answer = client.get("/api/bug?api_key=secret&q=private", headers={"X-API-Key": key})
    body = answer.get_json(force=True)
    assert (answer.status_code, body["code"]) == (500, "internal_error")
    assert body["detail"] == "Something went wrong on our side."
    assert "Traceback" in caplog.text
    assert "/api/bug" in caplog.text
    assert not any(word in caplog.text for word in ("secret", "private", key))
