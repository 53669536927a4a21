"""Signing up, logging in and out, who is logged in, and what all forms share."""

from collections.abc import Callable
from functools import partial, wraps
from hashlib import sha256
from hmac import compare_digest

from flask import Blueprint, g, redirect, render_template, request, session
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import abort

import accounts
from accounts import SIGN_UPS, throttle, try_password
from models import Invalid, User, check_fields, database
from rest.clients import caller
from service import current_service

View = Callable[..., ResponseReturnValue]

bp = Blueprint("account", __name__)


def errors_shown_by(page: Callable[..., str]) -> Callable[[View], View]:
    """Let this page show what is wrong with a form (`g.errors`), and what was typed."""

    def decorate(view: View) -> View:
        @wraps(view)
        def handle(**arguments: str) -> ResponseReturnValue:
            try:
                return view(**arguments)
            except Invalid as invalid:
                g.errors = invalid.errors
                return page(**arguments), 422  # Unprocessable Content

        return handle

    return decorate


@bp.before_request
def redirect_if_logged_in() -> ResponseReturnValue | None:
    """Send users who are logged in to their pages; refuse a sign-up when that is closed."""
    if request.path == "/sign-up" and not current_service.settings.signups:
        abort(403, "Sign-up is closed. Ask whoever runs this service for an account.")
    return redirect("/settings/security", 303) if g.user and request.method == "GET" else None


@bp.get("/<any('sign-up', 'log-in'):page>")
def form_page(page: str) -> str:
    return render_template(f"{page}.html")


@bp.post("/sign-up")
@errors_shown_by(partial(form_page, page="sign-up"))
def sign_up() -> ResponseReturnValue:
    fields = {"username": typed("username"), "email": typed("email")}
    fields["password"] = request.form.get("password", "")
    check_fields(**fields)
    accounts.check_not_taken(fields["username"], fields["email"])
    accounts.count_password()
    throttle(SIGN_UPS, caller(request.remote_addr))
    return start_session(accounts.create(**fields))


@bp.post("/log-in")
@errors_shown_by(partial(form_page, page="log-in"))
def log_in() -> ResponseReturnValue:
    name = typed("username")
    user = accounts.find_user(name)
    if not try_password(user, name, request.form.get("password", "")) or not user:
        raise Invalid(password="Wrong user name or password.")
    return start_session(user)


@bp.post("/log-out")
def log_out() -> ResponseReturnValue:
    session.clear()
    return redirect("/", 303)


def start_session(user: User) -> ResponseReturnValue:
    """Log the user in; nothing of an earlier session is kept."""
    session.clear()
    session.update(user=user.id, mark=session_mark(user.password_hash))
    return redirect("/settings/security", 303)


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


def typed(field: str) -> str:
    return request.form.get(field, "").strip()


def chosen(field: str, choices: dict[str, int]) -> int:
    """The option chosen from a list, by default the first; our pages send nothing else."""
    choice = request.form.get(field, next(iter(choices)))
    return choices[choice] if choice in choices else abort(400)


def redirect_to(page: str, message: str) -> ResponseReturnValue:
    """Show the message on that page.

    Not by `flash`, which adds to a list in the session: a client that opens no page could make it
    longer with each form.
    """
    session["message"] = message
    return redirect(page, 303)
