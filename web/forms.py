"""Forms: how they are received and limited, and how a page answers them."""

from collections.abc import Callable, Collection
from functools import wraps

from flask import g, redirect, request, session, url_for
from flask.typing import ResponseReturnValue
from gevent.lock import BoundedSemaphore
from werkzeug.exceptions import ServiceUnavailable, TooManyRequests, abort

from accounts import users
from models import InvalidInput, User
from ratelimit import Quota
from service.application import current_service
from service.client_address import client_network
from service.responses import is_api

FORM_TYPE = "application/x-www-form-urlencoded"
MAX_FIELDS = 50  # of a form
# Limits on what is expensive: for each caller, user and account.
FORMS = Quota("forms of a caller", 60, 60)
SIGN_UPS = Quota("accounts of a caller", 20, 3600)
NEW_KEYS = Quota("new keys of a user", 30, 3600)
PASSWORDS = Quota("passwords of a caller", 20, 60)
PASSWORDS_FOR_ACCOUNT = Quota("passwords for an account", 100, 60)  # of all callers
BUCKETS = 16384  # for each of these quotas
hash_slots = BoundedSemaphore(60)  # of forms that wait for hashes, which takes 3 s

View = Callable[..., ResponseReturnValue]


def read_form() -> None:
    """Read a form before its page has a turn; refuse one that is incomplete or late.

    A POST to a path without a form matches no route, so its body is ignored.
    """
    if request.method == "POST" and request.url_rule and not is_api(request.path):
        request.get_data()


def check_form() -> None:
    """Refuse a form of another site (CSRF) or of another type, and count it for its caller."""
    kind = (request.content_type or FORM_TYPE).partition(";")[0].strip().lower()
    # With this type, werkzeug parses forms only, and no parameters of a type, which can be slow.
    request.environ["CONTENT_TYPE"] = FORM_TYPE if request.method == "POST" else ""
    if request.method != "POST":
        return
    if not sent_from_here():  # before it counts, or another site could use up the caller's forms
        abort(
            403,
            "This form was sent from another site, so nothing was changed. If it was not, the "
            "proxy in front of this service must pass on the Host header as it is, with the port.",
        )
    if kind != FORM_TYPE:
        abort(415, f"A form must be sent as {FORM_TYPE}.")
    # Thousands of fields would take 20 ms to parse.
    if request.get_data().count(b"&") > MAX_FIELDS:
        abort(413)
    take_slot()
    throttle_caller(FORMS)


def sent_from_here() -> bool:
    """False when a page of another site made a browser send this request.

    All browsers of recent years send Origin with a POST. So a request with neither header comes
    from a program such as curl, or from an older browser. An older browser does not send our
    cookie with another site's form, because the cookie is SameSite.
    """
    origin = request.headers.get("Origin")
    if site := request.headers.get("Sec-Fetch-Site"):
        return site == "same-origin" or (site == "none" and not origin)
    host = request.headers.get("Host")  # as it was sent: `request.host` is empty for odd names
    return not origin or origin in (f"http://{host}", f"https://{host}")


def form_text(field: str) -> str:
    return request.form.get(field, "").strip()


def form_option(field: str, options: Collection[str]) -> str:
    """The option that was chosen, by default the first one; our pages send no others."""
    choice = request.form.get(field, next(iter(options)))
    return choice if choice in options else abort(400)


def show_errors_on(page: Callable[..., str]) -> Callable[[View], View]:
    """Let this page show what is wrong with a form (`g.errors`), and what was typed."""

    def decorate(view: View) -> View:
        @wraps(view)
        def handle(**arguments: str) -> ResponseReturnValue:
            try:
                return view(**arguments)
            except InvalidInput as invalid:
                g.errors = invalid.errors
                return page(**arguments), 422  # Unprocessable Content

        return handle

    return decorate


def redirect_with_message(endpoint: str, message: str) -> ResponseReturnValue:
    """Show the message on the page of this endpoint.

    `flash` would add it to a list in the session, which a client that opens no page could make
    longer with each form.
    """
    session["message"] = message
    return redirect(url_for(endpoint), 303)


def take_slot() -> None:
    """Take one of the `hash_slots` for a form with a password; raises ServiceUnavailable."""
    if {"password", "current"} & request.form.keys():
        if not hash_slots.acquire(blocking=False):
            raise ServiceUnavailable(retry_after=3)
        g.has_slot = True


def free_slot(error: BaseException | None) -> None:
    """Free what `take_slot` took, however the request has ended."""
    if "has_slot" in g:
        hash_slots.release()


def throttle(quota: Quota, *counted_for: object) -> None:
    """Count for this caller, user or account; raises TooManyRequests when the quota is used up.

    Made-up names must not fill the memory, so each is counted in one of a bounded number of
    buckets. Python's hash of a string differs from process to process (unless PYTHONHASHSEED is
    set), so an attacker cannot aim at the bucket of another user.
    """
    # A hash of numbers alone would be the same in all processes.
    bucket = f"{quota.tier} {hash((quota.tier, *counted_for)) % BUCKETS}"
    allowance = current_service().extensions["throttles"].hit(bucket, quota)
    if not allowance.accepted:
        raise TooManyRequests(retry_after=allowance.seconds_left)


def throttle_caller(*quotas: Quota) -> None:
    """Count for the caller in each of these quotas, in order; raises TooManyRequests."""
    for quota in quotas:
        throttle(quota, client_network(request.remote_addr))


def hash_throttled(password: str, *more: Quota) -> str:
    """Hash a new password, after counting it for the caller in PASSWORDS and in `more`.

    PASSWORDS comes first, so a password that is refused uses up nothing else. Raises InvalidInput
    and TooManyRequests.
    """
    throttle_caller(PASSWORDS, *more)
    return users.hash_password(password)


def verify_throttled(user: User | None, name: str, password: str) -> bool:
    """Whether this is the password of the user; False if there is no user of that name.

    It is counted before it is hashed, right or wrong: first for the caller, so that one address can
    neither lock an account nor make others wait, then for the account. A name without a user has
    the same limit. Raises TooManyRequests.
    """
    throttle_caller(PASSWORDS)
    throttle(PASSWORDS_FOR_ACCOUNT, user.id if user else name.lower())
    return users.verify_password(user, password)
