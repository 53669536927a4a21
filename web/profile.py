"""The Profile tab, and the password."""

from flask import Blueprint, g, render_template, request, session
from flask.typing import ResponseReturnValue

import accounts
from models import InvalidInput, check_fields
from web import keys
from web.forms import form_text
from web.sessions import redirect_to, require_log_in, session_mark, show_errors_on
from web.throttles import hash_password, verify_password

bp = Blueprint("profile", __name__, url_prefix="/settings")
bp.before_request(require_log_in)


@bp.get("")
@bp.get("/profile")
def profile() -> str:
    return render_template("profile.html")


@bp.post("/profile")
@show_errors_on(profile)
def save_profile() -> ResponseReturnValue:
    fields = {"username": form_text("username"), "email": form_text("email")}
    # Only what differs: an address from before the rules changed may stay.
    fields = {name: text for name, text in fields.items() if text != getattr(g.user, name)}
    check_fields(**fields)
    if fields:
        accounts.change(g.user, **fields)
    return redirect_to("web.profile.profile", "Your profile is saved.")


@bp.post("/profile/delete")
@show_errors_on(profile)
def delete_account() -> ResponseReturnValue:
    if not verify_password(g.user, g.user.username, request.form.get("password", "")):
        raise InvalidInput(password="This is not your password.")
    accounts.delete(g.user)
    session.clear()
    return redirect_to("web.console", "Your account and its keys are deleted.")


@bp.post("/security/password")
@show_errors_on(keys.security)
def change_password() -> ResponseReturnValue:
    new = request.form.get("password", "")
    check_fields(password=new)
    if not verify_password(g.user, g.user.username, request.form.get("current", "")):
        raise InvalidInput(current="This is not your current password.")
    password_hash = hash_password(new)
    accounts.change(g.user, password_hash=password_hash)
    session["mark"] = session_mark(password_hash)
    return redirect_to("web.keys.security", "Your password is changed.")
