"""The web application: where people sign up, make keys and try the API."""

from __future__ import annotations

from flask import Flask, Request
from flask.sessions import SecureCookieSession, SecureCookieSessionInterface


class PageSessions(SecureCookieSessionInterface):
    """Opens the session for pages only: the API has no use for it, and it costs a tenth."""

    def open_session(self, app: Flask, request: Request) -> SecureCookieSession | None:
        return None if request.path.startswith("/api/") else super().open_session(app, request)


def register(app: Flask) -> None:
    app.session_interface = PageSessions()
