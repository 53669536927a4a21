"""The Flask application's class: what the service consists of besides its routes."""

from typing import Any, cast

import flask
from flask import Flask, Request, request, send_file
from flask.json.provider import DefaultJSONProvider
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import MethodNotAllowed, abort
from werkzeug.routing import MapAdapter

from ratelimit import Limiter
from rest.callers import trust_routers
from rest.headers import ALLOWANCE, API_HEADERS, PREFLIGHT, limit_headers
from rest.problems import is_api, json_text
from settings import HERE, Settings
from storage.database import open_store
from ws.open_sockets import OpenSockets
from ws.ticker import Ticker

MAX_BODY_BYTES = 16 * 1024  # forms are small, and the API takes no body
SOCKETS = "/api/v1/ws"  # under which all paths are WebSockets
# Files have one ETag each instead. For some dates, werkzeug would raise an OverflowError.
UNUSED_HEADERS = ("IF_MATCH", "IF_MODIFIED_SINCE", "IF_UNMODIFIED_SINCE", "IF_RANGE", "RANGE")
MAX_NAME_BYTES = 255  # of a Host (RFC 1035 part 2.3.4), and of the ETags in If-None-Match


class CompactJson(DefaultJSONProvider):
    """Writes JSON as the problems are written."""

    def dumps(self, obj: Any, **kwargs: Any) -> str:
        return json_text(obj)


class Service(Flask):
    """A Flask application with the settings, the keys and counts, and the open sockets."""

    json_provider_class = CompactJson

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__(name, static_folder="web/static")
        self.settings = settings
        self.store = open_store(settings)
        self.sockets = OpenSockets(settings.socket_limit, settings.max_sockets_per_caller)
        self.ticker = Ticker()
        self.throttles = Limiter()  # of forms
        self.secret_key = settings.secret_key
        self.before_request(check_request)
        self.add_url_rule("/<any('openapi.json', 'asyncapi.json'):name>", view_func=description)
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
        under_api = environ["PATH_INFO"].lstrip("/").startswith("api/")  # as Flask reads the path
        return super().wsgi_app(environ, start if under_api else start_response)

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        """Match without the host, on which no route depends.

        Python cannot decode every name, and to match without it saves 10 % of a request.
        """
        if request is None:
            return super().create_url_adapter(request)
        environ = request.environ
        host = environ.get("HTTP_HOST") or environ["SERVER_NAME"]  # as it was sent
        scheme = environ["wsgi.url_scheme"]
        is_upgrade = environ.get("HTTP_UPGRADE", "").lower() == "websocket"
        if is_upgrade or request.path.startswith(SOCKETS):  # whose handshake is checked later
            scheme = scheme.replace("http", "ws")
        names = {"server_name": host, "script_name": request.root_path, "subdomain": ""}
        asked = {"path_info": request.path, "query_args": environ["QUERY_STRING"]}
        how = {"url_scheme": scheme, "default_method": request.method}
        return MapAdapter(self.url_map, **names, **asked, **how)


current_service = cast(Service, flask.current_app)


def description(name: str) -> ResponseReturnValue:
    """The description of the API, which every origin may read."""
    return send_file(HERE / "docs" / name), {"Access-Control-Allow-Origin": "*"}


def check_request() -> ResponseReturnValue | None:
    """Refuse a request that no view could answer, and answer a CORS preflight."""
    environ = request.environ
    for name in UNUSED_HEADERS:
        environ.pop(f"HTTP_{name}", None)
    if environ["REQUEST_METHOD"] == "CONNECT":  # of which gunicorn makes some path
        raise MethodNotAllowed(["GET", "HEAD", "OPTIONS"])
    if len(environ.get("HTTP_IF_NONE_MATCH", "")) > MAX_NAME_BYTES:
        del environ["HTTP_IF_NONE_MATCH"]
    host, is_needed = environ.get("HTTP_HOST", ""), environ["SERVER_PROTOCOL"] == "HTTP/1.1"
    is_bad = len(host) > MAX_NAME_BYTES or (is_needed and not host)  # RFC 9112 part 3.2
    if is_bad and not request.path.startswith(SOCKETS):  # a bad handshake has an error of its own
        abort(400)
    if "HTTP_TRANSFER_ENCODING" in environ:  # a body of unknown length
        abort(413 if is_api() else 411)
    if int(environ.get("CONTENT_LENGTH") or 0) > MAX_BODY_BYTES:
        abort(413)
    if "HTTP_ACCESS_CONTROL_REQUEST_METHOD" in environ and request.method == "OPTIONS" and is_api():
        return "", 204, PREFLIGHT
    return None
