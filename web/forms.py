"""Forms: urlencoded, small, and sent from a page of this service."""

import gevent
from flask import request
from werkzeug.exceptions import abort

from web.throttles import FORMS, throttle_caller

FORM_SECONDS = 10  # for a form to arrive, in total
FORM_TYPE = "application/x-www-form-urlencoded"


def receive_form() -> None:
    """Read a form; refuse one that another site sent, or that is slow or incomplete."""
    kind = (request.content_type or FORM_TYPE).partition(";")[0].strip().lower()
    is_form = request.method == "POST"
    # Werkzeug parses no other body, and no parameters of the type, which might take it long.
    request.environ["CONTENT_TYPE"] = FORM_TYPE if is_form else ""
    if not is_form:
        return
    if not sent_from_here():  # so another site cannot use up what this caller may send
        abort(403, "This form was sent from another site, so nothing was changed.")
    throttle_caller(FORMS)
    if kind != FORM_TYPE:
        abort(415, f"A form must be sent as {FORM_TYPE}.")
    try:
        with gevent.Timeout(FORM_SECONDS, TimeoutError()):
            form = request.get_data()
    except TimeoutError:
        abort(408)
    except ConnectionError:
        abort(400)
    if len(form) < (request.content_length or 0):
        abort(400)  # the connection broke: a password may be cut short


def sent_from_here() -> bool:
    """False when a page of another site made a browser send this request.

    All browsers of recent years send Origin with a POST. So a request with neither header comes
    from a program such as curl, or from an older browser. An older browser does not send our
    cookie with another site's form, because the cookie is SameSite.
    """
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site:
        return site == "same-origin" or (site == "none" and not origin)
    host = request.headers.get("Host")  # as it was sent: `request.host` is empty for odd names
    return not origin or (bool(host) and origin.partition("://")[2] == host)


def form_text(field: str) -> str:
    return request.form.get(field, "").strip()


def form_option(field: str, choices: dict[str, int]) -> int:
    """The option chosen from a list, by default the first; our pages send nothing else."""
    choice = request.form.get(field, next(iter(choices)))
    return choices[choice] if choice in choices else abort(400)
