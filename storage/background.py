"""Twice a second: saves counts, forgets keys after changes, closes the sockets of ended keys."""

import gevent
from flask import Flask
from gevent.event import Event

import models
from ratelimit import Usage
from storage.postgres import DELETE_HOURS, Postgres
from storage.sqlite import SqliteStore

SYNC_SECONDS = 0.5


class Background:
    """Keeps memory and database in step."""

    def __init__(self, app: Flask) -> None:
        self._guard, self._sockets = app.extensions["guard"], app.extensions["sockets"]
        config = app.extensions["settings"]
        self._store: SqliteStore | PostgresStore = (
            PostgresStore(config.postgres) if config.postgres else SqliteStore(config.sqlite)
        )
        self.stopping = Event()

    def run(self) -> None:
        """Sync until `stopping`, and then until everything is saved; then close the database."""
        self._store.open()
        while not self.stopping.wait(SYNC_SECONDS):
            self.sync()
        while self._guard.limiter.unsaved() and not self.sync():
            gevent.sleep(0.1)
        models.database.close_all()
        self._store.close()

    def sync(self) -> bool:
        """Save the counts and act on what the database says; False if that failed."""
        spent = self._guard.limiter.unsaved()
        try:
            ended, changed = self._store.exchange(spent, self._sockets.keys())
        except Exception as error:
            models.outage.note(error)
            return False
        models.outage.note(None)
        self._guard.limiter.saved()
        self._guard.refresh(changed)
        self._sockets.revoke(ended)
        return True


class PostgresStore:
    """What the background asks of PostgreSQL, which makes only its own greenlet wait."""

    def __init__(self, url: str) -> None:
        self._database = Postgres(url, connections=1)

    def open(self) -> None:
        """Nothing is to be locked: any number of processes may serve."""

    def close(self) -> None:
        self._database.close_all()

    def exchange(self, spent: dict[str, Usage], keys: set[str]) -> tuple[set[str], bool]:
        """As SqliteStore.exchange; there is never a count to save, and always a change."""
        with self._database.connection_context():
            self._database.execute_sql(DELETE_HOURS)
            return models.ended_keys(keys, self._database), True
