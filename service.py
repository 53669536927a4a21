"""The Flask application's class: what the service consists of besides its routes."""

from typing import Any, cast

import flask
from flask import Flask, Request, Response, send_from_directory
from werkzeug.routing import MapAdapter

from http_api.client_address import trust_routers
from http_api.headers import ALLOWANCE, API_HEADERS, is_api, limit_headers
from http_api.problems import CompactJson
from http_api.requests import SOCKETS, check_request
from ratelimit import Limiter
from settings import HERE, Settings, max_websockets
from storage.database import backend
from storage.store import Store
from storage.time_limit import API_SECONDS, PAGE_SECONDS, limit_waiting
from ws.open_sockets import OpenSockets


class Service(Flask):
    """A Flask application with the settings, the keys and counts, and the open sockets."""

    json_provider_class = CompactJson

    def __init__(self, name: str, settings: Settings, is_demo: bool = False) -> None:
        super().__init__(name, static_folder="web/static")
        self.settings = settings
        self.is_demo = is_demo
        self.store: Store = backend(settings).KeyStore(settings.database_url)
        self.sockets = OpenSockets(
            min(settings.max_sockets, max_websockets()), settings.max_sockets_per_caller
        )
        self.throttles = Limiter()  # of forms
        self.secret_key = settings.secret_key
        self.before_request(check_request)
        self.add_url_rule(
            "/<any('openapi.json', 'asyncapi.json'):filename>", "description", send_description
        )
        self.url_map.merge_slashes = False  # or it would redirect to the address in the Host header

    def wsgi_app(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Decide who the client is and how long it may wait; add the API's headers.

        In `after_request`, werkzeug would take longer to add them.
        """

        def start(status: str, headers: list[tuple[str, str]], *args: Any) -> Any:
            more = limit_headers(environ[ALLOWANCE]) if ALLOWANCE in environ else []
            return start_response(status, [*headers, *API_HEADERS, *more], *args)

        if self.settings.proxy_hops:
            trust_routers(environ, self.settings.proxy_hops)
        if not is_api(environ["PATH_INFO"]):
            limit_waiting(PAGE_SECONDS)
            return super().wsgi_app(environ, start_response)
        limit_waiting(API_SECONDS)
        return super().wsgi_app(environ, start)

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        """Match without the host: Flask's own method fails for names that Python cannot encode."""
        if request is None:
            return super().create_url_adapter(request)
        environ = request.environ
        scheme = environ["wsgi.url_scheme"]
        if request.path.startswith(SOCKETS):  # whose handshake is checked later
            scheme = scheme.replace("http", "ws")
        adapter = self.url_map.bind(
            "",
            script_name=request.root_path,
            url_scheme=scheme,
            default_method=request.method,
            path_info=request.path,
            query_args=environ["QUERY_STRING"],
        )
        adapter.server_name = environ.get("HTTP_HOST") or environ["SERVER_NAME"]  # as it was sent
        return adapter


def send_description(filename: str) -> Response:
    """A description of the API, which every origin may read."""
    response = send_from_directory(HERE / "docs", filename)
    response.headers["Access-Control-Allow-Origin"] = "*"
    return response


current_service = cast(Service, flask.current_app)
