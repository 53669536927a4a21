"""Each sync saves counts, forgets keys, closes sockets that have ended, and logs outages once."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import cast

import pytest
from flask import Flask
from flask.testing import FlaskClient

import auth
import models
from conftest import NewKey
from models import ApiKey
from protocol.websocket import Close, WebSocket
from server import background as module
from server.background import Background
from settings import Settings
from storage.outage import Outage

STATS = "/api/v1/usage/stats"


@pytest.fixture
def background(app: Flask, monkeypatch: pytest.MonkeyPatch) -> Background:
    """As it is at the start: no outage has been logged."""
    monkeypatch.setattr(module, "outage", Outage())
    found: Background = app.extensions["background"]
    return found


@pytest.fixture
def another(config: Settings, app: Flask) -> Iterator[sqlite3.Connection]:
    """Another program's connection to the same database."""
    with closing(sqlite3.connect(config.database_url, isolation_level=None)) as connection:
        yield connection


@pytest.fixture
def ask(client: FlaskClient) -> Callable[[str], int]:
    """Asks for the usage of a key; returns the status."""
    return lambda key: client.get(STATS, headers={"X-API-Key": key}).status_code


Ask = Callable[[str], int]


def change(key: str, **columns: object) -> None:
    """As `flask key ...` does in another process."""
    with models.database.connection_context():
        assert auth.change_key(key[8:16], **columns)


def total(key: str) -> int:
    with models.database.connection_context():
        stored: int = ApiKey.get_by_id(key[8:16]).total
    return stored


# Counts


def test_counts_are_saved_by_a_sync_and_not_by_their_requests(
    background: Background, ask: Ask, key: str
) -> None:
    ask(key)
    ask(key)
    assert total(key) == 0
    background.sync()
    background.sync()
    assert total(key) == 2


# Changes made elsewhere


@pytest.mark.parametrize(
    "by_hand",
    ["DELETE FROM api_key", "DELETE FROM user", "UPDATE api_key SET digest = ''"],
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


class OpenSocket:
    """Stands in for a WebSocket, and keeps the code with which it was interrupted."""

    code: int | None = None

    def interrupt(self, code: int) -> None:
        self.code = code


@pytest.fixture
def open_socket(app: Flask) -> Callable[[str], OpenSocket]:
    """Opens a time socket of a key."""

    def open_one(key: str) -> OpenSocket:
        ws = OpenSocket()
        app.extensions["sockets"].key_ids[cast(WebSocket, ws)] = key[8:16]
        return ws

    return open_one


def test_sockets_of_an_ended_key_are_closed_and_no_others(
    background: Background, open_socket: Callable[[str], OpenSocket], new_key: NewKey
) -> None:
    _, changed, revoked, expired = keys = [new_key() for _ in range(4)]
    sockets = [open_socket(key) for key in keys]
    change(changed, tier="pro", expires_at=models.now() + 60)
    change(revoked, revoked_at=1)
    change(expired, expires_at=models.now())
    background.sync()
    assert [ws.code for ws in sockets] == [None, None, Close.REVOKED, Close.REVOKED]


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
    assert total(key) == 3
