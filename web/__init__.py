"""The web application: where people sign up, make keys and try the API."""

from __future__ import annotations

from http import HTTPStatus

import gevent
from flask import Blueprint, Flask, Request, Response, abort, render_template, request
from flask.sessions import SecureCookieSession, SecureCookieSessionInterface
from werkzeug.exceptions import RequestTimeout

import clock
from ratelimit import Limiter
from web import people, profile

MAX_FORM_BYTES = 16 * 1024
FORM_SECONDS = 10  # for a form to arrive, in total
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    # Not no-referrer: with that, browsers make the Origin of our own forms "null".
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
ERRORS = {
    403: "This form was sent from another site, so nothing was changed.",
    404: "There is nothing at this address.",
    405: "This address cannot be used in that way.",
    408: "The form took too long to arrive. Please send it again.",
    411: "The form came without its length.",
    413: "The form is too large.",
    429: "There were too many tries.",
    500: "Something went wrong on our side.",
    503: "The database cannot be reached. Please try again in a moment.",
}

pages = Blueprint("web", __name__, template_folder="templates")
pages.register_blueprint(people.pages)
pages.register_blueprint(profile.pages)
pages.add_app_template_filter(clock.date_time)
pages.add_app_template_filter(clock.display)


class PageSessions(SecureCookieSessionInterface):
    """Opens the session for pages only: the API has no use for it, and it costs a tenth."""

    def open_session(self, app: Flask, request: Request) -> SecureCookieSession | None:
        return None if request.path.startswith("/api/") else super().open_session(app, request)

    def get_cookie_secure(self, app: Flask) -> bool:
        return request.is_secure


def register(app: Flask) -> None:
    """Add the pages, their style sheet and script, and what protects them."""
    app.session_interface = PageSessions()
    app.config["SESSION_COOKIE_SAMESITE"] = "Lax"
    app.extensions["throttles"] = Limiter()
    app.static_folder = "web/static"
    app.register_blueprint(pages)


@pages.get("/")
def console() -> str:
    return render_template("console.html")


@pages.before_request
def refuse_other_sites() -> None:
    """Answer 403 to a POST that another site made a browser send.

    With neither header it is no browser of this decade: they all send Origin with a POST. A curl
    user is let in; an attacker gains nothing, for without a victim's browser there is no victim's
    cookie, and an older browser keeps it back, too, since it is SameSite.
    """
    if request.method != "POST":
        return
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site:
        ours = site == "same-origin" or (site == "none" and not origin)
    else:
        ours = not origin or origin.endswith(f"://{request.host}")
    if not ours:
        abort(403)


@pages.before_request
def read_form() -> None:
    """Take in the form, if it is neither large nor slow."""
    if request.method != "POST":
        return
    if request.content_length is None:
        abort(411)
    if request.content_length > MAX_FORM_BYTES:
        abort(413)
    with gevent.Timeout(FORM_SECONDS, RequestTimeout()):
        request.get_data()


pages.before_request(people.recognise)


@pages.after_app_request
def finish(response: Response) -> Response:
    """Put security headers on everything but the API, and errors into the layout of the pages."""
    if request.path.startswith("/api/"):
        return response
    response.headers.update(SECURITY_HEADERS)
    if response.mimetype == "text/html":
        response.headers["Cache-Control"] = "no-store"
        if response.status_code >= 400 and response.status_code != people.INVALID:
            response.set_data(error_page(response))
    return response


def error_page(response: Response) -> str:
    title = HTTPStatus(response.status_code).phrase
    message = ERRORS.get(response.status_code, "This request could not be understood.")
    wait = response.headers.get("Retry-After")
    return render_template("error.html", title=title, message=message, wait=wait)
