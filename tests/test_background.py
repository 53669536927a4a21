"""A sync that fails is tried again, and logged when it fails twice."""

import sqlite3
from contextlib import closing

import pytest
from flask.testing import FlaskClient

from rows import row
from server import background as module
from server.background import Background
from services import Services
from settings import Settings
from storage.outage import Outage


def test_sync_that_fails_once_is_not_logged_but_twice_is(
    services: Services,
    config: Settings,
    client: FlaskClient,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A single failure may be a lock that a command holds."""
    monkeypatch.setattr(module, "outage", Outage())  # none has been logged yet
    background = Background(services)
    with closing(sqlite3.connect(config.database_url, isolation_level=None)) as other:
        for failures, lines in [(1, 0), (1, 0), (2, 1)]:
            client.get("/api/v1/usage/stats", headers={"X-API-Key": key})
            other.execute("BEGIN IMMEDIATE")
            for _ in range(failures):
                background.sync()
            other.execute("ROLLBACK")
            background.sync()
            assert caplog.messages == ["database unavailable: database is locked"] * lines
    assert row(key).total == 3
