"""The keys of a user: create, rename, rotate and revoke."""

import hmac
import secrets
from collections.abc import Callable
from functools import partial

from flask import Blueprint, abort, current_app, g, render_template, request
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
MIN_TOKEN = 16  # characters of a form's random token
SHOWN_SECONDS = 60  # in which a form that is sent again shows its key again

pages = Blueprint("keys", __name__, url_prefix="/security/keys")


@pages.post("")
def create() -> ResponseReturnValue:
    name, type, days = typed("name"), typed("type"), LIFETIMES[typed("expires") or "never"]
    end = days and models.now() + days * DAY
    return show_once(lambda random: auth.create_key(g.user, name, type, "free", end, random))


@pages.post("/<key_id>")
def rename(key_id: str) -> ResponseReturnValue:
    old, name = own_key(key_id).name, typed("name")
    accounts.check(name=name)
    words = f"The key {old} is now named {name}."
    return change(words, partial(models.change_key, key_id, name=name))


@pages.get("/<key_id>/<any(rotate, revoke):action>")
def confirm(key_id: str, action: str) -> str:
    return render_template(f"{action}.html", key=own_key(key_id), graces=GRACES)


@pages.post("/<key_id>/successor")
def rotate(key_id: str) -> ResponseReturnValue:
    grace = GRACES[typed("grace") or "in 24 hours"]
    return show_once(lambda random: auth.rotate_key(own_key(key_id), grace, random))


@pages.post("/<key_id>/revoke")
def revoke(key_id: str) -> ResponseReturnValue:
    words = f"The key {own_key(key_id).name} is revoked."
    return change(words, partial(models.revoke_key, key_id))


def change(words: str, act: Callable[[], bool]) -> ResponseReturnValue:
    """Change a key, and show these words, or that the key has already ended."""
    with database.connection_context():
        changed = act()
    auth.guard().refresh()
    return lead_to("/settings/security", words if changed else "This key has already ended.")


def own_key(key_id: str) -> ApiKey:
    with database.connection_context():
        key: ApiKey | None = ApiKey.get_or_none(ApiKey.id == key_id, ApiKey.user == g.user)
    return key or abort(404)


def show_once(make: Callable[[str], tuple[ApiKey, str]]) -> ResponseReturnValue:
    """Make the key of this form, and show it: no other response holds the secret.

    The random part of the key is derived from the form. So a form that is sent twice, by a second
    click on a slow server, makes one key, and the response that the browser keeps shows it.
    """
    random = random_part()
    with database.connection_context(), database.atomic():
        models.lock(g.user)
        key = ApiKey.get_or_none(ApiKey.id == random[: auth.ID_LENGTH]) or make(random)[0]
    auth.guard().refresh()  # a key was rotated
    if key.state == "live" and key.created_at >= models.now() - SHOWN_SECONDS:
        return render_template("key.html", key=key, secret=auth.full_key(key.type, random))
    words = f"This form has already made the key {key.name}. A key is shown only once."
    return lead_to("/settings/security", words)


def random_part() -> str:
    """Derived from SECRET_KEY and the form, so that nobody can guess it: the form has a token.

    A request that was written by hand may have no such token; it gets random bytes instead.
    """
    token = request.form.get("form", "").partition(".")[2]
    salt = request.get_data() if len(token) >= MIN_TOKEN else secrets.token_bytes()
    form = request.path.encode() + b"\n" + salt
    number = hmac.digest(str(current_app.secret_key).encode(), form, "sha512")
    return auth.base62(int.from_bytes(number, "big"), auth.RANDOM_LENGTH)
