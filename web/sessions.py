"""Signing up, logging in and out, who is logged in, and what all pages share."""

import re
from collections.abc import Callable
from functools import wraps
from hashlib import sha256
from hmac import compare_digest

from flask import Blueprint, Flask, Request, g, redirect, render_template, request, session, url_for
from flask.sessions import SecureCookieSession, SecureCookieSessionInterface
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import abort

import accounts
from http_api.headers import is_api
from models import InvalidInput, User, check_fields, database
from service import current_service
from web.forms import form_text
from web.throttles import SIGN_UPS, hash_password, verify_password

View = Callable[..., ResponseReturnValue]

bp = Blueprint("sessions", __name__)


class PageSessions(SecureCookieSessionInterface):
    """Opens the session for pages only: the API needs none."""

    def open_session(self, app: Flask, request: Request) -> SecureCookieSession | None:
        if is_api(request.path):
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


def show_errors_on(page: Callable[..., str]) -> Callable[[View], View]:
    """Let this page show what is wrong with a form (`g.errors`), and what was typed."""

    def decorate(view: View) -> View:
        @wraps(view)
        def handle(**arguments: str) -> ResponseReturnValue:
            try:
                return view(**arguments)
            except InvalidInput as invalid:
                g.errors = invalid.errors
                return page(**arguments), 422  # Unprocessable Content

        return handle

    return decorate


@bp.before_request
def check_visitor() -> ResponseReturnValue | None:
    """Send users who are logged in to their pages; refuse a sign-up when that is closed."""
    if request.path == "/sign-up" and not current_service.settings.signups:
        abort(403, "Sign-up is closed. Ask the operator of this service for an account.")
    if g.user and request.method == "GET":
        return redirect(url_for("web.keys.security"), 303)
    return None


@bp.get("/sign-up")
def sign_up_form() -> str:
    return render_template("sign-up.html")


@bp.post("/sign-up")
@show_errors_on(sign_up_form)
def sign_up() -> ResponseReturnValue:
    names = {"username": form_text("username"), "email": form_text("email")}
    password = request.form.get("password", "")
    check_fields(**names, password=password)
    accounts.check_not_taken(**names)
    password_hash = hash_password(password, SIGN_UPS)
    return start_session(accounts.create(**names, password_hash=password_hash))


@bp.get("/log-in")
def log_in_form() -> str:
    return render_template("log-in.html")


@bp.post("/log-in")
@show_errors_on(log_in_form)
def log_in() -> ResponseReturnValue:
    name = form_text("username")
    user = accounts.find_user(name)
    if not verify_password(user, name, request.form.get("password", "")) or not user:
        raise InvalidInput(password="Wrong user name or password.")
    return start_session(user)


@bp.post("/log-out")
def log_out() -> ResponseReturnValue:
    session.clear()
    return redirect(url_for("web.console"), 303)


def start_session(user: User) -> ResponseReturnValue:
    """Log the user in; nothing of an earlier session is kept."""
    session.clear()
    session.update(user=user.id, mark=session_mark(user.password_hash))
    return redirect(url_for("web.keys.security"), 303)


def require_log_in() -> ResponseReturnValue | None:
    """Lead to the log-in page: for the pages of a user, as their `before_request`."""
    if g.user:
        return None
    message = "Log in to open Profile Settings."
    if request.method == "POST":
        message = "You are logged out, so nothing was changed."
    return redirect_to("web.sessions.log_in_form", message)


def load_user() -> None:
    """Find out who is logged in: `g.user`, or None; raises PeeweeException."""
    g.errors, user = {}, None
    if "user" in session:
        with database.connection_context():
            user = User.get_or_none(User.id == session["user"])
        if not user or not compare_digest(session_mark(user.password_hash), session["mark"]):
            user = None
            session.clear()
    g.user = user


def session_mark(password_hash: str) -> str:
    """A value that changes with the password, which ends all sessions begun with an older one."""
    return sha256(password_hash.encode()).hexdigest()[:16]


def redirect_to(endpoint: str, message: str) -> ResponseReturnValue:
    """Show the message on the page of this endpoint.

    Not by `flash`, which adds to a list in the session: a client that opens no page could make it
    longer with each form.
    """
    session["message"] = message
    return redirect(url_for(endpoint), 303)
