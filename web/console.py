"""The console, on which visitors try the API, and the descriptions that it is made from."""

import json
from typing import Any

from flask import Blueprint, Response, render_template, send_from_directory

from settings import HERE

bp = Blueprint("console", __name__)


@bp.get("/")
def console() -> str:
    return render_template("console.html")


@bp.get("/<any('openapi.json', 'asyncapi.json'):filename>")
def description(filename: str) -> Response:
    """A description of the API, which every origin may read."""
    response = send_from_directory(HERE / "docs", filename)
    response.headers["Access-Control-Allow-Origin"] = "*"
    return response


def descriptions() -> dict[str, Any]:
    """Both descriptions, by the names that the templates use."""
    files = {name: HERE / "docs" / f"{name}.json" for name in ("openapi", "asyncapi")}
    return {name: json.loads(file.read_text()) for name, file in files.items()}
