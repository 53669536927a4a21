"""The web application: where people sign up, make keys and try the API."""

import re
from contextlib import suppress
from urllib.parse import parse_qsl

import gevent
from flask import Blueprint, Flask, Request, Response, g, render_template, request
from flask.sessions import SecureCookieSession, SecureCookieSessionInterface
from flask.typing import ResponseReturnValue
from peewee import PeeweeException
from werkzeug.datastructures import ImmutableMultiDict
from werkzeug.exceptions import HTTPException, RequestTimeout, abort

import models
from protocol.problems import is_api
from protocol.timestamps import date_time, display, or_as_it_is
from ratelimit import UNITS
from web import people, profile

FORM_SECONDS = 10  # for a form to arrive, in total
MAX_FIELDS = 20  # of a form
FORM_TYPE = "application/x-www-form-urlencoded"
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    # Not no-referrer: with that, browsers make the Origin of our own forms "null".
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}

pages = Blueprint("web", __name__, template_folder="templates")
pages.register_blueprint(people.pages)
pages.register_blueprint(profile.pages)


class PageSessions(SecureCookieSessionInterface):
    """Opens the session for pages only: the API needs none, and it takes 10 % of a request."""

    def open_session(self, app: Flask, request: Request) -> SecureCookieSession | None:
        if is_api():
            return None
        # Leave only our cookie: the time that werkzeug's parser takes may grow with the square of
        # what others contain. What has to precede the name is looked at once the name is found,
        # which is sixty times faster. gunicorn joins several headers with a comma.
        name = f"{self.get_cookie_name(app)}="
        ours = rf"{name}(?<![^;, \t]{name})([A-Za-z0-9_.-]+)"
        found = re.search(ours, request.environ.get("HTTP_COOKIE", ""))
        request.environ["HTTP_COOKIE"] = name + found[1] if found else ""
        return super().open_session(app, request)

    def get_cookie_secure(self, app: Flask) -> bool:
        return request.is_secure


def register(app: Flask) -> None:
    """Add the pages, their style sheet and script, and what protects them."""
    app.session_interface = PageSessions()
    app.config["SESSION_COOKIE_SAMESITE"] = "Lax"
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    times = {"date_time": or_as_it_is(date_time), "display": or_as_it_is(display)}
    app.jinja_env.filters |= {"number": "{:,}".format, **times}
    units = {seconds: unit for unit, seconds in UNITS.items()}
    settings = app.extensions["services"].settings
    app.jinja_env.globals |= {"models": models, "settings": settings, "units": units}
    app.register_blueprint(pages)


@pages.get("/")
def console() -> str:
    return render_template("console.html")


@pages.before_request
def prepare() -> None:
    """Check the form, and find out who is logged in, before a view is called."""
    receive_form()
    people.recognize()


def receive_form() -> None:
    """Read a form; refuse one that another site sent, or that is slow or incomplete.

    It is parsed here, because werkzeug would parse multipart forms and the type's parameters, too.
    """
    request.form = ImmutableMultiDict()
    if request.method != "POST":
        return
    if not sent_from_here():
        abort(403, "This form was sent from another site, so nothing was changed.")
    if (request.content_type or FORM_TYPE).partition(";")[0].strip().lower() != FORM_TYPE:
        abort(415, f"A form must be sent as {FORM_TYPE}.")
    with gevent.Timeout(FORM_SECONDS, RequestTimeout()):
        form = request.get_data()
    if len(form) < (request.content_length or 0):
        abort(400)  # the connection broke: a password may be cut short
    try:
        fields = parse_qsl(
            form.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS
        )
    except ValueError:  # more fields than any form of ours has, or not UTF-8
        abort(400)
    request.form = ImmutableMultiDict(fields)


def sent_from_here() -> bool:
    """False when a page of another site made a browser send this request.

    All browsers of recent years send Origin with a POST. So a request with neither header comes
    from a program such as curl, or from an older browser. An older browser does not send our
    cookie with another site's form, because the cookie is SameSite.
    """
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site:
        return site == "same-origin" or (site == "none" and not origin)
    host = request.headers.get("Host")  # as it was sent: `request.host` is empty for odd names
    return not origin or (bool(host) and origin.partition("://")[2] == host)


@pages.after_app_request
def finish(response: Response) -> Response:
    """Add security headers to everything but the API."""
    if is_api():
        return response
    response.headers.update(SECURITY_HEADERS)
    response.headers.remove("Accept-Ranges")  # every file is sent whole
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
            people.recognize()
    response = error.get_response()
    response.set_data(render_template("error.html", error=error, response=response))
    return response
