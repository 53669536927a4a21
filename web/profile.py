"""Profile Settings: the profile; the password, the keys and what they were used for."""

from flask import Blueprint, abort, flash, g, redirect, render_template, request, session
from flask.typing import ResponseReturnValue
from peewee import fn

import accounts
import auth
import models
from accounts import Invalid
from models import HOUR, HOURS, ApiKey, HourlyUsage, User, database
from web.people import mark, prove, typed

pages = Blueprint("profile", __name__, url_prefix="/settings")


@pages.before_request
def require_log_in() -> ResponseReturnValue | None:
    return None if g.user else redirect("/log-in", 303)


@pages.get("")
def settings() -> ResponseReturnValue:
    return redirect("/settings/profile")


@pages.get("/profile")
def profile() -> str:
    return render_template("profile.html")


@pages.post("/profile")
def save_profile() -> ResponseReturnValue:
    username, email = typed("username"), typed("email")
    accounts.check(username=username, email=email)
    g.user.username, g.user.email = username, email
    accounts.save(g.user)
    flash("Your profile is saved.")
    return redirect("/settings/profile", 303)


@pages.get("/security")
@pages.get("/security/keys")
@pages.get("/security/password")
def security() -> str:
    with database.connection_context():
        keys = list(g.user.keys.where(ApiKey.live()).order_by(ApiKey.created_at, ApiKey.id))
        windows = {key.id: auth.guard().allowance(key) for key in keys}
        page = {"keys": keys, "windows": windows, "hours": hourly_requests(g.user)}
    return render_template("security.html", prefixes=models.PREFIXES, **page)


def hourly_requests(user: User) -> dict[int, int]:
    """Of all the user's keys, revoked ones too, by the start of the hour; the current one last."""
    this_hour = models.now() // HOUR * HOUR
    hours = range(this_hour - (HOURS - 1) * HOUR, this_hour + 1, HOUR)
    counts = HourlyUsage.select(HourlyUsage.hour, fn.SUM(HourlyUsage.requests))
    counts = counts.join(ApiKey, on=ApiKey.id == HourlyUsage.key_id).group_by(HourlyUsage.hour)
    counts = counts.where(ApiKey.user == user, HourlyUsage.hour >= hours[0])
    return dict.fromkeys(hours, 0) | dict(counts.tuples())


@pages.post("/security/password")
def change_password() -> ResponseReturnValue:
    new = request.form.get("password", "")
    accounts.check(password=new)
    user = prove(g.user.username, request.form.get("current", ""))
    if not user:
        raise Invalid(current="This is not your current password.")
    replace_password(user, accounts.hash_password(new))
    session["mark"] = mark(user)
    flash("Your password is changed, and you are logged out everywhere else.")
    return redirect("/settings/security", 303)


def replace_password(user: User, password_hash: str) -> None:
    """Raises Invalid: of two changes at the same moment, one wins."""
    query = User.update(password_hash=password_hash)
    with database.connection_context():
        if not query.where(User.id == user.id, User.password_hash == user.password_hash).execute():
            raise Invalid(current="Your password has just been changed.")
    user.password_hash = password_hash


@pages.post("/security/keys")
def create_key() -> str:
    """The only answer that ever holds the secret."""
    key, secret = auth.create_key(g.user, typed("name"), typed("type"))
    return render_template("key.html", key=key, secret=secret)


@pages.post("/security/keys/<key_id>/revoke")
def revoke_key(key_id: str) -> ResponseReturnValue:
    with database.connection_context():
        key = ApiKey.get_or_none(ApiKey.id == key_id, ApiKey.user == g.user)
        if not key:
            abort(404)
        models.revoke_key(key_id)  # a second click finds it revoked, which is no error
    auth.guard().forget()
    flash(f"The key {key.name} is revoked.")
    return redirect("/settings/security", 303)
