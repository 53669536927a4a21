"""Profile Settings: the profile, the keys and their usage, and the password."""

from functools import partial

from flask import Blueprint, abort, g, redirect, render_template, request, session
from flask.typing import ResponseReturnValue
from peewee import IntegrityError, fn
from werkzeug.exceptions import TooManyRequests

import accounts
import auth
import models
from models import CHART_HOURS, DAY, HOUR, ApiKey, HourlyUsage, Invalid, User, check_fields
from service import current_service
from storage.database import transaction
from web import account
from web.account import chosen, errors_shown_by, redirect_to, typed

LIFETIMES = {"never": 0, "30 days": 30 * DAY, "90 days": 90 * DAY, "1 year": 365 * DAY}
# Not at once: if the new key gets lost on the way, the old one still works for a second try.
GRACES = {"in 24 hours": auth.GRACE_SECONDS, "in 5 minutes": 300}

bp = Blueprint("profile", __name__, url_prefix="/settings")


@bp.before_request
def require_log_in() -> ResponseReturnValue | None:
    """Ask for a log-in; refuse a form from a page that was opened under another account."""
    if g.user:
        if request.form.get("account", str(g.user.id)) == str(g.user.id):
            return None
        words = "This page was opened under another account. You are now logged in as"
        abort(409, f"{words} {g.user.username}.")
    if request.method == "POST":
        return redirect_to("/log-in", "You are logged out, so nothing was changed.")
    return redirect_to("/log-in", "Log in to open Profile Settings.")


@bp.get("")
@bp.get("/profile")
def profile() -> str:
    return render_template("profile.html")


@bp.post("/profile")
@errors_shown_by(profile)
def save_profile() -> ResponseReturnValue:
    fields = {"username": typed("username"), "email": typed("email")}
    # Only what differs: an address from before the rules changed may stay.
    fields = {name: text for name, text in fields.items() if text != getattr(g.user, name)}
    check_fields(**fields)
    if fields:
        accounts.change(g.user, **fields)
    return redirect_to("/settings/profile", "Your profile is saved.")


@bp.post("/profile/delete")
@errors_shown_by(profile)
def delete_account() -> ResponseReturnValue:
    if not accounts.try_password(g.user, g.user.username, request.form.get("password", "")):
        raise Invalid(password="This is not your password.")
    accounts.delete(g.user)
    current_service.store.forget()
    session.clear()
    return redirect_to("/", "Your account and its keys are deleted.")


@bp.get("/security")
def security() -> str:
    """The live keys and those that expired in the last day, their usage, and the password."""
    expired_lately = ApiKey.expires_at > models.now() - DAY
    expired_lately &= ApiKey.revoked_at.is_null() & ApiKey.rotated_at.is_null()
    order = ApiKey.created_at.desc(), fn.LOWER(ApiKey.name), ApiKey.id
    with models.database.connection_context():
        listed = list(g.user.keys.where(ApiKey.live() | expired_lately).order_by(*order))
        hours = hourly_requests(g.user)
    usage = [(key, current_service.store.peek(key, auth.quota_of(key))) for key in listed]
    page = {"keys": usage, "hours": hours}
    return render_template("security.html", lifetimes=LIFETIMES, nonce=auth.random_text(8), **page)


def hourly_requests(user: User) -> dict[int, int]:
    """Of all the user's keys, even revoked ones, by start of the hour; the current one is last."""
    this_hour = models.now() // HOUR * HOUR
    hours = range(this_hour - (CHART_HOURS - 1) * HOUR, this_hour + 1, HOUR)
    # By hour and key, as the index is: a condition on the user alone would read all rows of a day.
    keys = ApiKey.select(ApiKey.id)
    keys = keys.where(ApiKey.user == user, ApiKey.last_used_at >= hours[0])
    counts = HourlyUsage.select(HourlyUsage.hour, fn.SUM(HourlyUsage.requests))
    counts = counts.where(HourlyUsage.hour.in_(list(hours)), HourlyUsage.key_id.in_(keys))
    counts = counts.group_by(HourlyUsage.hour)
    return dict.fromkeys(hours, 0) | dict(counts.tuples())


@bp.get("/profile/<any(delete):_>")
@bp.get("/security/<any(keys, password):_>")
@bp.get("/security/keys/<_>/successor")
def leave_form(_: str) -> ResponseReturnValue:
    """Only forms are sent to these addresses; reloading the page that answered leads here."""
    return redirect("/settings/security", 303)


@bp.post("/security/password")
@errors_shown_by(security)
def change_password() -> ResponseReturnValue:
    new = request.form.get("password", "")
    check_fields(password=new)
    if not accounts.try_password(g.user, g.user.username, request.form.get("current", "")):
        raise Invalid(current="This is not your current password.")
    session["mark"] = account.session_mark(accounts.change_password(g.user, new))
    return redirect_to("/settings/security", "Your password is changed.")


@bp.post("/security/keys")
@errors_shown_by(security)
def create_key() -> ResponseReturnValue:
    name, type, lifetime = typed("name"), typed("type"), chosen("expires", LIFETIMES)
    nonce = request.form.get("key_id") or auth.random_text(8)
    key_id = auth.id_for(f"{g.user.id} {nonce}")  # sending the form again makes no second key
    expires_at = models.now() + lifetime if lifetime else None
    try:
        with transaction():
            key, secret = auth.create_key(g.user, name, type, expires_at=expires_at, id=key_id)
            limit_new_keys(g.user)
    except IntegrityError:  # a second click, Reload or Back sent the same form
        words = f"This form was already sent, and made the key “{own_key(key_id).name}”. "
        words += "The key was shown only once. If you did not see it, rotate it or make another."
        return redirect_to("/settings/security", words)
    return render_template("key.html", key=key, secret=secret)


def limit_new_keys(user: User) -> None:
    """Raises TooManyRequests if the user has made too many keys lately, this one included."""
    age = models.now() - ApiKey.created_at
    lately = ApiKey.select(fn.COUNT(ApiKey.id), fn.MAX(age)).where(age < HOUR)
    count, oldest = lately.where(ApiKey.user == user).tuples().get()
    if count > auth.KEYS_PER_HOUR:
        raise TooManyRequests(retry_after=HOUR - oldest)


@bp.get("/security/keys/<key_id>/<any(rotate, revoke):action>")
def ask(key_id: str, action: str) -> str:
    return render_template("change-key.html", action=action, key=own_key(key_id), graces=GRACES)


@bp.post("/security/keys/<key_id>/successor")
@errors_shown_by(partial(ask, action="rotate"))
def rotate_key(key_id: str) -> ResponseReturnValue:
    grace, old = chosen("grace", GRACES), own_key(key_id)
    end = auth.grace_end(old, grace)
    with transaction():
        key, secret = auth.rotate_key(old, end)
        limit_new_keys(g.user)
    current_service.store.forget()
    return render_template("key.html", key=key, secret=secret, old=old, old_end=end)


@bp.post("/security/keys/<key_id>/revoke")
def revoke_key(key_id: str) -> ResponseReturnValue:
    words = f"The key “{own_key(key_id).name}” is revoked."
    return back_to_keys(auth.revoke_key(key_id), words)


def back_to_keys(is_done: bool, words: str) -> ResponseReturnValue:
    """Show these words after a change of a key, or that the key had ended."""
    current_service.store.forget()
    ended = "This key was already revoked or has expired."
    return redirect_to("/settings/security", words if is_done else ended)


def own_key(key_id: str) -> ApiKey:
    with models.database.connection_context():
        key: ApiKey | None = ApiKey.get_or_none(ApiKey.id == key_id, ApiKey.user == g.user)
    return key or abort(404)
