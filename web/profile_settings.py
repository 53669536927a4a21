"""Profile Settings: the tab Profile, and the tab Security with the API keys and the password."""

from functools import partial

from flask import Blueprint, g, render_template, request, session
from flask.typing import ResponseReturnValue
from peewee import fn

import auth
from accounts import api_keys, users
from models import (
    DAY,
    ApiKey,
    Changed,
    HourlyUsage,
    InvalidInput,
    User,
    chart_hours,
    db,
    now,
)
from ratelimit import tiers_for_users
from service.application import current_service
from web.forms import (
    NEW_KEYS,
    form_option,
    form_text,
    hash_throttled,
    redirect_with_message,
    show_errors_on,
    throttle,
    verify_throttled,
)
from web.log_in import password_mark, require_log_in

LIFETIMES = {
    "never": None,
    "5 minutes": 300,
    "30 days": 30 * DAY,
    "90 days": 90 * DAY,
    "1 year": 365 * DAY,
}
# Not at once: if the response with the new key is lost, the old one still works.
GRACES = {"in 24 hours": DAY, "in 5 minutes": 300}

bp = Blueprint("settings", __name__, url_prefix="/settings")
bp.before_request(require_log_in)


@bp.get("")
@bp.get("/profile")
def profile() -> str:
    return render_template("profile.html")


@bp.post("/profile")
@show_errors_on(profile)
def save_profile() -> ResponseReturnValue:
    users.change(g.user, username=form_text("username"), email=form_text("email"))
    return redirect_with_message("web.settings.profile", "Your profile was saved.")


@bp.get("/profile/delete")
def confirm_deletion() -> str:
    return render_template("delete-account.html")


@bp.post("/profile/delete")
@show_errors_on(confirm_deletion)
def delete_account() -> ResponseReturnValue:
    if form_text("confirmed") != g.user.username:  # browsers fill in the other fields
        raise InvalidInput(confirmed="This is not your user name.")
    if not verify_throttled(g.user, g.user.username, request.form.get("password", "")):
        raise InvalidInput(password="This is not your password.")
    users.delete(g.user)
    session.clear()
    return redirect_with_message(
        "web.console.home", "Your account was deleted, with everything in it."
    )


@bp.get("/security")
def keys() -> str:
    """The valid keys, their usage, and the password."""
    store = current_service().store
    with db.connection_context():
        newest = g.user.keys.where(ApiKey.valid()).order_by(
            ApiKey.created_at.desc(), fn.LOWER(ApiKey.name), ApiKey.id
        )
        listed = [(key, store.peek(key, auth.quota_of(key))) for key in newest]
        hours = hourly_requests(g.user)
    return render_template(
        "security.html",
        keys=listed,
        hours=hours,
        lifetimes=LIFETIMES,
        tiers=tiers_for_users(current_service().settings.rate_limits),
        nonce=api_keys.random_text(8),
    )


def hourly_requests(user: User) -> dict[int, int]:
    """The requests of all the user's keys, by the start of each hour; the current hour is last."""
    hours = chart_hours()
    # By hour and key, like the index: a condition on the user alone would read all rows of a day.
    keys = ApiKey.select(ApiKey.id).where(ApiKey.user == user, ApiKey.last_used_at >= hours[0])
    return dict.fromkeys(hours, 0) | dict(
        HourlyUsage.select(HourlyUsage.hour, fn.SUM(HourlyUsage.requests))
        .where(HourlyUsage.hour.in_(hours), HourlyUsage.key_id.in_(keys))
        .group_by(HourlyUsage.hour)
        .tuples()
    )


@bp.post("/security/keys")
@show_errors_on(keys)
def create_key() -> ResponseReturnValue:
    lifetime = LIFETIMES[form_option("expires", LIFETIMES)]
    # A nonce may be any text: its digest fits the column.
    nonce = api_keys.digest(request.form.get("nonce") or api_keys.random_text(8))[:8]
    throttle(NEW_KEYS, g.user.id)
    try:
        key, secret = api_keys.create_key(
            g.user,
            form_text("name"),
            form_text("type"),
            current_service().settings.keys_per_user,
            tier=form_option("limit", tiers_for_users(current_service().settings.rate_limits)),
            expires_at=lifetime and now() + lifetime,
            nonce=nonce,
        )
    except api_keys.AlreadyMade as error:  # a second click, Reload or Back sent the form again
        return redirect_with_message(
            "web.settings.keys",
            f"This form was already sent, and made the key “{error.args[0].name}”. "
            "The key was shown only once. If you did not see it, rotate it or make another.",
        )
    return render_template("key.html", key=key, secret=secret)


@bp.get("/security/keys/<key_id>/<any(rename, rotate, revoke):action>")
def confirm_key_change(key_id: str, action: str) -> str:
    with db.connection_context():
        valid = g.user.keys.where(ApiKey.valid())
        key = valid.where(ApiKey.id == key_id).get_or_none()
        if key is None:
            raise Changed(api_keys.KEY_IS_GONE)
        total = current_service().store.usage_of(key).total
        older = valid.where(ApiKey.id == key.predecessor).get_or_none()
    return render_template(
        "change-key.html", action=action, key=key, older=older, total=total, graces=GRACES
    )


@bp.post("/security/keys/<key_id>/rename")
@show_errors_on(partial(confirm_key_change, action="rename"))
def rename_key(key_id: str) -> ResponseReturnValue:
    name = form_text("name")
    api_keys.change_key(g.user, key_id, name=name)
    return redirect_with_message("web.settings.keys", f"The key is now named “{name}”.")


# Reload of the page with the new key is a GET. At /rotate, it would show the confirmation; here it
# leads to the list.
@bp.post("/security/keys/<key_id>/successor")
@show_errors_on(partial(confirm_key_change, action="rotate"))
def rotate_key(key_id: str) -> ResponseReturnValue:
    throttle(NEW_KEYS, g.user.id)
    old, key, secret = api_keys.rotate_key(
        g.user,
        key_id,
        GRACES[form_option("grace", GRACES)],
        current_service().store.save_to_keys,
        only_if_unused="unused" in request.form,
    )
    return render_template("key.html", key=key, secret=secret, old=old)


@bp.post("/security/keys/<key_id>/revoke")
def revoke_key(key_id: str) -> ResponseReturnValue:
    key = api_keys.revoke_key(g.user, key_id, current_service().store.save_to_keys)
    return redirect_with_message("web.settings.keys", f"The key “{key.name}” was revoked.")


@bp.post("/security/password")
@show_errors_on(keys)
def change_password() -> ResponseReturnValue:
    if not verify_throttled(g.user, g.user.username, request.form.get("current", "")):
        raise InvalidInput(current="This is not your current password.")
    password_hash = hash_throttled(request.form.get("password", ""))
    users.change(g.user, password_hash=password_hash)
    session["mark"] = password_mark(password_hash)
    return redirect_with_message("web.settings.keys", "Your password was changed.")
