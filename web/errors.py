"""The error pages of the website."""

from contextlib import suppress

from flask import g, redirect, render_template, request
from flask.typing import ResponseReturnValue
from peewee import PeeweeException
from werkzeug.exceptions import HTTPException

from models import Changed
from service.problems import title_of
from web.forms import redirect_with_message
from web.sessions import load_user


def nothing_was_changed(error: Changed) -> ResponseReturnValue:
    """Say so on the API keys page, or on the log-in page if the account itself was changed."""
    with suppress(PeeweeException):  # raised here, it would become a 500
        load_user()
    page = "web.security.keys" if g.user else "web.log_in.log_in_form"
    return redirect_with_message(page, str(error))


def error_page(error: HTTPException) -> ResponseReturnValue:
    """An error in the pages' layout."""
    # A GET of a form's address means that the user has reloaded the response to the form. Go to
    # the form's tab: /settings/profile or /settings/security.
    if error.code == 405 and request.method == "GET" and request.path.startswith("/settings"):
        return redirect(request.root_path + "/".join(request.path.split("/")[:3]), 303)
    # The user is not loaded yet for a path that does not exist. If the database has just failed,
    # another query might take as long again.
    if "user" not in g and error.code != 503:
        with suppress(PeeweeException):
            load_user()
    response = error.get_response()
    phrase = title_of(error.code or 500)
    response.set_data(render_template("error.html", error=error, response=response, phrase=phrase))
    return response
