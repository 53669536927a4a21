"""Forms: how they are received, and how a page answers them."""

from collections.abc import Callable, Collection
from functools import wraps

from flask import g, redirect, request, session, url_for
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import abort

from models import InvalidInput
from web.throttles import FORMS, take_place, throttle_caller

FORM_TYPE = "application/x-www-form-urlencoded"

View = Callable[..., ResponseReturnValue]


def receive_form() -> None:
    """Read a form; refuse one that another site has sent, or that is of another type."""
    kind = (request.content_type or FORM_TYPE).partition(";")[0].strip().lower()
    is_form = request.method == "POST"
    # So werkzeug parses only forms, and not the parameters of the type, which can be slow.
    request.environ["CONTENT_TYPE"] = FORM_TYPE if is_form else ""
    if not is_form:
        return
    if not sent_from_here():  # so another site cannot use up what this caller may send
        abort(
            403,
            "This form was sent from another site, so nothing was changed. If it was not, the "
            "proxy in front of this service must pass on the Host header as it is, with the port.",
        )
    if kind == FORM_TYPE:
        request.get_data()  # a form that is incomplete or late is refused before anything is done
        take_place()
    throttle_caller(FORMS)
    if kind != FORM_TYPE:
        abort(415, f"A form must be sent as {FORM_TYPE}.")


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
