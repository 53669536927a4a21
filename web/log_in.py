"""Signing up, logging in and logging out."""

from flask import Blueprint, g, redirect, render_template, request, session, url_for
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import abort

from accounts import users
from models import InvalidInput, check_fields
from service.application import current_service
from web.forms import form_text, show_errors_on
from web.sessions import start_session
from web.throttles import SIGN_UPS, hash_throttled, verify_throttled

bp = Blueprint("log_in", __name__)


@bp.before_request
def send_logged_in_users_on() -> ResponseReturnValue | None:
    """Send users who are logged in to their keys; refuse a sign-up when that is closed."""
    if request.path == "/sign-up" and not current_service.settings.signups:
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
    password_hash = hash_throttled(password, SIGN_UPS)
    return start_session(users.create(**names, password_hash=password_hash))


@bp.get("/log-in")
def log_in_form() -> str:
    return render_template("log-in.html")


@bp.post("/log-in")
@show_errors_on(log_in_form)
def log_in() -> ResponseReturnValue:
    name = form_text("username")
    user = users.find_user(name)
    if not verify_throttled(user, name, request.form.get("password", "")) or not user:
        raise InvalidInput(password="Wrong user name or password.")
    return start_session(user)


@bp.post("/log-out")
def log_out() -> ResponseReturnValue:
    session.clear()
    return redirect(url_for("web.console.home"), 303)
