"""The web application: where people sign up, make keys and try the API."""

import json
from contextlib import suppress

from flask import Blueprint, Response, after_this_request, g, redirect, render_template, request
from flask.typing import ResponseReturnValue
from peewee import PeeweeException
from werkzeug.exceptions import HTTPException

import models
from http_api.headers import is_api
from http_api.problems import title_of
from http_api.timestamps import date_time, display
from ratelimit import UNIT_NAMES
from service import Service, current_service
from settings import HERE
from web import keys, profile, sessions
from web.forms import receive_form
from web.sessions import redirect_to

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


def register(app: Service) -> None:
    """Add the pages, their style sheet and script, and what protects them."""
    app.session_interface = sessions.PageSessions()
    # Ports share cookies, so other programs on localhost may have one that is named `session`.
    app.config.update(SESSION_COOKIE_NAME="demo_service", SESSION_COOKIE_SAMESITE="Lax")
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.filters |= {"number": "{:,}".format, "date_time": date_time, "display": display}
    app.jinja_env.globals |= {"models": models, "settings": app.settings, "units": UNIT_NAMES}
    for name in ("openapi", "asyncapi"):  # of which the console is made
        app.jinja_env.globals[name] = json.loads((HERE / "docs" / f"{name}.json").read_text())
    app.register_blueprint(bp)


@bp.get("/")
def console() -> str:
    return render_template("console.html")


@bp.before_request
def before_page() -> None:
    """Check the form, and find out who is logged in, before a view is called."""
    receive_form()
    sessions.load_user()
    if request.method == "POST":  # but not after one that was refused: anybody can send those
        after_this_request(clear_cache)


def clear_cache(response: Response) -> Response:
    """Let a change of a key hold from the next request on; so each change is a POST of a page."""
    current_service.store.clear_cache()
    return response


@bp.after_app_request
def add_security_headers(response: Response) -> Response:
    """The API has headers of its own."""
    if is_api(request.path):
        return response
    response.headers.pop("Last-Modified", None)  # dates of conditional requests are ignored
    response.headers.update(SECURITY_HEADERS)
    if request.is_secure:  # for a year, and for this host only
        response.headers["Strict-Transport-Security"] = "max-age=31536000"
    if response.mimetype == "text/html":
        response.headers["Cache-Control"] = "no-store"
    return response


@bp.errorhandler(models.Changed)
def nothing_was_changed(error: models.Changed) -> ResponseReturnValue:
    """Say so on the page with the keys, or to log in, if the account itself was changed."""
    with suppress(PeeweeException):  # an error here would be a bug, and not a 503
        sessions.load_user()
    page = "web.keys.security" if g.user else "web.sessions.log_in_form"
    return redirect_to(page, str(error))


def error_page(error: HTTPException) -> ResponseReturnValue:
    """An error in the pages' layout."""
    # A GET of a form's address: the user has reloaded the response to the form. The tab that it
    # belongs to is /settings/profile or /settings/security.
    if error.code == 405 and request.method == "GET" and request.path.startswith("/settings"):
        return redirect("/".join(request.path.split("/")[:3]), 303)
    # For a path that does not exist, the user is not loaded yet. If the database has just failed,
    # another query might take as long again.
    if "user" not in g and error.code != 503:
        with suppress(PeeweeException):
            sessions.load_user()
    response = error.get_response()
    response.set_data(
        render_template(
            "error.html", error=error, response=response, phrase=title_of(error.code or 500)
        )
    )
    return response
