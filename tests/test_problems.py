"""Errors under /api/ are problem+json; a bug is logged in full, and its response leaks nothing."""

import logging
import secrets

import peewee
import pytest
from flask import Flask, Response, abort
from flask.testing import FlaskClient

import models
from models import ApiKey, Outage
from protocol.problems import Problem

BUG = "/api/v1/bug"
SECRET = secrets.token_hex()
TEST = "/api/v1/protected/test"


@pytest.fixture
def app(app: Flask) -> Flask:
    """With two paths that fail, and one that aborts with any status."""

    def fail() -> str:
        raise RuntimeError(f"it was {SECRET}")

    for path in (BUG, "/bug"):
        app.add_url_rule(path, path, fail)
    app.add_url_rule("/api/abort/<int:status>", "abort", lambda status: abort(status))
    return app


@pytest.fixture(autouse=True)
def outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """No outage has been logged yet."""
    monkeypatch.setattr(models, "outage", Outage())


def lose_keys() -> None:
    with models.database.connection_context():
        models.database.drop_tables([ApiKey])


@pytest.mark.parametrize(
    ("status", "title", "code"),
    [
        (400, "Bad Request", "bad_request"),
        (404, "Not Found", "not_found"),
        (405, "Method Not Allowed", "method_not_allowed"),
        (413, "Content Too Large", "content_too_large"),
        (500, "Internal Server Error", "internal_error"),
        (503, "Service Unavailable", "unavailable"),
    ],
)
def test_known_status_has_its_own_code(
    client: FlaskClient, status: int, title: str, code: str
) -> None:
    answer = client.get(f"/api/abort/{status}")
    body = answer.get_json(force=True)
    assert (answer.status_code, answer.content_type) == (status, "application/problem+json")
    assert list(body) == ["type", "title", "status", "detail", "code"]
    assert (body["type"], body["status"], body["code"]) == ("about:blank", status, code)
    assert body["title"] == title


@pytest.mark.parametrize("status", [411, 415, 418, 422])
def test_other_errors_of_the_caller_are_a_bad_request(client: FlaskClient, status: int) -> None:
    answer = client.get(f"/api/abort/{status}")
    assert (answer.status_code, answer.get_json(force=True)["code"]) == (400, "bad_request")


@pytest.mark.parametrize("path", ["/api/", "/api/v1/", "/api/v2/status", "/api/v1/status/"])
def test_no_such_path_is_a_problem(client: FlaskClient, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.get_json(force=True)["code"]) == (404, "not_found")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_wrong_method_lists_the_right_ones(client: FlaskClient, method: str) -> None:
    answer = client.open("/api/v1/status", method=method)
    assert answer.get_json(force=True)["code"] == "method_not_allowed"
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}


@pytest.mark.parametrize("path", ["/api/v1/ws/echo", "/api/v1/ws/time"])
def test_plain_get_on_a_socket_path_asks_for_an_upgrade(client: FlaskClient, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.get_json(force=True)["code"]) == (426, "upgrade_required")
    assert answer.headers["Upgrade"] == "websocket"
    assert answer.headers["Sec-WebSocket-Version"] == "13"


def test_large_body_is_refused_before_it_is_read(client: FlaskClient) -> None:
    answer = client.get("/api/v1/status", data=b"a" * 16_385)
    assert (answer.status_code, answer.get_json(force=True)["code"]) == (413, "content_too_large")


def test_errors_elsewhere_are_pages(client: FlaskClient) -> None:
    answer = client.get("/nowhere")
    assert (answer.status_code, answer.mimetype) == (404, "text/html")


RETRY = {"Retry-After": "7"}


def test_members_and_headers_are_added() -> None:
    answer = answer_of(Problem(429, "rate_limited", "Wait.", headers=RETRY, reset_time="x"))
    assert answer.headers["Retry-After"] == "7"
    assert answer.get_data() == (
        b'{"type":"about:blank","title":"Too Many Requests","status":429,'
        b'"detail":"Wait.","code":"rate_limited","reset_time":"x"}\n'
    )


def answer_of(problem: Problem) -> Response:
    assert isinstance(problem.response, Response)
    return problem.response


# Bugs


def test_bug_leaks_no_detail(client: FlaskClient) -> None:
    answer = client.get(BUG)
    assert answer.status_code == 500
    assert answer.get_json(force=True) == {
        "type": "about:blank",
        "title": "Internal Server Error",
        "status": 500,
        "detail": "Something went wrong on our side.",
        "code": "internal_error",
    }


def test_bug_in_a_page_leaks_no_detail(client: FlaskClient) -> None:
    answer = client.get("/bug")
    assert (answer.status_code, answer.mimetype) == (500, "text/html")
    assert SECRET not in answer.text


@pytest.mark.parametrize("path", [BUG, "/bug"])
def test_bug_is_logged_once_with_its_traceback(
    client: FlaskClient, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    client.get(path)
    assert caplog.record_tuples == [("protocol.problems", logging.ERROR, f"bug in GET {path}")]
    assert f"RuntimeError: it was {SECRET}" in caplog.text


def test_bug_is_logged_without_query_and_headers(
    client: FlaskClient, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.get(BUG, query_string={"api_key": key}, headers={"X-API-Key": key})
    assert "RuntimeError" in caplog.text
    assert key not in caplog.text
    assert "api_key" not in caplog.text


# A database that is unavailable


def test_without_a_database_it_is_unavailable(client: FlaskClient, key: str) -> None:
    lose_keys()
    answer = client.get(TEST, headers={"X-API-Key": key})
    assert (answer.status_code, answer.get_json(force=True)["code"]) == (503, "unavailable")
    assert int(answer.headers["Retry-After"]) >= 1


def test_missing_database_is_logged_once_and_not_per_request(
    client: FlaskClient, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    lose_keys()
    for _ in range(3):
        client.get(TEST, headers={"X-API-Key": key})
    assert [record.getMessage() for record in caplog.records] == [
        "database unavailable: no such table: api_key"
    ]


def test_without_a_database_public_endpoints_go_on(client: FlaskClient) -> None:
    lose_keys()
    assert client.get("/api/v1/status").status_code == 200
    assert client.get("/api/v1/demo/year").status_code == 200


@pytest.mark.parametrize("error", [peewee.DataError, peewee.IntegrityError])
def test_value_that_the_database_refuses_is_no_outage(
    app: Flask, client: FlaskClient, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    def fail() -> str:
        raise error("refused")

    app.add_url_rule("/api/refused", "refused", fail)
    assert client.get("/api/refused").status_code == 400
    assert not caplog.records
