"""The console, on which visitors try the API, and the descriptions that it is made from."""

import json
import re

from flask import Blueprint, Response, render_template, request, send_from_directory
from markupsafe import Markup, escape

from service.application import current_service
from settings import PROJECT

bp = Blueprint("console", __name__)


@bp.get("/")
def home() -> str:
    """The page of the API that is guarded, or else the console."""
    return render_template("api.html") if current_service().settings.api_url else console()


@bp.get("/console")
def console() -> str:
    return render_template("console.html", reference=reference())


def reference() -> Markup:
    """What the console says of the API, with the address under which this request came.

    Everything else in it is the same for all requests, so it is rendered only once.
    """
    rendered = current_service().extensions.get("reference")
    if rendered is None:
        rendered = render_template(
            "reference.html", http="{{http}}", ws="{{ws}}", prefix="{{prefix}}"
        )
        current_service().extensions["reference"] = rendered
    http = escape(origin() + request.root_path)
    address = {
        "http": http,
        "ws": http.replace("http", "ws", 1),
        "prefix": escape(request.root_path),
    }
    return Markup(re.sub("{{(http|ws|prefix)}}", lambda found: address[found[1]], rendered))


def origin() -> str:
    """The scheme and the host as it was sent: `request.host` is empty for names like my_host."""
    return f"{request.scheme}://{request.headers.get('Host', '')}"


@bp.get("/<any('openapi.json', 'asyncapi.json'):filename>")
def description(filename: str) -> Response:
    """A description of the API, which every origin may read."""
    response = send_from_directory(PROJECT / "docs", filename)
    response.headers["Access-Control-Allow-Origin"] = "*"
    return response


def descriptions() -> dict[str, object]:
    """Both descriptions, by the names that the templates use."""
    return {
        name: json.loads((PROJECT / "docs" / f"{name}.json").read_text())
        for name in ("openapi", "asyncapi")
    }
