"""Signing up, logging in and out, and the session cookie, which says who is logged in."""

import re
import time
from contextlib import suppress
from hashlib import sha256
from hmac import compare_digest

from flask import Blueprint, Flask, Request, g, redirect, render_template, request, session, url_for
from flask.sessions import SecureCookieSession, SecureCookieSessionInterface
from flask.typing import ResponseReturnValue
from itsdangerous import BadSignature
from werkzeug.exceptions import abort

from accounts import users
from models import InvalidInput, User, check_fields, db
from ratelimit import CLOCK_SKEW
from service.application import current_service
from service.responses import is_api
from web.forms import (
    SIGN_UPS,
    form_text,
    hash_throttled,
    redirect_with_message,
    show_errors_on,
    verify_throttled,
)

MAX_COOKIES = 8  # of our name; a header has room for 1,700, and each costs 36 µs

bp = Blueprint("log_in", __name__)


@bp.before_request
def send_logged_in_users_on() -> ResponseReturnValue | None:
    """Redirect logged-in users to their keys; refuse a sign-up when that is closed."""
    if not current_service().settings.signups and request.endpoint in (
        "web.log_in.sign_up_form",
        "web.log_in.sign_up",
    ):
        abort(403, "Sign-up is closed. Ask the operator of this service for an account.")
    if g.user and request.method == "GET":
        return redirect(url_for("web.settings.keys"), 303)
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
    return start_session(users.create(**names, password_hash=hash_throttled(password, SIGN_UPS)))


@bp.get("/log-in")
def log_in_form() -> str:
    return render_template("log-in.html")


@bp.post("/log-in")
@show_errors_on(log_in_form)
def log_in() -> ResponseReturnValue:
    name = form_text("username")
    user = users.find_user(name)
    # The password comes first, so an unknown name takes as long as a known one.
    if not verify_throttled(user, name, request.form.get("password", "")) or not user:
        raise InvalidInput(password="Wrong user name or password.")
    return start_session(user)


@bp.post("/log-out")
def log_out() -> ResponseReturnValue:
    session.clear()
    return redirect(url_for("web.console.home"), 303)


class PageSessions(SecureCookieSessionInterface):
    """Opens the session for pages only: the API needs none.

    Flask's own method would parse all cookies of the host, which can take 60 ms if other programs
    there set many, and refuse a session that was begun on a machine whose clock is ahead.
    """

    def open_session(self, app: Flask, request: Request) -> SecureCookieSession | None:
        if is_api(request.path) or not (serializer := self.get_signing_serializer(app)):
            return None
        # gunicorn joins several Cookie headers with a comma. But a comma may also be a part of
        # another cookie, which a subdomain has set, so cookies behind a comma come last.
        ours = re.finditer(
            rf"(^|[;,])[ \t]*{self.get_cookie_name(app)}=([A-Za-z0-9_.-]*)",
            request.environ.get("HTTP_COOKIE", ""),
        )
        for cookie in sorted(ours, key=lambda each: each[1] == ",")[:MAX_COOKIES]:
            with suppress(BadSignature):
                data, signed_at = serializer.loads(cookie[2], return_timestamp=True)
                age = time.time() - signed_at.timestamp()
                if -CLOCK_SKEW <= age <= app.permanent_session_lifetime.total_seconds():
                    return self.session_class(data)
        return self.session_class()

    def get_cookie_name(self, app: Flask) -> str:
        """The name has the port, because browsers send a cookie to all ports of its host.

        So instances on other ports do not log each other's users out. Over https, the name has the
        prefix `__Host-`, too: browsers take such a cookie only from this very host and for all its
        paths, so no subdomain can log its visitors in to an account of its own.
        """
        prefix = "__Host-" if request.is_secure and self.get_cookie_path(app) == "/" else ""
        port = re.search("[^:]:([0-9]{1,5})$", request.headers.get("Host", ""))
        return f"{prefix}{super().get_cookie_name(app)}{f'_{port[1]}' if port else ''}"

    def get_cookie_secure(self, app: Flask) -> bool:
        return request.is_secure


def start_session(user: User) -> ResponseReturnValue:
    """Log the user in; nothing of an earlier session is kept."""
    session.clear()
    session.update(user=user.id, mark=password_mark(user.password_hash))
    return redirect(url_for("web.settings.keys"), 303)


def require_log_in() -> ResponseReturnValue | None:
    """Send visitors to the log-in page; `before_request` of the pages of a user."""
    if g.user:
        return None
    return redirect_with_message(
        "web.log_in.log_in_form",
        "You are logged out, so nothing was changed."
        if request.method == "POST"
        else "Log in to open Profile Settings.",
    )


def load_user() -> None:
    """Find out who is logged in: `g.user`, or None; raises PeeweeException."""
    user = None
    if "user" in session:
        with db.connection_context():
            user = User.get_or_none(User.id == session["user"])
        if not user or not compare_digest(password_mark(user.password_hash), session["mark"]):
            user = None
            session.clear()
    g.user = user


def password_mark(password_hash: str) -> str:
    """A value that changes with the password, which ends all sessions begun with an older one."""
    return sha256(password_hash.encode()).hexdigest()[:16]
