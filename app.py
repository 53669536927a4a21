"""The service: create_app(), the five REST endpoints, and `python app.py`."""

import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flask import Blueprint, Flask, Request, request, send_file
from flask.typing import ResponseReturnValue
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.routing import MapAdapter

import accounts
import answers
import auth
import cli
import clock
import models
import problems
import settings
import sockets
import web
from auth import require_api_key
from models import Key, User
from ratelimit import Allowance, Limiter

API_VERSION = "1.0.0"
HERE = Path(__file__).parent
WELCOME = """
  {url}    user: demo    password: {password}

  Your API key, shown this once:

    {key}

  Try it:

    curl {url}/api/v1/demo/year
    curl {url}/api/v1/status
    curl -H "X-API-Key: {key}" {url}/api/v1/protected/test
    curl -H "X-API-Key: {key}" {url}/api/v1/user/me
    curl -H "X-API-Key: {key}" {url}/api/v1/usage/stats
"""

api = Blueprint("api", __name__, url_prefix="/api/v1")


class Service(Flask):
    """Flask, without two questions to which the answer is known: a twelfth of a request's time."""

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        """A plain request is matched by path and method, whatever the host is called."""
        if request is None or "HTTP_UPGRADE" in request.environ:
            return super().create_url_adapter(request)
        where = ("", request.root_path, "", "http")
        return MapAdapter(self.url_map, *where, request.path, request.method)

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """No view is a coroutine."""
        return func


def create_app(config: settings.Settings | None = None) -> Flask:
    """Build the application; raises SettingsError."""
    config = config or settings.load()
    models.init(config)

    app = Service(__name__)
    app.secret_key = config.secret_key
    app.json = answers.Json(app)
    app.extensions["settings"] = config
    app.extensions["guard"] = auth.Guard(config.quotas, Limiter(models.load_usage))
    app.wsgi_app = answers.with_api_headers(app.wsgi_app)  # type: ignore[method-assign]
    if hops := config.proxy_hops:
        app.wsgi_app = ProxyFix(app.wsgi_app, x_for=hops, x_proto=hops)  # type: ignore[method-assign]

    app.url_map.merge_slashes = False  # or it would redirect, to whatever Host was sent
    app.register_blueprint(api)
    app.add_url_rule("/openapi.json", view_func=openapi)
    sockets.register(app, config)
    web.register(app)
    cli.register(app)
    problems.register(app)
    return app


def openapi() -> ResponseReturnValue:
    return send_file(HERE / "openapi.json"), {"Access-Control-Allow-Origin": "*"}


@api.get("/demo/year")
def year() -> dict[str, object]:
    moment = time.time()
    number = clock.utc(moment).year
    message = f"The current year is {number}."
    return {"year": number, "message": message, "timestamp": clock.timestamp(moment)}


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
        "timestamp": clock.timestamp(time.time()),
    }


@api.get("/user/me")
@require_api_key
def user_me(key: Key, allowance: Allowance) -> dict[str, object]:
    with models.database.connection_context():
        user = User.get_by_id(key.user_id)
        key_count = models.live_keys(user).count()
    return {
        "user_id": user.id,
        "username": user.username,
        "email": user.email,
        "created_at": clock.date_time(user.created_at),
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
        "reset_time": clock.date_time(allowance.reset),
    }


def main() -> None:
    """The demo: make a first user and key, then become the production server."""
    os.chdir(HERE)
    config = settings.load()
    os.environ["SECRET_KEY"] = config.secret_key or secrets.token_hex()
    models.init(config)
    address = f"127.0.0.1:{config.port}"
    with models.database.connection_context():
        if not User.select().exists():
            password = secrets.token_urlsafe(12)
            user = accounts.create("demo", "demo@example.com", password)
            _, key = auth.create_key(user, "demo", "production")
            print(WELCOME.format(url=f"http://{address}", password=password, key=key), flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "gunicorn", "--bind", address])


if __name__ == "__main__":
    main()
