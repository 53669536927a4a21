"""The REST endpoints, and create_app(), which builds the service; `python app.py` runs the demo."""

import time
from urllib.parse import quote

from flask import Blueprint, Response, request

import auth
import cli
import sockets
from auth import require_api_key
from models import ApiKey, db
from ratelimit import Allowance
from server import demo
from service import responses
from service.application import Service, current_service
from service.timestamps import date_time, timestamp, utc
from settings import Settings, load
from storage.database import backend
from web import site

API_VERSION = "1.0.0"

api = Blueprint("api", __name__, url_prefix="/api/v1")


@api.get("/demo/year")
def year() -> dict[str, object]:
    now = time.time()
    number = utc(now).year
    return {
        "year": number,
        "message": f"The current year is {number}.",
        "timestamp": timestamp(now),
    }


@api.get("/status")
def status() -> dict[str, object]:
    key = request.headers.get("X-API-Key")
    return {
        "status": "operational",
        "version": API_VERSION,
        "authenticated": bool(key and auth.find_key(key)),
    }


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
    owner = current_service().store.owner(key)
    if owner is None:
        raise auth.invalid_key()  # the user's last key has ended since
    user_id, username, email, created_at, key_count = owner
    return {
        "user_id": user_id,
        "username": username,
        "email": email,
        "created_at": date_time(created_at),
        "api_key_count": key_count,
    }


@api.get("/usage/stats")
@require_api_key(enforce_limit=False)
def usage_stats(key: ApiKey, allowance: Allowance) -> dict[str, object]:
    return {
        "api_key_name": key.name,
        "total_requests": allowance.total,
        "rate_limit_tier": allowance.quota.tier,
        "requests_remaining": allowance.remaining,
        "reset_time": date_time(allowance.reset),
    }


@api.get("/gate")
@require_api_key
def gate(key: ApiKey, allowance: Allowance) -> Response:
    """Admit a request to another API: the proxy in front of it asks here first.

    It passes these headers on to that API. The response has no body, so the proxy has nothing to
    read before it can use the connection again.
    """
    response = Response(
        status=204,
        headers={
            "X-Auth-Key-Id": key.id,
            "X-Auth-User-Id": str(key.user_id),
            "X-Auth-Key-Type": quote(key.type),  # a row may have been edited by hand
            "X-Auth-Tier": allowance.quota.tier,
        },
    )
    del response.headers["Content-Type"]
    return response


def create_app(settings: Settings | None = None, is_demo: bool = False) -> Service:
    """Build the application; raises SettingsError. It does not connect to the database yet.

    If `is_demo`, server/demo.py creates a user with a key once the port is bound. The parts may be
    registered in any order.
    """
    settings = settings or load()
    db.initialize(backend(settings).PageDatabase(settings.database_url))
    app = Service(__name__, settings, is_demo)
    app.register_blueprint(api)
    app.register_blueprint(sockets.bp)
    site.register(app)
    cli.register(app)
    responses.register(app, site.error_page)
    return app


def __getattr__(name: str) -> Service:
    """`app.app`, for `gunicorn app:app`.

    It is made when it is first asked for, so that importing this file needs no settings.
    """
    if name != "app":
        raise AttributeError(name)
    globals()["app"] = made = create_app()
    return made


if __name__ == "__main__":
    demo.main()
