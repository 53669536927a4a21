"""Signing up, logging in and out, and who is logged in."""

import re
from hashlib import sha256
from hmac import compare_digest

from flask import Blueprint, current_app, flash, g, redirect, render_template, request, session
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import TooManyRequests, abort

import accounts
from accounts import Invalid
from models import User, database
from ratelimit import Quota

ATTEMPTS = Quota("attempts of an address", 30, 60)
SIGN_UPS = Quota("sign-ups of an address", 20, 3600)
CLAIMS = Quota("sign-ups for a name", 10, 60)
FAILURES = Quota("wrong passwords of an account", 10, 60)
OWN_PAGE = re.compile("/settings(/[A-Za-z0-9-]+)*")  # where a log-in may lead: to no other site

pages = Blueprint("people", __name__)


@pages.get("/<any('sign-up', 'log-in'):page>")
def entrance(page: str) -> str:
    return render_template(f"{page}.html")


@pages.post("/sign-up")
def sign_up() -> ResponseReturnValue:
    username, email, password = typed("username"), typed("email"), request.form.get("password", "")
    throttle(ATTEMPTS, request.remote_addr)
    accounts.check_fields(
        username=username, email=email, password=password
    )  # a mistake is no sign-up
    throttle(SIGN_UPS, request.remote_addr)
    throttle(CLAIMS, username)
    return enter(accounts.create(username, email, password))


@pages.post("/log-in")
def log_in() -> ResponseReturnValue:
    throttle(ATTEMPTS, request.remote_addr)
    user = prove(typed("username"), request.form.get("password", ""))
    if not user:
        raise Invalid(password="The user name, the email or the password is wrong.")
    return enter(user)


@pages.post("/log-out")
def log_out() -> ResponseReturnValue:
    session.clear()
    return redirect("/", 303)


@pages.before_request
def lead_past() -> ResponseReturnValue | None:
    """Hide the sign-up page when sign-up is closed; redirect users who are logged in."""
    if request.path == "/sign-up" and not current_app.extensions["settings"].signups:
        abort(404)
    return redirect(destination(), 303) if g.user and request.method == "GET" else None


def prove(username: str, password: str) -> User | None:
    """The user of this name if this is the password; raises TooManyRequests.

    The limit is checked before the password and again after it, so of many guesses at once, too,
    only ten get an answer.
    """
    user = accounts.find(username)
    username = user.username if user else username  # it may be typed as an email address
    throttle(FAILURES, username, cost=0)
    right = accounts.verify_password(user, password)
    throttle(FAILURES, username, cost=not right)
    return user if right else None


def throttle(quota: Quota, who: str | None, cost: int = 1) -> None:
    """Count an attempt; raises TooManyRequests when the quota is used up."""
    name = f"{quota.tier} {(who or '').lower()[:64]}"
    allowance = current_app.extensions["throttles"].hit(name, quota, cost=cost)
    if not allowance.accepted:
        raise TooManyRequests(retry_after=allowance.seconds_left)


def enter(user: User) -> ResponseReturnValue:
    """Begin a session of this user; nothing of an earlier session is kept."""
    session.clear()
    session.update(user=user.id, mark=mark(user))
    return redirect(destination(), 303)


def lead_to(page: str, message: str) -> ResponseReturnValue:
    flash(message)
    return redirect(page, 303)


def destination() -> str:
    """Where a log-in leads: to the page that asked for it, or to the keys."""
    page = request.args.get("next", "")
    return page if OWN_PAGE.fullmatch(page) else "/settings/security"


def recognise() -> None:
    """Find out who is logged in: `g.user`, or None."""
    g.user, g.errors = None, {}
    if "user" in session:
        with database.connection_context():
            user = User.get_or_none(User.id == session["user"])
        if user and compare_digest(mark(user), session["mark"]):
            g.user = user
        else:
            session.clear()


def require_own_form() -> None:
    """Refuse a form that was made for another account, in an old tab for example.

    All forms of the pages name their account; a request that was written by hand need not.
    """
    account = request.form.get("form", "").partition(".")[0]
    if g.user and "form" in request.form and account != str(g.user.id):
        abort(409)


def mark(user: User) -> str:
    """Changes with the password, and so ends all sessions that began with another."""
    return sha256(user.password_hash.encode()).hexdigest()[:16]


def typed(name: str) -> str:
    return request.form.get(name, "").strip()
