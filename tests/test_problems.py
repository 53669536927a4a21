"""What views raise and return: problems and JSON under /api/, pages elsewhere; bugs are logged."""

import sqlite3
from collections.abc import Callable
from typing import NoReturn
from unittest import mock

import peewee
import psycopg
import pytest
import werkzeug.exceptions
from flask import Flask, abort
from flask.testing import FlaskClient

from helpers.clock import NOON, Clock
from ratelimit import Usage, parse_quotas
from service.application import current_service
from service.responses import Problem, rate_limited
from storage import outage


def in_postgresql(kind: type[psycopg.Error]) -> Exception:
    return peewee.ProgrammingError(error := kind("no x"), *error.args)


def in_sqlite(code: int) -> Exception:
    error = sqlite3.OperationalError("no x")
    error.sqlite_errorcode = code
    return peewee.OperationalError(error, "no x")


@pytest.mark.parametrize("path", ["/api/failing", "/failing"])
@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (peewee.DataError("a NUL"), 400, ""),
        (peewee.DataError("too long"), 500, "bug in GET"),
        (ConnectionRefusedError("of another service"), 500, "bug in GET"),
        (TimeoutError("of another service"), 500, "bug in GET"),
        (peewee.OperationalError("gone\nDETAIL: private"), 503, "database unavailable: gone"),
        (peewee.InterfaceError("cursor already closed"), 500, "bug in GET"),
        (peewee.IntegrityError("UNIQUE"), 500, "bug in GET"),
        (in_postgresql(psycopg.errors.UndefinedColumn), 500, "bug in GET"),
        (in_postgresql(psycopg.errors.UndefinedFunction), 500, "bug in GET"),
        (in_postgresql(psycopg.errors.SyntaxError), 500, "bug in GET"),
        (in_postgresql(psycopg.errors.UndefinedTable), 500, "bug in GET"),
        (in_postgresql(psycopg.errors.ReadOnlySqlTransaction), 503, "database unavailable: no x"),
        (in_postgresql(psycopg.errors.InsufficientPrivilege), 503, "database unavailable: no x"),
        (in_postgresql(psycopg.errors.DivisionByZero), 500, "bug in GET"),
        # What happens to the file, its locks, the disk and the memory; with a detail, as SQLite
        # adds one.
        *(
            (in_sqlite(code | 2 << 8), 503, "database unavailable: no x")
            for code in (3, 5, 6, 7, 8, 10, 11, 13, 14, 15, 26)
        ),
        *((in_sqlite(code), 500, "bug in GET") for code in (1, 2, 12, 18, 19, 20, 21, 25)),
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
    app.add_url_rule(path, path, lambda: mock.Mock(side_effect=error)())
    answer = app.test_client().get(f"{path}?api_key=private")
    assert (answer.status_code, answer.headers.get("Retry-After", "")) == (
        status,
        "1" if status == 503 else "",
    ), "see is_outage and SQLITE_OUTAGES"
    assert "".join(caplog.messages).startswith(line), f"{error!r} is logged otherwise: see register"
    assert {"logged": bool(caplog.messages), "with traceback": "Traceback" in caplog.text} == {
        "logged": bool(line),
        "with traceback": status == 500,
    }, "a bug is logged with its traceback, an outage in one line: see register in responses.py"
    assert "private" not in caplog.text, "log reason_of(error), and no query"
    assert not [text for text in ("private", *map(str, error.args)) if text in answer.text], (
        "the client sees this of an error in the service: see internal_error, database_error"
    )


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT no_column FROM api_key",
        "SELECT no_function(1)",
        "SELCT 1",
        "SELECT (1",
        "INSERT INTO user (no_column) VALUES (1)",
        "SELECT 1; SELECT 2",
        "SELECT ?",
        "SELECT json('malformed')",
        "SELECT 1 FROM no_table",
    ],
)
def test_query_with_a_mistake_is_a_bug(app: Flask, client: FlaskClient, sql: str) -> None:
    app.add_url_rule("/api/wrong", "wrong", lambda: current_service().store._query(sql))
    assert client.get("/api/wrong").status_code == 500, (
        f"{sql} is a mistake, and no outage: see is_outage in storage/outage.py"
    )


@pytest.mark.parametrize("abort", [abort, werkzeug.exceptions.abort], ids=["flask", "werkzeug"])
def test_any_abort_is_a_problem_with_the_words_of_the_view(
    app: Flask, client: FlaskClient, abort: Callable[..., NoReturn]
) -> None:
    @app.get("/api/aborting/<int:status>")
    @app.get("/apis/api/aborting/<int:status>")  # a page, which is not under /api/
    def aborting(status: int) -> NoReturn:
        abort(status, "Not on Mondays.")

    for status in werkzeug.exceptions.default_exceptions.keys() - {405, 416}:
        answer = client.get(f"/api/aborting/{status}")
        assert (answer.status_code, answer.mimetype) == (status, "application/problem+json"), (
            f"abort({status}) under /api/ is no problem: see problem_response in responses.py"
        )
        assert answer.json == Problem(status, detail="Not on Mondays.").get_response().json, (
            f"abort({status}) and Problem({status}) differ: see problem_response, DEFAULTS"
        )
        page = client.get(f"/apis/api/aborting/{status}")
        assert (page.status_code, page.mimetype) == (status, "text/html"), "see is_api"
        assert "Not on Mondays." in page.text


@pytest.mark.parametrize(
    ("status", "title", "code"),
    [
        (400, "Bad Request", "bad_request"),
        (405, "Method Not Allowed", "method_not_allowed"),
        (409, "Conflict", "conflict"),
        (416, "Requested Range Not Satisfiable", "requested_range_not_satisfiable"),
        (418, "I'm a teapot", "i'm_a_teapot"),
        (499, "Error 499", "error_499"),
        (500, "Internal Server Error", "internal_error"),
        (503, "Service Unavailable", "unavailable"),
        (507, "Insufficient Storage", "insufficient_storage"),
    ],
)
def test_problem_may_have_any_status(
    app: Flask, client: FlaskClient, status: int, title: str, code: str
) -> None:
    app.add_url_rule(
        "/api/raising",
        "raising",
        lambda: mock.Mock(side_effect=Problem(status, detail="Not on Mondays."))(),
    )
    answer = client.get("/api/raising")
    assert (answer.status_code, answer.get_json(force=True)) == (
        status,
        {
            "type": "about:blank",
            "title": title,
            "status": status,
            "detail": "Not on Mondays.",
            "code": code,
        },
    )


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("1/second", "1 request per second"),
        ("2/minute", "2 requests per minute"),
        ("1000/hour", "1,000 requests per hour"),
    ],
)
def test_limit_is_told_in_words(limit: str, words: str) -> None:
    assert (
        rate_limited(
            Usage().allowance(parse_quotas(f"free={limit}")["free"], NOON, accepted=False)
        ).description
        == f"The limit of {words} is used up."
    ), "edit rate_limited"


def test_outage_is_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outage, "_quiet_until", {})
    monkeypatch.setattr(outage, "time", clock := Clock())
    for clock.now in range(NOON, NOON + 180):
        outage.log_outage(peewee.OperationalError(f"no {clock.now}"))
        outage.log.error("could not save %s", clock.now)
    assert caplog.messages == [
        line
        for minute in range(NOON, NOON + 180, 60)
        for line in (f"database unavailable: no {minute}", f"could not save {minute}")
    ], "each template of a line once a minute: see once_per_minute"
