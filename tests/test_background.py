"""Each sync saves counts, forgets keys, closes sockets that have ended, and logs outages once."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from unittest import mock

import pytest
from flask import Flask
from flask.testing import FlaskClient

import models
from conftest import NewKey
from protocol.websocket import Close, WebSocket
from rows import change, row
from server import background as module
from server.background import Background
from services import Services
from settings import Settings
from storage.outage import Outage

STATS = "/api/v1/usage/stats"


@pytest.fixture
def background(services: Services, monkeypatch: pytest.MonkeyPatch) -> Background:
    """As it is at the start: no outage has been logged."""
    monkeypatch.setattr(module, "outage", Outage())
    return Background(services)


@pytest.fixture
def another(config: Settings, app: Flask) -> Iterator[sqlite3.Connection]:
    """Another program's connection to the same database."""
    with closing(sqlite3.connect(config.database_url, isolation_level=None)) as connection:
        yield connection


Ask = Callable[[str], int]


@pytest.fixture
def ask(client: FlaskClient) -> Ask:
    """Asks for the usage of a key; returns the status."""
    return lambda key: client.get(STATS, headers={"X-API-Key": key}).status_code


# Counts


# Changes made elsewhere


@pytest.mark.parametrize(
    "by_hand", ["DELETE FROM api_key", "DELETE FROM user", "UPDATE api_key SET digest = ''"]
)
def test_row_changed_by_hand_counts_although_the_file_is_locked(
    background: Background, ask: Ask, key: str, another: sqlite3.Connection, by_hand: str
) -> None:
    assert ask(key) == 200
    another.execute(by_hand)
    another.execute("BEGIN IMMEDIATE")
    background.sync()
    assert ask(key) == 401


# Sockets


def test_sockets_of_an_ended_key_are_closed_although_the_file_is_locked(
    background: Background,
    services: Services,
    new_key: NewKey,
    ask: Ask,
    another: sqlite3.Connection,
) -> None:
    _, changed, revoked, expired = keys = [new_key() for _ in range(4)]
    sockets = {mock.Mock(WebSocket): key[8:16] for key in keys}
    services.sockets.open.update(sockets)
    change(changed, tier="pro", expires_at=models.now() + 60)
    change(revoked, revoked_at=1)
    change(expired, expires_at=models.now())
    ask(keys[0])
    another.execute("BEGIN IMMEDIATE")  # so the request cannot be saved
    background.sync()
    closed = [mock.call(Close.REVOKED)]
    assert [ws.interrupt.mock_calls for ws in sockets] == [[], [], closed, closed]


# Outages


def test_sync_that_fails_once_is_not_logged_but_twice_is(
    background: Background,
    ask: Ask,
    key: str,
    another: sqlite3.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for failures, lines in [(1, 0), (1, 0), (2, 1)]:
        ask(key)
        another.execute("BEGIN IMMEDIATE")
        for _ in range(failures):
            background.sync()
        another.execute("ROLLBACK")
        background.sync()
        assert caplog.messages == ["database unavailable: database is locked"] * lines
    assert row(key).total == 3
