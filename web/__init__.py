"""The web application: where people sign up, make keys and try the API."""

import json
import re
from contextlib import suppress

from flask import Blueprint, Flask, Request, Response, g, render_template, request
from flask.sessions import SecureCookieSession, SecureCookieSessionInterface
from flask.typing import ResponseReturnValue
from peewee import PeeweeException
from werkzeug.exceptions import HTTPException

import models
from ratelimit import UNIT_NAMES
from rest.problems import is_api
from rest.timestamps import date_time, display
from service import Service
from settings import HERE
from web import keys, profile, sessions
from web.forms import receive_form

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    # Not no-referrer: with that, browsers make the Origin of our own forms "null".
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}

bp = Blueprint("web", __name__, template_folder="templates")
for part in (sessions, profile, keys):
    bp.register_blueprint(part.bp)


class PageSessions(SecureCookieSessionInterface):
    """Opens the session for pages only: the API needs none."""

    def open_session(self, app: Flask, request: Request) -> SecureCookieSession | None:
        if is_api():
            return None
        # Leave only our cookie: the time that werkzeug's parser takes may grow with the square of
        # what others contain. gunicorn joins several headers with a comma.
        name = f"{self.get_cookie_name(app)}="
        ours = rf"(?:^|[;,])[ \t]*{name}([A-Za-z0-9_.-]+)"
        found = re.search(ours, request.environ.get("HTTP_COOKIE", ""))
        request.environ["HTTP_COOKIE"] = name + found[1] if found else ""
        return super().open_session(app, request)

    def get_cookie_secure(self, app: Flask) -> bool:
        return request.is_secure


def register(app: Service) -> None:
    """Add the pages, their style sheet and script, and what protects them."""
    app.session_interface = PageSessions()
    # Ports share cookies, so other programs on localhost may have one that is named `session`.
    app.config.update(SESSION_COOKIE_NAME="demo_service", SESSION_COOKIE_SAMESITE="Lax")
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    filters = {"number": "{:,}".format, "date_time": date_time, "display": display}
    app.jinja_env.filters |= filters
    app.jinja_env.globals |= {"models": models, "settings": app.settings, "units": UNIT_NAMES}
    for name in ("openapi", "asyncapi"):  # of which the console is made
        app.jinja_env.globals[name] = json.loads((HERE / "docs" / f"{name}.json").read_text())
    app.register_blueprint(bp)


@bp.get("/")
def console() -> str:
    return render_template("console.html")


@bp.before_request
def prepare() -> None:
    """Check the form, and find out who is logged in, before a view is called."""
    receive_form()
    sessions.load_user()


@bp.after_app_request
def finish(response: Response) -> Response:
    """Add security headers to everything but the API."""
    if is_api():
        return response
    response.headers.update(SECURITY_HEADERS)
    if request.is_secure:  # for a year, and for this host only
        response.headers["Strict-Transport-Security"] = "max-age=31536000"
    if response.mimetype == "text/html":
        response.headers["Cache-Control"] = "no-store"
    return response


def error_page(error: HTTPException) -> ResponseReturnValue:
    """An error in the pages' layout."""
    # For a path that does not exist, nobody has asked yet who is logged in. If the database has
    # just failed, to ask again might take as long again.
    if "user" not in g and error.code != 503:
        with suppress(PeeweeException):
            sessions.load_user()
    response = error.get_response()
    response.set_data(render_template("error.html", error=error, response=response))
    return response
