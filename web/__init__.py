"""The web application: where people sign up, make keys and try the API."""

import secrets
from contextlib import suppress

import gevent
from flask import Blueprint, Flask, Request, Response, current_app, g, render_template, request
from flask.sessions import SecureCookieSession, SecureCookieSessionInterface
from flask.typing import ResponseReturnValue
from peewee import PeeweeException
from werkzeug.exceptions import RequestTimeout, abort

import models
from accounts import Invalid
from protocol.requests import MAX_BODY_BYTES
from protocol.timestamps import date_time, display
from web import people, profile

INVALID = 422  # the status of a form that comes back
FORM_SECONDS = 10  # for a form to arrive, in total
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
    """Opens the session for pages only: the API needs none, and it takes a tenth of a request."""

    def open_session(self, app: Flask, request: Request) -> SecureCookieSession | None:
        return None if request.path.startswith("/api/") else super().open_session(app, request)

    def get_cookie_secure(self, app: Flask) -> bool:
        return request.is_secure


def register(app: Flask) -> None:
    """Add the pages, their style sheet and script, and what protects them."""
    app.session_interface = PageSessions()
    app.config["SESSION_COOKIE_SAMESITE"] = "Lax"
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.filters |= {"date_time": date_time, "display": display}
    signups = app.extensions["settings"].signups
    app.jinja_env.globals |= {"signups": signups, "prefixes": models.PREFIXES}
    app.jinja_env.globals |= {"token": secrets.token_urlsafe, "now": models.now}
    app.register_blueprint(pages)


@pages.get("/")
def console() -> str:
    return render_template("console.html")


@pages.before_request
def receive_form() -> None:
    """Read a form; refuse one that another site sent, or that is large, slow or incomplete."""
    if request.method != "POST":
        return
    if not sent_from_here():
        abort(403)
    if "Transfer-Encoding" in request.headers:
        abort(411)
    length = request.content_length or 0
    if length > MAX_BODY_BYTES:
        abort(413)
    with gevent.Timeout(FORM_SECONDS, RequestTimeout()):
        received = len(request.get_data())
    if received < length:
        abort(400)  # the connection broke: a password may be cut short


def sent_from_here() -> bool:
    """False when a page of another site made a browser send this request.

    All browsers of the last years send Origin with a POST. So a request with neither header comes
    from a program such as curl, or from an older browser. An older browser does not send our
    cookie with another site's form, because the cookie is SameSite.
    """
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site:
        return site == "same-origin" or (site == "none" and not origin)
    return not origin or origin.partition("://")[2] == request.host


pages.before_request(people.recognise)
pages.before_request(people.require_own_form)


@pages.errorhandler(Invalid)
def form_again(invalid: Invalid) -> ResponseReturnValue:
    """The page at the address of the form, with what was typed and what is wrong with it."""
    g.errors = invalid.errors
    endpoint, arguments = current_app.url_map.bind("").match(request.path, "GET")
    page: str = current_app.view_functions[endpoint](**arguments)  # type: ignore[assignment]
    return page, INVALID


@pages.after_app_request
def finish(response: Response) -> Response:
    """Put security headers on everything but the API, and errors into the layout of the pages."""
    if request.path.startswith("/api/"):
        return response
    response.headers.update(SECURITY_HEADERS)
    if response.mimetype == "text/html":
        response.headers["Cache-Control"] = "no-store"
        if response.status_code >= 400 and response.status_code != INVALID:
            if "user" not in g:  # there is no such page
                with suppress(PeeweeException):
                    people.recognise()
            response.set_data(render_template("error.html", answer=response))
    return response
