"""The Security tab: the keys of a user, and how much they were used."""

from functools import partial

from flask import Blueprint, g, render_template, request
from flask.typing import ResponseReturnValue
from peewee import fn

import api_keys
import auth
import models
from models import CHART_HOURS, DAY, HOUR, ApiKey, Changed, HourlyUsage, User, check_fields
from service import current_service
from web.forms import form_option, form_text
from web.sessions import redirect_to, require_log_in, show_errors_on
from web.throttles import NEW_KEYS, throttled

LIFETIMES = {"never": 0, "30 days": 30 * DAY, "90 days": 90 * DAY, "1 year": 365 * DAY}
# Not at once: if the response with the new key is lost, the old one still works.
GRACES = {"in 24 hours": api_keys.GRACE_SECONDS, "in 5 minutes": 300}

bp = Blueprint("keys", __name__, url_prefix="/settings/security")
bp.before_request(require_log_in)


@bp.get("")
def security() -> str:
    """The valid keys, their usage, and the password."""
    with models.database.connection_context():
        keys = g.user.keys.where(ApiKey.valid())
        listed = list(keys.order_by(ApiKey.created_at.desc(), fn.LOWER(ApiKey.name), ApiKey.id))
        hours = hourly_requests(g.user)
    usage = [(key, current_service.store.peek(key, auth.quota_of(key))) for key in listed]
    nonce = api_keys.random_text(8)
    return render_template(
        "security.html", keys=usage, hours=hours, lifetimes=LIFETIMES, nonce=nonce
    )


def hourly_requests(user: User) -> dict[int, int]:
    """Of all the user's keys, by start of the hour; the current one is last."""
    this_hour = models.now() // HOUR * HOUR
    hours = range(this_hour - (CHART_HOURS - 1) * HOUR, this_hour + 1, HOUR)
    # By hour and key, as the index is: a condition on the user alone would read all rows of a day.
    keys = ApiKey.select(ApiKey.id).where(ApiKey.user == user, ApiKey.last_used_at >= hours[0])
    counts = (
        HourlyUsage.select(HourlyUsage.hour, fn.SUM(HourlyUsage.requests))
        .where(HourlyUsage.hour.in_(list(hours)), HourlyUsage.key_id.in_(keys))
        .group_by(HourlyUsage.hour)
    )
    return dict.fromkeys(hours, 0) | dict(counts.tuples())


@bp.post("/keys")
@show_errors_on(security)
def create_key() -> ResponseReturnValue:
    name, type, lifetime = form_text("name"), form_text("type"), form_option("expires", LIFETIMES)
    nonce = api_keys.digest(request.form.get("nonce") or api_keys.random_text(8))[:8]
    try:
        with throttled(NEW_KEYS, g.user.id):
            key, secret = api_keys.create_key(
                g.user,
                name,
                type,
                expires_at=models.now() + lifetime if lifetime else None,
                nonce=nonce,
            )
    except api_keys.AlreadyMade as form:  # a second click, Reload or Back has sent it again
        return redirect_to(
            "web.keys.security",
            f"This form was already sent, and made the key “{form.args[0].name}”. "
            "The key was shown only once. If you did not see it, rotate it or make another.",
        )
    return render_template("key.html", key=key, secret=secret)


@bp.get("/keys/<key_id>/<any(rename, rotate, revoke):action>")
def confirm_key_change(key_id: str, action: str) -> str:
    return render_template("change-key.html", action=action, key=own_key(key_id), graces=GRACES)


@bp.post("/keys/<key_id>/rename")
@show_errors_on(partial(confirm_key_change, action="rename"))
def rename_key(key_id: str) -> ResponseReturnValue:
    old, name = own_key(key_id).name, form_text("name")
    check_fields(name=name)
    api_keys.change_key(key_id, name=name)
    return redirect_to("web.keys.security", f"The key “{old}” is now named “{name}”.")


@bp.post("/keys/<key_id>/successor")
@show_errors_on(partial(confirm_key_change, action="rotate"))
def rotate_key(key_id: str) -> ResponseReturnValue:
    grace = form_option("grace", GRACES)
    with throttled(NEW_KEYS, g.user.id):
        old, key, secret = api_keys.rotate_key(g.user, key_id, grace)
    return render_template("key.html", key=key, secret=secret, old=old)


@bp.post("/keys/<key_id>/revoke")
def revoke_key(key_id: str) -> ResponseReturnValue:
    key = own_key(key_id)
    api_keys.revoke_key(key.id)
    return redirect_to("web.keys.security", f"The key “{key.name}” is revoked.")


def own_key(key_id: str) -> ApiKey:
    """A valid key of the user; raises Changed if there is none with this id."""
    with models.database.connection_context():
        key: ApiKey | None = g.user.keys.where(ApiKey.id == key_id, ApiKey.valid()).get_or_none()
    if key is None:
        raise Changed(api_keys.KEY_IS_GONE)
    return key
