"""The keys of a user: create, rename, rotate and revoke."""

from collections.abc import Callable
from functools import partial

from flask import Blueprint, abort, g, render_template
from flask.typing import ResponseReturnValue
from werkzeug.datastructures import ImmutableMultiDict

import accounts
import auth
import models
from models import DAY, ApiKey, database
from web.people import lead_to, typed

# In days and in seconds; any other choice is answered 400.
LIFETIMES = ImmutableMultiDict({"never": None, "30 days": 30, "90 days": 90, "1 year": 365})
GRACES = ImmutableMultiDict({"in 24 hours": auth.GRACE_SECONDS, "now": 0})

pages = Blueprint("keys", __name__, url_prefix="/security/keys")


@pages.post("")
def create() -> ResponseReturnValue:
    name, type, days = typed("name"), typed("type"), LIFETIMES[typed("expires") or "never"]
    end = days and models.now() + days * DAY
    return show_once(lambda: auth.create_key(g.user, name, type, expires_at=end))


@pages.post("/<key_id>")
def rename(key_id: str) -> ResponseReturnValue:
    old, name = own_key(key_id).name, typed("name")
    accounts.check_fields(name=name)
    words = f"The key {old} is now named {name}."
    return change(words, partial(auth.change_key, key_id, name=name))


@pages.get("/<key_id>/<any(rotate, revoke):action>")
def confirm(key_id: str, action: str) -> str:
    return render_template(f"{action}.html", key=own_key(key_id), graces=GRACES)


@pages.post("/<key_id>/successor")
def rotate(key_id: str) -> ResponseReturnValue:
    grace = GRACES[typed("grace") or "in 24 hours"]
    return show_once(lambda: auth.rotate_key(own_key(key_id), grace))


@pages.post("/<key_id>/revoke")
def revoke(key_id: str) -> ResponseReturnValue:
    words = f"The key {own_key(key_id).name} is revoked."
    return change(words, partial(auth.revoke_key, key_id))


def change(words: str, act: Callable[[], bool]) -> ResponseReturnValue:
    """Change a key, and show these words, or that the key has already ended."""
    with database.connection_context():
        changed = act()
    auth.guard().forget()
    return lead_to("/settings/security", words if changed else "This key has already ended.")


def own_key(key_id: str) -> ApiKey:
    with database.connection_context():
        key: ApiKey | None = ApiKey.get_or_none(ApiKey.id == key_id, ApiKey.user == g.user)
    return key or abort(404)


def show_once(make: Callable[[], tuple[ApiKey, str]]) -> ResponseReturnValue:
    """Make a key, and show it: no other response holds the secret."""
    key, secret = make()
    auth.guard().forget()
    return render_template("key.html", key=key, secret=secret)
