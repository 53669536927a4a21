"""Flask with the JSON, headers, routing and checks of this service.

The headers of every response under /api/ are for caching, CORS (Fetch standard) and rate limits.
"""

import re
from ipaddress import IPv6Address, ip_address
from typing import Any

from flask import Flask, Request, request, send_file
from flask.json.provider import DefaultJSONProvider
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import MethodNotAllowed, abort
from werkzeug.routing import MapAdapter

from protocol.problems import is_api, json_text
from ratelimit import Allowance
from settings import HERE, Settings

MAX_BODY_BYTES = 16 * 1024  # forms are small, and the API takes no body
SOCKETS = "/api/v1/ws"  # under which all paths are WebSockets
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
WITH_PORT = re.compile(r"^\[(.*)\](?::\d+)?$|^([^:]*):\d+$")  # some proxies append it
PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, HEAD, OPTIONS",
    "Access-Control-Allow-Headers": "X-API-Key, Content-Type, Authorization, *",
    "Access-Control-Max-Age": "86400",
}
# Files have one ETag each instead. For some dates, werkzeug would raise an OverflowError.
UNUSED_HEADERS = ("IF_MATCH", "IF_MODIFIED_SINCE", "IF_UNMODIFIED_SINCE", "IF_RANGE", "RANGE")
MAX_NAME_BYTES = 255  # of a Host (RFC 1035 part 2.3.4), and of the ETags in If-None-Match


class CompactJson(DefaultJSONProvider):
    """Writes JSON as the problems are written."""

    def dumps(self, obj: Any, **kwargs: Any) -> str:
        return json_text(obj)


class App(Flask):
    """Flask with JSON as above, the API's headers, and routes that no host can break."""

    json_provider_class = CompactJson

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__(name, static_folder="web/static")
        self.secret_key = settings.secret_key
        self.before_request(check_request)
        self.add_url_rule("/<any('openapi.json', 'asyncapi.json'):name>", view_func=description)
        self.url_map.merge_slashes = False  # or it would redirect to whatever Host was sent
        self.proxy_hops = settings.proxy_hops

    def wsgi_app(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Add the API's headers.

        Not in `after_request`, because werkzeug would take 25 µs for them: a tenth of a request.
        """

        def start(status: str, headers: list[tuple[str, str]], *args: Any) -> Any:
            more = limit_headers(environ[ALLOWANCE]) if ALLOWANCE in environ else []
            return start_response(status, [*headers, *API_HEADERS, *more], *args)

        if self.proxy_hops:
            trust_routers(environ, self.proxy_hops)
        under_api = environ["PATH_INFO"].lstrip("/").startswith("api/")  # as Flask reads the path
        return super().wsgi_app(environ, start if under_api else start_response)

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        """Match without the host, on which no route depends: Python cannot decode every name."""
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


def trust_routers(environ: dict[str, Any], hops: int) -> None:
    """Take the client's address and scheme from what the routers in front have appended.

    The entries are counted from the end, because a client can send anything before them. (The
    ProxyFix of werkzeug parses them all, and none if a quote is not closed.)
    """
    entries = environ.get("HTTP_X_FORWARDED_FOR", "").rsplit(",", hops)[-hops:]
    if len(entries) == hops and (address := entries[0].strip()):
        environ["REMOTE_ADDR"] = address
    scheme = environ.get("HTTP_X_FORWARDED_PROTO", "").rpartition(",")[2].strip().lower()
    if scheme in ("http", "https"):
        environ["wsgi.url_scheme"] = scheme


def description(name: str) -> ResponseReturnValue:
    """The description of the API, which every origin may read."""
    return send_file(HERE / "docs" / name), {"Access-Control-Allow-Origin": "*"}


def limit_headers(allowance: Allowance) -> list[tuple[str, str]]:
    """Both header families: draft-ietf-httpapi-ratelimit-headers, and X-RateLimit."""
    quota, left = allowance.quota, allowance.remaining
    return [
        ("RateLimit-Policy", f'"{quota.tier}";q={quota.limit};w={quota.seconds}'),
        ("RateLimit", f'"{quota.tier}";r={left};t={allowance.seconds_left}'),
        ("X-RateLimit-Limit", str(quota.limit)),
        ("X-RateLimit-Remaining", str(left)),
        ("X-RateLimit-Reset", str(allowance.reset)),
    ]


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


def caller(address: str | None) -> str:
    """The address; for IPv6 its /64 network, because a single customer usually has all of it.

    Everything that is no address is one caller: a Unix socket has none, and a client might write
    another text for each request into a header.
    """
    try:
        found = ip_address(WITH_PORT.sub(r"\1\2", address or ""))
    except ValueError:
        return ""
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64)
    return str(found)
