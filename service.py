"""The Flask application's class: what the service consists of besides its routes."""

from mimetypes import guess_type
from pathlib import Path
from typing import Any, cast

import flask
from flask import Flask, Request, Response, request
from flask.json.provider import DefaultJSONProvider
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import abort
from werkzeug.routing import MapAdapter

from ratelimit import Limiter
from rest.clients import trust_routers
from rest.headers import ALLOWANCE, API_HEADERS, PREFLIGHT, limit_headers
from rest.problems import is_api, json_text
from settings import HERE, Settings, file_limit
from storage.database import open_store
from ws.open_sockets import OpenSockets
from ws.ticker import Ticker

MAX_BODY_BYTES = 16 * 1024  # forms are small, and the API takes no body
SOCKETS = "/api/v1/ws/"  # under which all paths are WebSockets
MAX_HOST_BYTES = 255  # RFC 1035 part 2.3.4


class CompactJson(DefaultJSONProvider):
    """Writes JSON as the problems are written."""

    def dumps(self, obj: Any, **kwargs: Any) -> str:
        return json_text(obj)


class Service(Flask):
    """A Flask application with the settings, the keys and counts, and the open sockets."""

    json_provider_class = CompactJson

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__(name, static_folder=None)
        self.settings = settings
        self.store = open_store(settings)
        # Half of the open files may be connections; a quarter of these, 1,000 at most, is left for
        # requests.
        sockets = min(settings.max_sockets, max(file_limit() * 3 // 8, file_limit() // 2 - 1000))
        self.sockets = OpenSockets(sockets, settings.max_sockets_per_caller)
        self.ticker = Ticker()
        self.throttles = Limiter()  # of forms
        self.secret_key = settings.secret_key
        self.before_request(check_request)
        # Read once, so that a request for them opens no file.
        self.files = read(HERE / "web" / "static", "**/*") | read(HERE / "docs", "*api.json")
        self.add_url_rule("/static/<path:filename>", "static", send)
        self.add_url_rule("/<any('openapi.json', 'asyncapi.json'):filename>", "description", send)
        self.url_map.merge_slashes = False  # or it would redirect to whatever Host was sent

    def wsgi_app(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Add the API's headers.

        Not in `after_request`, because werkzeug would take 25 µs for them: a tenth of a request.
        """

        def start(status: str, headers: list[tuple[str, str]], *args: Any) -> Any:
            more = limit_headers(environ[ALLOWANCE]) if ALLOWANCE in environ else []
            return start_response(status, [*headers, *API_HEADERS, *more], *args)

        if self.settings.proxy_hops:
            trust_routers(environ, self.settings.proxy_hops)
        under_api = f"{environ['PATH_INFO'].lstrip('/')}/".startswith("api/")  # as Flask reads it
        return super().wsgi_app(environ, start if under_api else start_response)

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        """Match without the host, on which no route depends: Python cannot decode every name."""
        if request is None:
            return super().create_url_adapter(request)
        environ = request.environ
        host = environ.get("HTTP_HOST") or environ["SERVER_NAME"]  # as it was sent
        scheme, query = environ["wsgi.url_scheme"], environ["QUERY_STRING"]
        if request.path.startswith(SOCKETS):  # whose handshake is checked later
            scheme = scheme.replace("http", "ws")
        asked = (request.path, request.method, query)
        return MapAdapter(self.url_map, host, request.root_path, "", scheme, *asked)


current_service = cast(Service, flask.current_app)


def read(folder: Path, pattern: str) -> dict[str, bytes]:
    found = [file for file in folder.glob(pattern) if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def send(filename: str) -> ResponseReturnValue:
    """A file that never changes while the service runs; every origin may read it."""
    data = current_service.files.get(filename) or abort(404)
    headers = {"Access-Control-Allow-Origin": "*"}
    return Response(data, mimetype=guess_type(filename)[0], headers=headers)


def check_request() -> ResponseReturnValue | None:
    """Refuse a request that no view could answer, and answer OPTIONS for the API."""
    environ = request.environ
    host, is_needed = environ.get("HTTP_HOST", ""), environ["SERVER_PROTOCOL"] != "HTTP/1.0"
    is_bad = len(host) > MAX_HOST_BYTES or (is_needed and not host)  # RFC 9112 part 3.2
    if is_bad and not request.path.startswith(SOCKETS):  # a bad handshake has an error of its own
        abort(400)
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if length > MAX_BODY_BYTES or "HTTP_TRANSFER_ENCODING" in environ:  # of unknown length
        abort(413)
    if request.method == "OPTIONS" and is_api():
        response = Response(status=204, headers=PREFLIGHT)
        del response.headers["Content-Type"]
        return response
    return None
