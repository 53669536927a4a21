"""How the API key of a request is checked and counted: @require_api_key."""

from collections.abc import Callable
from functools import wraps
from hmac import compare_digest
from typing import Any

from flask import request
from flask.typing import ResponseReturnValue

from accounts.api_keys import digest, has_right_checksum, id_in
from models import PREFIXES, ApiKey
from ratelimit import DEFAULT_TIER, Allowance, Quota
from service.application import current_service, warn_once
from service.responses import Problem, rate_limited

# curl drops a header whose value is empty, so a missing key and an empty one look the same.
EMPTY_KEY = "If you did, it was empty: check that the variable with the key, such as $KEY, is set."
CHALLENGE = {"WWW-Authenticate": 'ApiKey realm="api", header="X-API-Key"'}

View = Callable[..., ResponseReturnValue]  # takes a key, its Allowance, the URL's arguments


def require_api_key(view: View | None = None, *, enforce_limit: bool = True) -> Any:
    """Call the view only with a valid key, and count the request; 429 when nothing is left.

    The view gets the key and its Allowance, and then the arguments of the URL. If `enforce_limit`
    is False, it is also called when nothing is left; such a request is not counted.
    """

    def decorate(view: View) -> View:
        @wraps(view)
        def guarded(**arguments: object) -> ResponseReturnValue:
            key = require_key(request.environ.get("HTTP_X_API_KEY"))
            return view(key, count_request(key, enforce_limit), **arguments)

        return guarded

    return decorate(view) if view else decorate


def require_key(sent_key: str | None, or_where: str = "") -> ApiKey:
    """The row of the key that was sent; raises Problem 401 if it is not valid, and PeeweeException.

    `or_where` names another place where the client may send the key.
    """
    if not sent_key:
        raise Problem(
            401,
            "missing_api_key",
            f"Send your key in the X-API-Key header{or_where}. {EMPTY_KEY}",
            headers=CHALLENGE,
        )
    if key := find_key(sent_key):
        return key
    raise invalid_key()


def find_key(sent_key: str) -> ApiKey | None:
    """The row of the key, or None if the key is malformed, unknown, wrong or expired.

    Any other reason to refuse a key belongs here, too: `/status` calls nothing else.
    """
    key_id = id_in(sent_key)
    if key_id is None or not has_right_checksum(sent_key):
        return None
    key = current_service().store.find(key_id)
    if key and not key.has_expired and compare_digest(key.digest, digest(sent_key)):
        return key
    return None


def count_request(key: ApiKey, enforce_limit: bool = True) -> Allowance:
    """Count this request if something is left, and send what is left in the headers.

    Raises Problem 401 if the key was just deleted, Problem 429 if nothing was left (but not if
    `enforce_limit` is False), and PeeweeException.
    """
    allowance = current_service().store.hit(key.id, quota_of(key))
    if allowance is None:
        raise invalid_key()
    request.environ["allowance"] = allowance  # Service adds the headers of the limit, to a 429, too
    if enforce_limit and not allowance.accepted:
        raise rate_limited(allowance)
    return allowance


def quota_of(key: ApiKey) -> Quota:
    """The quota of the key's tier, or that of `free` if RATE_LIMITS lacks the tier."""
    quotas = current_service().settings.rate_limits
    if key.tier not in quotas:
        warn_once("RATE_LIMITS has no tier %s; its keys are treated as %s", key.tier, DEFAULT_TIER)
    return quotas.get(key.tier, quotas[DEFAULT_TIER])


def invalid_key() -> Problem:
    """The same response for every kind of invalid key."""
    return Problem(
        401,
        "invalid_api_key",
        f"This API key is not valid. A key begins with {' or '.join(PREFIXES.values())}, followed "
        "by 47 characters, without quotes, spaces, or Bearer.",
        headers=CHALLENGE,
    )
