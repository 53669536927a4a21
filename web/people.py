"""Signing up, logging in and out, who is logged in, and what all forms share."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from hashlib import sha256
from hmac import compare_digest

from flask import Blueprint, g, redirect, render_template, request, session
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import TooManyRequests, abort

import accounts
from models import Invalid, Taken, User, database
from protocol.application import caller
from ratelimit import Quota
from services import services

# How often forms may be sent that hash a password, or that tell whether a name is taken.
ATTEMPTS = Quota("attempts of a caller", 30, 60)
ATTEMPTS_AT_ONCE = 4  # of a caller
ATTEMPTS_ON_ACCOUNT = Quota("attempts on an account", 100, 60)
FAILURES = Quota("wrong passwords of a caller for an account", 10, 60)
TAKEN_NAMES = Quota("answers that a name is taken", 20, 3600)
RENAMES = Quota("keys that a user renames", 10, 60)
BUCKETS = 16384  # for each of these quotas
OWN_PAGE = re.compile("/settings(/[A-Za-z0-9-]+)*")  # where a log-in may lead: never to other sites

View = Callable[..., ResponseReturnValue]

bp = Blueprint("people", __name__)


def errors_shown_by(page: Callable[..., str]) -> Callable[[View], View]:
    """Let this page show what is wrong with a form (`g.errors`), and what was typed.

    That a name is taken tells who has an account, so these answers are counted.
    """

    def decorate(view: View) -> View:
        @wraps(view)
        def handle(**arguments: str) -> ResponseReturnValue:
            try:
                return view(**arguments)
            except Invalid as invalid:
                g.errors = invalid.errors
                if isinstance(invalid, Taken):
                    throttle_names()
                return page(**arguments), 422  # Unprocessable Content

        return handle

    return decorate


@bp.before_request
def skip_entrance() -> ResponseReturnValue | None:
    """Refuse to sign anybody up when sign-up is closed; redirect users who are logged in."""
    if request.path == "/sign-up" and not services().settings.signups:
        abort(403, "Sign-up is closed. Ask whoever runs this service for an account.")
    return redirect(destination(), 303) if g.user and request.method == "GET" else None


@bp.get("/<any('sign-up', 'log-in'):page>")
def entrance(page: str) -> str:
    return render_template(f"{page}.html")


@contextmanager
def attempt() -> Iterator[None]:
    """Around whatever hashes a password; raises TooManyRequests.

    Hashes are made one after another, so nobody may have more than a few in progress.
    """
    who = caller(request.remote_addr)
    throttle(ATTEMPTS, who)
    attempts = services().attempts
    if attempts.count(who) >= ATTEMPTS_AT_ONCE:
        raise TooManyRequests(retry_after=1)
    attempts.append(who)
    try:
        yield
    finally:
        attempts.remove(who)


@bp.post("/sign-up")
@errors_shown_by(partial(entrance, page="sign-up"))
@attempt()
def sign_up() -> ResponseReturnValue:
    username, email, password = typed("username"), typed("email"), request.form.get("password", "")
    throttle_names(cost=0)
    return enter(accounts.create(username, email, password))


@bp.post("/log-in")
@errors_shown_by(partial(entrance, page="log-in"))
@attempt()
def log_in() -> ResponseReturnValue:
    user = authenticate(typed("username"), request.form.get("password", ""))
    if not user:
        raise Invalid(password="Wrong user name or password.")
    return enter(user)


@bp.post("/log-out")
def log_out() -> ResponseReturnValue:
    session.clear()
    return redirect("/", 303)


def authenticate(name: str, password: str) -> User | None:
    """The user of this name if this is the password; raises TooManyRequests.

    The limit is checked before the password and again after it, so even many simultaneous
    guesses get only ten answers.
    """
    user = accounts.find_user(name)
    name = user.username if user else name  # it may be typed as an email address
    throttle(ATTEMPTS_ON_ACCOUNT, name)
    # By caller, so that nobody can lock the owner out with a few wrong passwords.
    guesses = f"{caller(request.remote_addr)} {name}"
    throttle(FAILURES, guesses, cost=0)
    is_right = accounts.verify_password(user, password)
    # Counts only a wrong password, but refuses even the right one when the limit is reached.
    throttle(FAILURES, guesses, cost=0 if is_right else 1)
    return user if is_right else None


def throttle_names(cost: int = 1) -> None:
    """Count that somebody is told that a name is taken; raises TooManyRequests."""
    throttle(TAKEN_NAMES, caller(request.remote_addr), cost)
    if g.user:
        throttle(TAKEN_NAMES, f"user {g.user.id}", cost)


def throttle(quota: Quota, who: str, cost: int = 1) -> None:
    """Count an attempt; raises TooManyRequests when the quota is used up.

    Made-up names must not fill the memory, so everybody is counted in one of a bounded number of
    buckets. Nobody can choose whose bucket to share, because Python's hash of a string differs
    from process to process.
    """
    bucket = f"{quota.tier} {hash(who.lower()) % BUCKETS}"
    allowance = services().throttles.hit(bucket, quota, cost=cost)
    if not allowance.accepted:
        raise TooManyRequests(retry_after=allowance.seconds_left)


def enter(user: User) -> ResponseReturnValue:
    """Begin a session of this user; nothing of an earlier session is kept."""
    session.clear()
    session.update(user=user.id, mark=session_mark(user.password_hash))
    return redirect(destination(), 303)


def destination() -> str:
    """Where a log-in leads: to the page that asked for it, or to the keys."""
    page = request.args.get("next", "")
    return page if OWN_PAGE.fullmatch(page) else "/settings/security"


def recognize() -> None:
    """Find out who is logged in: `g.user`, or None; raises PeeweeException."""
    g.errors, user = {}, None
    if "user" in session:
        with database.connection_context():
            user = User.get_or_none(User.id == session["user"])
        if not user or not compare_digest(session_mark(user.password_hash), session["mark"]):
            user = None
            session.clear()
    g.user = user


def session_mark(password_hash: str) -> str:
    """A value that changes with the password, which ends all sessions begun with an older one."""
    return sha256(password_hash.encode()).hexdigest()[:16]


def typed(field: str) -> str:
    return request.form.get(field, "").strip()


def chosen(field: str, choices: dict[str, int]) -> int:
    """The option chosen from a list, by default the first; our pages send nothing else."""
    choice = request.form.get(field, next(iter(choices)))
    return choices[choice] if choice in choices else abort(400)


def redirect_to(page: str, message: str) -> ResponseReturnValue:
    """Show the message on that page.

    Not by `flash`, which adds to a list in the session: a client that opens no page could make it
    longer with each form.
    """
    session["message"] = message
    return redirect(page, 303)
