"""What Flask's users know works here as in plain Flask."""

import uuid
from datetime import datetime, timezone

import pytest
from flask import Flask, url_for
from flask.testing import FlaskClient

from paths import ECHO, STATUS

UPGRADE = {"Upgrade": "websocket", "Connection": "Upgrade"}
VALUES = {"id": uuid.UUID(int=7), "at": datetime(2026, 11, 21, tzinfo=timezone.utc)}


@pytest.mark.parametrize("base", ["http://localhost", "https://example.com:8443", "http://[::1]:1"])
def test_external_url_names_the_host_that_was_asked(app: Flask, base: str) -> None:
    for path, headers in ((STATUS, {}), (ECHO, UPGRADE)):
        with app.test_request_context(path, base_url=base, headers=headers):
            assert url_for("api.status", _external=True) == base + STATUS


def test_missing_slash_is_a_redirect_that_keeps_the_query(app: Flask, client: FlaskClient) -> None:
    app.add_url_rule("/folder/", "folder", str)
    location = client.get("/folder?a=b", base_url="https://example.com").headers["Location"]
    assert location == "https://example.com/folder/?a=b"


def test_json_takes_what_flask_takes(app: Flask, client: FlaskClient) -> None:
    app.add_url_rule("/values", "values", lambda: VALUES)
    written = {"id": str(VALUES["id"]), "at": "Sat, 21 Nov 2026 00:00:00 GMT"}
    assert client.get("/values").get_json() == written
