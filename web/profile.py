"""Profile Settings: the profile; the page of the keys and their usage; the password."""

from flask import Blueprint, flash, g, redirect, render_template, request, session, url_for
from flask.typing import ResponseReturnValue
from peewee import fn

import accounts
import auth
import models
from accounts import Invalid
from models import CHART_HOURS, DAY, HOUR, ApiKey, HourlyUsage, User, database
from web import keys
from web.people import lead_to, mark, prove, typed

pages = Blueprint("profile", __name__, url_prefix="/settings")
pages.register_blueprint(keys.pages)


@pages.before_request
def require_log_in() -> ResponseReturnValue | None:
    if g.user:
        return None
    if request.method == "POST":
        flash("You are logged out, so nothing was changed.")
    return redirect(url_for("web.people.entrance", page="log-in", next=request.path), 303)


@pages.get("")
@pages.get("/profile")
def profile() -> str:
    return render_template("profile.html")


@pages.post("/profile")
def save_profile() -> ResponseReturnValue:
    username, email = typed("username"), typed("email")
    accounts.check_fields(username=username, email=email)
    accounts.change(g.user, username=username, email=email)
    return lead_to("/settings/profile", "Your profile is saved.")


@pages.get("/security")
@pages.get("/security/password")
@pages.get("/security/keys")
@pages.get("/security/keys/<key_id>")
@pages.get("/security/keys/<key_id>/successor")
def security(**_: str) -> str:
    """The live keys and those that expired in the last week, their usage, and the password."""
    expired = ApiKey.revoked_at.is_null() & (ApiKey.expires_at > models.now() - 7 * DAY)
    order = ApiKey.created_at.desc(), fn.LOWER(ApiKey.name), ApiKey.id
    with database.connection_context():
        listed = list(g.user.keys.where(ApiKey.live() | expired).order_by(*order))
        windows = {key.id: auth.guard().allowance(key) for key in listed}
        hours = hourly_requests(g.user)
    page = {"keys": listed, "windows": windows, "hours": hours}
    return render_template("security.html", lifetimes=keys.LIFETIMES, **page)


def hourly_requests(user: User) -> dict[int, int]:
    """Of all the user's keys, revoked ones too, by the start of the hour; the current one last."""
    this_hour = models.now() // HOUR * HOUR
    hours = range(this_hour - (CHART_HOURS - 1) * HOUR, this_hour + 1, HOUR)
    counts = HourlyUsage.select(HourlyUsage.hour, fn.SUM(HourlyUsage.requests))
    counts = counts.join(ApiKey, on=ApiKey.id == HourlyUsage.key_id).group_by(HourlyUsage.hour)
    counts = counts.where(ApiKey.user == user, HourlyUsage.hour >= hours[0])
    return dict.fromkeys(hours, 0) | dict(counts.tuples())


@pages.post("/security/password")
def change_password() -> ResponseReturnValue:
    new = request.form.get("password", "")
    accounts.check_fields(password=new)
    user = prove(g.user.username, request.form.get("current", ""))
    if not user:
        raise Invalid(current="This is not your current password.")
    replace_password(user, accounts.hash_password(new))
    session["mark"] = mark(user)
    words = "Your password is changed, and you are logged out everywhere else."
    return lead_to("/settings/security", words)


def replace_password(user: User, password_hash: str) -> None:
    """Raises Invalid: of two changes at the same moment, one wins."""
    query = User.update(password_hash=password_hash)
    with database.connection_context():
        if not query.where(User.id == user.id, User.password_hash == user.password_hash).execute():
            raise Invalid(current="Your password has just been changed.")
    user.password_hash = password_hash
