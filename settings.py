"""The environment, read once into one typed and validated value."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ratelimit import Quota, parse_quotas

PLATFORMS = {
    "DYNO": "Heroku",
    "RENDER": "Render",
    "FLY_APP_NAME": "Fly",
    "RAILWAY_ENVIRONMENT": "Railway",
}
SPARE_FILES = 256  # open files kept back from WebSockets: requests, the database, logs
SQLITE = "sqlite:///"


class SettingsError(SystemExit):
    """A setting is wrong; the message is one line that starts with the variable's name.

    As a SystemExit it stops any program with that line alone: app.py, gunicorn and `flask`.
    """


@dataclass(frozen=True)
class Settings:
    """Everything that can be set; `load` holds the defaults."""

    port: int
    database_url: str
    secret_key: str | None = field(repr=False)
    quotas: dict[str, Quota]
    max_sockets: int
    max_sockets_per_caller: int
    signups: bool
    proxy_hops: int
    platform: str | None
    web_concurrency: int

    @property
    def database_path(self) -> Path:
        return Path(self.database_url.removeprefix(SQLITE))


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings; raises SettingsError on the first that is wrong."""
    platform = next((name for key, name in PLATFORMS.items() if environ.get(key)), None)
    if environ.get("REDIS_URL"):
        raise SettingsError("REDIS_URL is not supported by this version; unset it")
    return Settings(
        port=_integer(environ, "PORT", 8000, 1, 65535),
        database_url=_database_url(environ.get("DATABASE_URL") or f"{SQLITE}demo.db"),
        secret_key=environ.get("SECRET_KEY", "").strip() or None,
        quotas=_quotas(environ.get("RATE_LIMITS") or "free=1000/hour,pro=10000/hour"),
        max_sockets=min(_integer(environ, "MAX_SOCKETS", 5000, 0), _files() - SPARE_FILES),
        max_sockets_per_caller=_integer(environ, "MAX_SOCKETS_PER_CALLER", 100, 0),
        signups=_choice(environ, "SIGNUPS", "open", "closed") == "open",
        proxy_hops=_integer(environ, "PROXY_HOPS", 1 if platform else 0, 0, 10),
        platform=platform,
        web_concurrency=_integer(environ, "WEB_CONCURRENCY", 1, 1),
    )


def _integer(
    environ: Mapping[str, str], name: str, default: int, low: int, high: int = 10**6
) -> int:
    text = environ.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
        raise SettingsError(f"{name} must be a whole number from {low} to {high}, not {text!r}")
    return int(text)


def _choice(environ: Mapping[str, str], name: str, *choices: str) -> str:
    value = environ.get(name) or choices[0]
    if value not in choices:
        raise SettingsError(f"{name} must be {' or '.join(choices)}, not {value!r}")
    return value


def _quotas(text: str) -> dict[str, Quota]:
    try:
        return parse_quotas(text)
    except ValueError as error:
        raise SettingsError(f"RATE_LIMITS: {error}") from None


def _database_url(url: str) -> str:
    # The URL may hold a password, so no message repeats it.
    path = Path(url.removeprefix(SQLITE))
    if not url.startswith(SQLITE) or url == SQLITE or ":memory:" in url:
        raise SettingsError("DATABASE_URL must be sqlite:///FILE (sqlite:////FILE is absolute)")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise SettingsError(f"DATABASE_URL: {path} cannot be created or opened")
    return url


def _files() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 10**6 if limit == resource.RLIM_INFINITY else max(limit, 2 * SPARE_FILES)
