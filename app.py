"""The service: create_app() and the five REST endpoints; `python app.py` runs the demo."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from flask import Blueprint, Flask, Request, Response, request, send_file
from flask.typing import ResponseReturnValue
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.routing import MapAdapter

import auth
import cli
import models
import settings
import sockets
import web
from auth import require_api_key
from models import ApiKey, Key, User
from protocol import problems
from protocol.headers import with_api_headers
from protocol.timestamps import date_time, timestamp, utc
from ratelimit import Allowance, Limiter
from server import launch
from storage.background import Background
from storage.postgres import Batches, Postgres, SharedLimiter

API_VERSION = "1.0.0"


class Service(Flask):
    """Flask with an empty answer to OPTIONS, and short cuts that save 12 % of a request."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.json.dumps = lambda value, **_: problems.json_text(value)  # type: ignore[method-assign]
        self.url_map.merge_slashes = False  # or it would redirect, to whatever Host was sent

    def make_default_options_response(self) -> Response:
        response = super().make_default_options_response()
        response.status_code = 204
        del response.headers["Content-Type"]
        return response

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        """Match a plain request by path and method; no route depends on the host."""
        if request is None or "HTTP_UPGRADE" in request.environ:
            return super().create_url_adapter(request)
        where = ("", request.root_path, "", "http")
        return MapAdapter(self.url_map, *where, request.path, request.method)

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """No view is a coroutine."""
        return func


api = Blueprint("api", __name__, url_prefix="/api/v1")


def create_app(config: settings.Settings | None = None) -> Flask:
    """Build the application; raises SettingsError."""
    config = config or settings.load()
    launch.replace_flask_run()  # under `flask run` it does not return
    models.init(config, must_answer=False)

    app = Service(__name__)
    app.secret_key = config.secret_key
    app.extensions |= {"settings": config, "guard": make_guard(config)}
    app.register_blueprint(api)
    app.add_url_rule("/<any('openapi.json', 'asyncapi.json'):name>", view_func=description)
    for part in (sockets, web, cli, problems):
        part.register(app)
    app.extensions["background"] = Background(app)
    app.wsgi_app = with_api_headers(app.wsgi_app)  # type: ignore[method-assign]
    if hops := config.proxy_hops:
        app.wsgi_app = ProxyFix(app.wsgi_app, x_for=hops, x_proto=1)  # type: ignore[method-assign]
    return app


def make_guard(config: settings.Settings) -> auth.Guard:
    """With PostgreSQL, keys are found and counted in its rows, for many requests at once."""
    if url := config.postgres:
        find_keys = partial(models.find_keys, source=Postgres(url, connections=1))
        return auth.Guard(config.quotas, SharedLimiter(url), Batches(find_keys))
    return auth.Guard(config.quotas, Limiter(saves=True), models.find_key)


def __getattr__(name: str) -> Any:
    """`app.app`, for `gunicorn app:app` and `flask`: a new app each time."""
    if name == "app":
        return create_app()
    raise AttributeError(name)


def description(name: str) -> ResponseReturnValue:
    return send_file(settings.HERE / name), {"Access-Control-Allow-Origin": "*"}


@api.get("/demo/year")
def year() -> dict[str, object]:
    now = time.time()
    number = utc(now).year
    message = f"The current year is {number}."
    return {"year": number, "message": message, "timestamp": timestamp(now)}


@api.get("/status")
def status() -> dict[str, object]:
    key = request.headers.get("X-API-Key")
    authenticated = bool(key and auth.guard().find(key))
    return {"status": "operational", "version": API_VERSION, "authenticated": authenticated}


@api.get("/protected/test")
@require_api_key
def protected_test(key: Key, allowance: Allowance) -> dict[str, object]:
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
def user_me(key: Key, allowance: Allowance) -> dict[str, object]:
    with models.database.connection_context():
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
def usage_stats(key: Key, allowance: Allowance) -> dict[str, object]:
    return {
        "api_key_name": key.name,
        "total_requests": allowance.total,
        "rate_limit_tier": allowance.quota.tier,
        "requests_remaining": allowance.remaining,
        "reset_time": date_time(allowance.reset),
    }


if __name__ == "__main__":
    launch.main()
