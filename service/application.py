"""The Flask application's class, its requests, and the checks of each request."""

import logging
import secrets
from collections.abc import Callable
from functools import cache
from io import BytesIO
from typing import IO, Any, cast

import flask
import gevent
from flask import Flask, Request, Response, request
from flask.testing import FlaskClient
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import abort
from werkzeug.routing import MapAdapter
from werkzeug.utils import cached_property

from service.client_address import trust_routers
from service.responses import API_HEADERS, PREFLIGHT, Problem, is_api, limit_headers
from settings import Settings
from storage.database import backend
from storage.key_store import KeyStore

SOCKETS = "/api/v1/ws"  # under which all paths are WebSockets
MAX_BODY_BYTES = 16 * 1024
BODY_SECONDS = 10  # for a body to arrive, in total

WRONG_SERVER = (
    "Only its own gunicorn worker can serve this app: run `.venv/bin/gunicorn` in its folder, "
    "or `.venv/bin/python app.py` to try it."
)
warn_once = cache(logging.getLogger(__name__).warning)


class BoundedRequest(Request):
    """A request whose body is small and arrives in time, whether or not its length is announced."""

    @cached_property
    def stream(self) -> IO[bytes]:
        """All of the body. `form`, `get_json` and `get_data` read it here, when a view asks.

        Raises RequestEntityTooLarge (413), RequestTimeout (408), or BadRequest (400) for a body
        that is malformed or incomplete.
        """
        try:
            with gevent.Timeout(BODY_SECONDS, TimeoutError()):
                body = self.environ["wsgi.input"].read(MAX_BODY_BYTES + 1)
        except TimeoutError:
            abort(408)
        except (OSError, ParseException):
            abort(400)
        if len(body) > MAX_BODY_BYTES:
            abort(413)
        if len(body) < (self.content_length or 0):  # the connection broke
            abort(400)
        return BytesIO(body)

    def get_json(self, *args: Any, **options: Any) -> Any:
        """As Flask's own, but a body that is nested too deeply for Python is a 400, too."""
        try:
            return super().get_json(*args, **options)
        except RecursionError:
            abort(400)


def check_host_and_size() -> None:
    """Refuse a request that no view could answer."""
    environ = request.environ
    # No view needs these: files are small and have an ETag. Parsing them would take time.
    for name in ("HTTP_RANGE", "HTTP_IF_MODIFIED_SINCE", "HTTP_IF_MATCH"):
        environ.pop(name, None)
    host = environ.get("HTTP_HOST", "")
    is_missing = not host and environ["SERVER_PROTOCOL"] != "HTTP/1.0"  # RFC 9112 part 3.2
    # No name is longer (RFC 1035 part 2.3.4). A bad handshake has an error of its own.
    if (is_missing or len(host) > 255) and not request.path.startswith(f"{SOCKETS}/"):
        abort(400)
    if int(environ.get("CONTENT_LENGTH") or 0) > MAX_BODY_BYTES:
        abort(413)


class Service(Flask):
    """A Flask application with its settings, and with the store of keys and counts."""

    request_class = BoundedRequest
    has_our_worker = False  # server/worker.py sets it; nothing else keeps the service's promises

    def __init__(self, name: str, settings: Settings, is_demo: bool) -> None:
        super().__init__(name, static_folder="web/static")
        self.config["DEBUG"] = False  # FLASK_DEBUG would change bodies: indent JSON, quote forms
        self.settings = settings
        self.is_demo = is_demo
        self.store: KeyStore = backend(settings).Store(settings.database_url)
        # A service has SECRET_KEY, or does not start; tests and commands need none.
        self.secret_key = settings.secret_key or secrets.token_hex()
        self.before_request(check_host_and_size)
        self.json.ensure_ascii = self.json.sort_keys = False  # type: ignore[attr-defined]
        # Otherwise Flask would redirect, for which it needs the host.
        self.url_map.merge_slashes = self.url_map.strict_slashes = False

    def wsgi_app(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Find the client behind routers, and add the headers of the API to its responses.

        Adding them in `after_request` would cost 20 µs. Other servers and workers get a 503.
        """
        if not (self.has_our_worker or self.testing):
            warn_once(WRONG_SERVER)
            return Problem(503, detail=WRONG_SERVER)(environ, start_response)

        def start(status: str, headers: list[tuple[str, str]], *args: Any) -> Any:
            limit = limit_headers(environ["allowance"]) if "allowance" in environ else []
            return start_response(status, [*headers, *API_HEADERS, *limit], *args)

        if self.settings.proxy_hops:
            trust_routers(environ, self.settings.proxy_hops)
        return super().wsgi_app(environ, start if is_api(environ["PATH_INFO"]) else start_response)

    def test_client(self, *args: Any, **options: Any) -> FlaskClient:
        """A client for tests; before another one is used, `testing` has to be True."""
        self.testing = True
        return super().test_client(*args, **options)

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """No view is async, so Flask need not look at each function of each request."""
        return func

    def make_default_options_response(self) -> Response:
        """Answer OPTIONS, such as the pre-flight of a browser, with the methods of the path."""
        response = super().make_default_options_response()
        if is_api(request.path):
            response.headers.update(PREFLIGHT)
            response.headers["Access-Control-Allow-Methods"] = response.headers["Allow"]
        return response

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        """As Flask's own, but without the host: Flask fails for a name that Python cannot encode.

        The arguments are those that werkzeug's `bind_to_environ` passes on; `ws` finds the routes
        of WebSockets, also for requests that are no handshake.
        """
        if request is None:
            return super().create_url_adapter(request)
        return self.url_map.bind(
            server_name="",
            script_name=request.root_path,
            url_scheme="ws" if request.path.startswith(f"{SOCKETS}/") else request.scheme,
            default_method=request.method,
            path_info=request.path,
            query_args=request.environ["QUERY_STRING"],
        )


def current_service() -> Service:
    """The service that answers this request.

    It is not a proxy like Flask's, which would take 0.7 µs for each attribute.
    """
    return cast(Service, flask.current_app._get_current_object())  # type: ignore[attr-defined]
