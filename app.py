"""The service: create_app() and the REST endpoints; `python app.py` runs the demo."""

import sys
from importlib.util import find_spec

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit("Python 3.10 or later is needed; this is {}.{}.".format(*sys.version_info))
if not all(map(find_spec, ["flask", "flask_sock", "gevent", "gunicorn", "peewee"])):
    sys.exit("Packages are missing: run the command of README's Quickstart.")

import time
from typing import Any

import click
import flask.cli
from flask import Blueprint, Flask, Request, Response, request, send_file
from flask.json.provider import DefaultJSONProvider
from flask.typing import ResponseReturnValue
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.routing import MapAdapter

import auth
import cli
import sockets
import web
from auth import require_api_key
from models import ApiKey, User, database
from protocol import problems
from protocol.headers import with_api_headers
from protocol.requests import check_request
from protocol.timestamps import date_time, timestamp, utc
from ratelimit import Allowance
from server import demo
from services import Services, services
from settings import HERE, Settings, SettingsError, load
from storage.database import open_database, open_store

API_VERSION = "1.0.0"


class CompactJson(DefaultJSONProvider):
    """Writes JSON as the problems are written."""

    def dumps(self, obj: Any, **kwargs: Any) -> str:
        return problems.json_text(obj)


class Service(Flask):
    """Flask with JSON as above, the API's headers, and routes that no host can break."""

    json_provider_class = CompactJson

    def __init__(self, settings: Settings) -> None:
        super().__init__(__name__, static_folder="web/static")
        self.secret_key = settings.secret_key
        self.url_map.merge_slashes = False  # or it would redirect to whatever Host was sent
        self.wsgi_app = with_api_headers(self.wsgi_app)  # type: ignore[method-assign]
        if hops := settings.proxy_hops:
            self.wsgi_app = ProxyFix(self.wsgi_app, x_for=hops)  # type: ignore[method-assign]

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        """Match without the host, on which no route depends: Python cannot decode every name.

        For an Upgrade, Werkzeug tells the rules of WebSockets apart, which takes 6 µs.
        """
        if request is None:
            return super().create_url_adapter(request)
        if "HTTP_UPGRADE" in request.environ:
            return self.url_map.bind_to_environ(request.environ, server_name="", subdomain="")
        nowhere = {"server_name": "", "subdomain": "", "url_scheme": "http"}
        where = {"path_info": request.path, "default_method": request.method}
        return MapAdapter(self.url_map, script_name=request.root_path, **nowhere, **where)

    def make_default_options_response(self) -> Response:
        """Without a content type, because there is no content."""
        response = super().make_default_options_response()
        del response.headers["Content-Type"]
        return response


api = Blueprint("api", __name__, url_prefix="/api/v1")


def create_app(settings: Settings | None = None, is_demo: bool = False) -> Flask:
    """Build the application; raises SettingsError. It does not connect to the database yet.

    For the demo, gunicorn.conf.py creates a user with a key once the port is bound.
    """
    refuse_other_servers()
    settings = settings or load()
    open_database(settings)
    store = open_store(settings)
    guard = auth.Guard(settings.rate_limits, store)
    opened = sockets.OpenSockets(settings.max_sockets, settings.max_sockets_per_caller)

    app = Service(settings)
    app.extensions["services"] = Services(settings, store, guard, opened, sockets.Ticker())
    app.config["IS_DEMO"] = is_demo
    app.before_request(check_request)
    app.register_blueprint(api)
    app.add_url_rule("/<any('openapi.json', 'asyncapi.json'):name>", view_func=description)
    for part in (sockets, web, cli, problems):
        part.register(app)
    return app


def refuse_other_servers() -> None:
    """Raises SystemExit under `flask run`, and under gunicorn without gunicorn.conf.py.

    They would save no counts and send no ticks.
    """
    if "gunicorn.arbiter" in sys.modules and "server.worker" not in sys.modules:
        file = HERE / "gunicorn.conf.py"
        print(f"gunicorn needs its settings: --config {file}", file=sys.stderr)
        raise SystemExit(4)  # with this status of a worker, gunicorn ends
    context = click.get_current_context(silent=True)
    if context and context.command is flask.cli.run_command:
        raise SettingsError(
            "`flask run` cannot serve this app: run `python app.py`, or, to reload changed files, "
            "`GUNICORN_CMD_ARGS=--reload python app.py`"
        )


def __getattr__(name: str) -> Any:
    """`app.app`, for `gunicorn app:app` and `flask`: a new app each time."""
    if name == "app":
        return create_app()
    raise AttributeError(name)


def description(name: str) -> ResponseReturnValue:
    return send_file(HERE / "docs" / name), {"Access-Control-Allow-Origin": "*"}


@api.get("/demo/year")
def year() -> dict[str, object]:
    now = time.time()
    number = utc(now).year
    message = f"The current year is {number}."
    return {"year": number, "message": message, "timestamp": timestamp(now)}


@api.get("/status")
def status() -> dict[str, object]:
    key = request.headers.get("X-API-Key")
    authenticated = bool(key and services().guard.find(key))
    return {"status": "operational", "version": API_VERSION, "authenticated": authenticated}


@api.get("/protected/test")
@require_api_key
def protected_test(key: ApiKey, allowance: Allowance) -> dict[str, object]:
    return {
        "success": True,
        "message": "Your API key is valid.",
        "api_key_name": key.name,
        "api_key_type": key.type,
        "rate_limit_tier": allowance.quota.tier,
        "timestamp": timestamp(time.time()),
    }


@api.get("/user/me")
@require_api_key
def user_me(key: ApiKey, allowance: Allowance) -> dict[str, object]:
    with database.connection_context():
        user = User.get_or_none(User.id == key.user_id)
        key_count = ApiKey.select().where(ApiKey.user == key.user_id, ApiKey.live()).count()
    if user is None:
        raise auth.bad_key()  # deleted since the key was looked up
    return {
        "user_id": user.id,
        "username": user.username,
        "email": user.email,
        "created_at": date_time(user.created_at),
        "api_key_count": key_count,
    }


@api.get("/usage/stats")
@require_api_key
def usage_stats(key: ApiKey, allowance: Allowance) -> dict[str, object]:
    return {
        "api_key_name": key.name,
        "total_requests": allowance.total,
        "rate_limit_tier": allowance.quota.tier,
        "requests_remaining": allowance.remaining,
        "reset_time": date_time(allowance.reset),
    }


if __name__ == "__main__":
    demo.main()
