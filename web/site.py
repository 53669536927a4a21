"""All pages: how the app gets them, what runs before and after each of them, and error pages."""

from contextlib import suppress

import gevent
from flask import Blueprint, Response, g, redirect, render_template, request, session, url_for
from flask.typing import ResponseReturnValue
from gevent.lock import BoundedSemaphore
from peewee import PeeweeException
from werkzeug.exceptions import HTTPException

import models
from ratelimit import UNIT_NAMES, Limiter
from service.application import Service
from service.client_address import client_network
from service.connections import TURN_SECONDS
from service.responses import is_api, title_of
from service.timestamps import date_time, display, relative_time
from web import console, log_in, profile_settings
from web.forms import check_form, free_slot, read_form
from web.log_in import PageSessions, load_user

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    # Not no-referrer: with that, browsers make the Origin of our own forms "null".
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}

MAX_WAITING_PAGES = 100  # of a caller
page_turn = BoundedSemaphore()
caller_turns = [BoundedSemaphore() for _ in range(1024)]  # which callers share by chance

bp = Blueprint("web", __name__, template_folder="templates")
for part in (console, log_in, profile_settings):
    bp.register_blueprint(part.bp)
bp.teardown_request(free_slot)


def register(app: Service) -> None:
    """Add the pages, their style sheet and script, and what protects them."""
    app.session_interface = PageSessions()
    # Browsers send cookies to all ports of a host, and other programs may have one named `session`.
    app.config.update(
        SESSION_COOKIE_NAME="demo_service",
        SESSION_COOKIE_SAMESITE="Lax",
        SESSION_COOKIE_PATH=app.settings.script_name or "/",
    )
    app.extensions["throttles"] = Limiter()  # of forms
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.policies["json.dumps_kwargs"] = {}  # in an example, fields keep their order
    app.jinja_env.filters |= {
        "number": "{:,}".format,
        "date_time": date_time,
        "display": display,
        "relative_time": relative_time,
    }
    app.jinja_env.globals |= console.descriptions() | {
        "models": models,
        "origin": console.origin,
        "settings": app.settings,
        "units": UNIT_NAMES,
    }
    app.before_request(read_form)
    app.before_request(wait_for_turn)
    app.register_blueprint(bp)


def wait_for_turn() -> ResponseReturnValue | None:
    """Let others run before a page is rendered, or a file is read, which is slow.

    `page_turn` is held for one turn of the event loop, after which this page is rendered before the
    next one gets it. So requests to the API run between two pages. Only one page of a caller waits
    for `page_turn`, so a caller can't keep the pages of others waiting.
    """
    if is_api(request.path):
        return None
    bucket = hash(client_network(request.remote_addr)) % len(caller_turns)
    # Otherwise, pages whose clients have left would pile up.
    if caller_turns[bucket].linkcount() >= MAX_WAITING_PAGES:
        return Response("The service is busy.", 503, {"Retry-After": "1"})
    with caller_turns[bucket], page_turn:
        gevent.sleep(TURN_SECONDS)
    g.had_turn = True
    return None


@bp.before_request
def before_page() -> None:
    """Check the form and find out who is logged in, before a view is called."""
    g.errors = {}
    check_form()
    load_user()  # after the form, because one that is refused should cost no query


@bp.after_app_request
def add_security_headers(response: Response) -> Response:
    """Protect pages and files; the API has headers of its own."""
    if is_api(request.path):
        return response
    for name in ("Last-Modified", "Accept-Ranges"):  # dates and ranges are ignored
        response.headers.pop(name, None)
    response.headers.update(SECURITY_HEADERS)
    if request.is_secure:  # for a year, and for this host only
        response.headers["Strict-Transport-Security"] = "max-age=31536000"
    # Only files may be kept.
    if request.endpoint not in ("static", "web.console.description") or response.status_code >= 400:
        response.headers["Cache-Control"] = "no-store"
    return response


@bp.errorhandler(models.Changed)
def nothing_was_changed(error: models.Changed) -> ResponseReturnValue:
    """Say so on the form's tab, or on the log-in page if the account itself was changed."""
    with suppress(PeeweeException):  # raised here, it would become a 500
        load_user()
    session["message"] = str(error)
    return redirect(form_tab() if g.user else url_for("web.log_in.log_in_form"), 303)


def form_tab() -> str:
    """The page of a form's address: a tab, such as /settings/security, or the list of its rows."""
    parts = 3 if request.path.startswith("/settings") else 2
    return request.root_path + "/".join(request.path.split("/")[:parts])


def error_page(error: HTTPException) -> ResponseReturnValue:
    """An error in the pages' layout."""
    # A GET of a form's address means that the user has reloaded the response to the form.
    if error.code == 405 and request.method == "GET" and request.path.startswith("/settings"):
        return redirect(form_tab(), 303)
    if "had_turn" not in g and (busy := wait_for_turn()):  # an error of the steps before
        return busy
    # The user is not loaded yet for a path that does not exist. If the database has just failed,
    # another query might take as long again.
    if "user" not in g and error.code != 503:
        with suppress(PeeweeException):
            load_user()
    response = error.get_response()
    response.set_data(
        render_template(
            "error.html", error=error, response=response, phrase=title_of(error.code or 500)
        )
    )
    return response
