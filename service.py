"""The Flask application's class: what the service consists of besides its routes."""

from typing import Any, cast

import flask
from flask import Flask, Request, Response, send_from_directory
from werkzeug.routing import MapAdapter

from ratelimit import Limiter
from rest.clients import trust_routers
from rest.headers import ALLOWANCE, API_HEADERS, limit_headers
from rest.problems import CompactJson
from rest.requests import SOCKETS, check_request
from settings import HERE, Settings, max_websockets
from storage.database import backend
from storage.store import Store
from ws.open_sockets import OpenSockets


class Service(Flask):
    """A Flask application with the settings, the keys and counts, and the open sockets."""

    json_provider_class = CompactJson

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__(name, static_folder="web/static")
        self.settings = settings
        self.store: Store = backend(settings).KeyStore(settings.database_url)
        sockets = min(settings.max_sockets, max_websockets())
        self.sockets = OpenSockets(sockets, settings.max_sockets_per_caller)
        self.throttles = Limiter()  # of forms
        self.secret_key = settings.secret_key
        self.before_request(check_request)
        descriptions = "/<any('openapi.json', 'asyncapi.json'):filename>"
        self.add_url_rule(descriptions, "description", send_description)
        self.url_map.merge_slashes = False  # or it would redirect to the address in the Host header

    def wsgi_app(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Add the API's headers: in `after_request`, werkzeug would take longer."""

        def start(status: str, headers: list[tuple[str, str]], *args: Any) -> Any:
            more = limit_headers(environ[ALLOWANCE]) if ALLOWANCE in environ else []
            return start_response(status, [*headers, *API_HEADERS, *more], *args)

        if self.settings.proxy_hops:
            trust_routers(environ, self.settings.proxy_hops)
        under_api = f"{environ['PATH_INFO'].lstrip('/')}/".startswith("api/")  # as Flask reads it
        return super().wsgi_app(environ, start if under_api else start_response)

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        """Match without the host: Flask's own method fails for names that Python cannot decode."""
        if request is None:
            return super().create_url_adapter(request)
        environ = request.environ
        host = environ.get("HTTP_HOST") or environ["SERVER_NAME"]  # as it was sent
        scheme, query = environ["wsgi.url_scheme"], environ["QUERY_STRING"]
        if request.path.startswith(SOCKETS):  # whose handshake is checked later
            scheme = scheme.replace("http", "ws")
        asked = (request.path, request.method, query)
        return MapAdapter(self.url_map, host, request.root_path, "", scheme, *asked)


def send_description(filename: str) -> Response:
    """A description of the API, which every origin may read."""
    response = send_from_directory(HERE / "docs", filename)
    response.headers["Access-Control-Allow-Origin"] = "*"
    return response


current_service = cast(Service, flask.current_app)
