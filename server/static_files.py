"""Style sheet, script, icon, and the descriptions of the API."""

from mimetypes import guess_type
from pathlib import Path

from flask import Flask, Response, request
from werkzeug.exceptions import abort
from werkzeug.http import generate_etag

from settings import HERE


def register(app: Flask) -> None:
    """Serve the files as they are now: they are read once, so that no request opens one."""
    files = read(HERE / "web" / "static", "**/*") | read(HERE / "docs", "*api.json")

    def send(filename: str) -> Response:
        data = files.get(filename) or abort(404)
        headers = {"Access-Control-Allow-Origin": "*", "Cache-Control": "no-cache"}
        headers["ETag"] = etag = f'"{generate_etag(data)}"'
        # Not make_conditional: werkzeug takes long to parse a header that is a list of thousands.
        if etag in request.headers.get("If-None-Match", ""):
            return Response(status=304, headers=headers)
        return Response(data, headers=headers, mimetype=guess_type(filename)[0])

    app.add_url_rule("/static/<path:filename>", "static", send)
    app.add_url_rule("/<any('openapi.json', 'asyncapi.json'):filename>", "description", send)


def read(folder: Path, pattern: str) -> dict[str, bytes]:
    found = [file for file in folder.glob(pattern) if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}
