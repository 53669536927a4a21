"""The life of keys on a real server: what the database says counts within two seconds."""

import contextlib
import secrets
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import auth
import models
from conftest import StartServer
from rawsocket import CLOSE, RawSocket
from serving import Server, eventually

TEST, TIME = "/api/v1/protected/test", "/api/v1/ws/time"
NOTICED_SECONDS = 2


def edit(database: Path, sql: str, **values: object) -> None:
    """Change the database by hand, without the checks of the service."""
    with contextlib.closing(sqlite3.connect(database, timeout=10)) as connection, connection:
        connection.execute(sql, values)


def status(server: Server, key: str) -> int:
    with RawSocket(server.port) as client:
        return client.request(TEST, X_API_Key=key).status


@contextlib.contextmanager
def stream(server: Server, key: str) -> Iterator[RawSocket]:
    """A time socket of this key."""
    with RawSocket(server.port) as client:
        yield client.open(f"{TIME}?api_key={key}")


def close_code(client: RawSocket, by: float) -> int:
    """Read on until the server closes the socket; fails if it is open after that time."""
    while (frame := client.frame()).opcode != CLOSE:
        assert time.time() < by, "the socket is still open"
    return frame.close_code


BY_HAND = {
    "deleted key": "DELETE FROM api_key WHERE id = :id",
    "expired key": "UPDATE api_key SET expires_at = 1 WHERE id = :id",
    "revoked key": "UPDATE api_key SET revoked_at = 1 WHERE id = :id",
    "deleted user": "DELETE FROM user WHERE id = (SELECT user_id FROM api_key WHERE id = :id)",
}


class Owner(NamedTuple):
    """A user with one key."""

    name: str
    key: str

    @property
    def id(self) -> str:
        return self.key[8:16]


def insert_owner(database: Path) -> Owner:
    """Insert a user with a key; the command line would take a second."""
    name, key_id = f"owner-{secrets.token_hex(4)}", secrets.token_hex(4)
    key = f"{models.PREFIXES['production']}{key_id}_{secrets.token_hex(16)}"
    key += auth.checksum(key)
    user = "INSERT INTO user (username, email, password_hash, created_at) VALUES (:n, :n, '', 0)"
    edit(database, user, n=name)
    row = """INSERT INTO api_key
        (id, user_id, name, type, tier, digest, created_at, total, reset, used)
        SELECT :id, id, 'ci', 'production', 'free', :digest, 0, 0, 0, 0 FROM user
        WHERE username = :n"""
    edit(database, row, id=key_id, digest=auth.digest(key), n=name)
    return Owner(name, key)


@pytest.fixture
def owner(server: Server) -> Owner:
    return insert_owner(server.database)


@pytest.mark.parametrize("sql", BY_HAND.values(), ids=BY_HAND)
def test_key_that_is_ended_by_hand_is_bad_within_two_seconds(
    server: Server, owner: Owner, sql: str
) -> None:
    with stream(server, owner.key) as client:
        assert status(server, owner.key) == 200
        edit(server.database, sql, id=owner.id)
        by = time.time() + NOTICED_SECONDS
        eventually(lambda: status(server, owner.key) == 401, NOTICED_SECONDS)
        assert close_code(client, by) == 1008


def test_key_whose_secret_is_changed_by_hand_is_bad_within_two_seconds(
    server: Server, owner: Owner
) -> None:
    assert status(server, owner.key) == 200
    edit(server.database, "UPDATE api_key SET digest = 'none' WHERE id = :id", id=owner.id)
    eventually(lambda: status(server, owner.key) == 401, NOTICED_SECONDS)


def test_tier_that_is_changed_by_hand_counts_within_two_seconds(
    server: Server, owner: Owner
) -> None:
    def tier() -> object:
        with RawSocket(server.port) as client:
            return client.request(TEST, X_API_Key=owner.key).json()["rate_limit_tier"]

    assert tier() == "free"
    edit(server.database, "UPDATE api_key SET tier = 'pro' WHERE id = :id", id=owner.id)
    eventually(lambda: tier() == "pro", NOTICED_SECONDS)


def test_usage_that_is_changed_by_hand_counts_within_two_seconds(
    server: Server, owner: Owner
) -> None:
    assert status(server, owner.key) == 200
    sql = "UPDATE api_key SET used = 1000 WHERE id = :id"

    def used_up() -> bool:
        edit(server.database, sql, id=owner.id)  # again, because a save may come in between
        return status(server, owner.key) == 429

    eventually(used_up, NOTICED_SECONDS)


def test_deleted_user_loses_keys_and_streams_within_two_seconds(
    server: Server, owner: Owner
) -> None:
    with stream(server, owner.key) as client:
        assert status(server, owner.key) == 200
        server.flask("user", "delete", owner.name)
        by = time.time() + NOTICED_SECONDS
        eventually(lambda: status(server, owner.key) == 401, NOTICED_SECONDS)
        assert close_code(client, by) == 1008


def test_restored_file_counts_within_two_seconds(start_server: StartServer) -> None:
    server = start_server()
    lost, kept = (insert_owner(server.database).key for _ in range(2))
    backup = server.directory / "backup.db"
    with (
        contextlib.closing(sqlite3.connect(server.database)) as connection,
        contextlib.closing(sqlite3.connect(backup)) as copy,
    ):
        connection.backup(copy)
    edit(backup, "DELETE FROM api_key WHERE id = :id", id=lost[8:16])
    assert status(server, lost) == 200

    server.database.rename(server.directory / "old.db")
    for end in ("-wal", "-shm"):
        Path(f"{server.database}{end}").unlink(missing_ok=True)
    backup.rename(server.database)
    eventually(lambda: status(server, lost) == 401, NOTICED_SECONDS)
    assert status(server, kept) == 200


def test_rotated_key_ends_on_time_even_after_a_restart(start_server: StartServer) -> None:
    server = start_server()
    old = insert_owner(server.database).key
    new = server.flask("key", "rotate", old[8:16], "--grace", "1h").strip()
    server.stop()
    server.restart()
    with stream(server, old) as client, stream(server, new):
        assert (status(server, old), status(server, new)) == (200, 200)
        end = int(time.time()) + 2  # an hour is too long for a test
        edit(server.database, "UPDATE api_key SET expires_at = :end WHERE expires_at > 0", end=end)
        assert close_code(client, end + NOTICED_SECONDS) == 1008
        assert time.time() >= end
        assert (status(server, old), status(server, new)) == (401, 200)
