"""Flask with the JSON, headers and routing of this service.

The headers of every response under /api/ are for caching, CORS (Fetch standard) and rate limits.
"""

from typing import Any

from flask import Flask, Request, Response
from flask.json.provider import DefaultJSONProvider
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.routing import MapAdapter

from protocol import problems
from ratelimit import Allowance
from settings import Settings

ALLOWANCE = "demo.allowance"  # in the WSGI environ: the limiter's answer to this request
EXPOSED = (
    "RateLimit-Policy, RateLimit, Retry-After, WWW-Authenticate, "
    "X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset"
)
API_HEADERS = [
    ("Cache-Control", "no-store"),
    ("Access-Control-Allow-Origin", "*"),
    ("Access-Control-Expose-Headers", EXPOSED),
]


class CompactJson(DefaultJSONProvider):
    """Writes JSON as the problems are written."""

    def dumps(self, obj: Any, **kwargs: Any) -> str:
        return problems.json_text(obj)


class Service(Flask):
    """Flask with JSON as above, the API's headers, and routes that no host can break."""

    json_provider_class = CompactJson

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__(name, static_folder="web/static")
        self.secret_key = settings.secret_key
        self.url_map.merge_slashes = False  # or it would redirect to whatever Host was sent
        if hops := settings.proxy_hops:
            self.wsgi_app = ProxyFix(self.wsgi_app, x_for=hops)  # type: ignore[method-assign]

    def wsgi_app(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Add the API's headers.

        This is a step of WSGI, because werkzeug would take 25 µs for these headers: a tenth of a
        request.
        """

        def start(status: str, headers: list[tuple[str, str]], *args: Any) -> Any:
            more = limit_headers(environ[ALLOWANCE]) if ALLOWANCE in environ else []
            return start_response(status, [*headers, *API_HEADERS, *more], *args)

        is_api = environ["PATH_INFO"].lstrip("/").startswith("api/")  # as Flask reads the path
        return super().wsgi_app(environ, start if is_api else start_response)

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        """Match without the host, on which no route depends: Python cannot decode every name.

        For an Upgrade, Werkzeug tells the rules of WebSockets apart, which takes 6 µs.
        """
        if request is None:
            return super().create_url_adapter(request)
        environ = request.environ
        host = environ.get("HTTP_HOST") or environ["SERVER_NAME"]  # as it was sent
        if "HTTP_UPGRADE" in environ:
            adapter = self.url_map.bind_to_environ(environ, server_name="", subdomain="")
            adapter.server_name = host
            return adapter
        names = {"server_name": host, "script_name": request.root_path, "subdomain": ""}
        asked = {"path_info": request.path, "query_args": environ["QUERY_STRING"]}
        how = {"url_scheme": environ["wsgi.url_scheme"], "default_method": request.method}
        return MapAdapter(self.url_map, **names, **asked, **how)

    def make_default_options_response(self) -> Response:
        """Without a content type, because there is no content."""
        response = super().make_default_options_response()
        del response.headers["Content-Type"]
        return response


def limit_headers(allowance: Allowance) -> list[tuple[str, str]]:
    """Both header families: draft-ietf-httpapi-ratelimit-headers, and X-RateLimit."""
    (tier, limit, seconds), _, remaining, reset, seconds_left, _ = allowance
    return [
        ("RateLimit-Policy", f'"{tier}";q={limit};w={seconds}'),
        ("RateLimit", f'"{tier}";r={remaining};t={seconds_left}'),
        ("X-RateLimit-Limit", str(limit)),
        ("X-RateLimit-Remaining", str(remaining)),
        ("X-RateLimit-Reset", str(reset)),
    ]
