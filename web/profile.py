"""The Profile tab: the user's name and address, and the end of the account."""

from flask import Blueprint, g, render_template, request, session
from flask.typing import ResponseReturnValue

from accounts import users
from models import InvalidInput, check_fields
from web.forms import form_text, redirect_with_message, show_errors_on
from web.sessions import require_log_in
from web.throttles import verify_throttled

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
        users.change(g.user, **fields)
    return redirect_with_message("web.profile.profile", "Your profile is saved.")


@bp.post("/profile/delete")
@show_errors_on(profile)
def delete_account() -> ResponseReturnValue:
    if not verify_throttled(g.user, g.user.username, request.form.get("password", "")):
        raise InvalidInput(password="This is not your password.")
    users.delete(g.user)
    session.clear()
    return redirect_with_message("web.console.console", "Your account and its keys are deleted.")
