"""The environment, read once into one typed and validated value."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ratelimit import Quota, parse_quotas

try:
    import resource
except ImportError:
    raise SystemExit("This service needs a POSIX system; on Windows, run it in WSL.") from None

PLATFORMS = ("DYNO", "RENDER", "FLY_APP_NAME", "RAILWAY_ENVIRONMENT")
SPARE_FILES = 256  # open files kept back from WebSockets: for requests, the database, logs
SQLITE = "sqlite:///"


class SettingsError(SystemExit):
    """A setting is wrong; the message is one line that starts with the variable's name.

    As a SystemExit it stops any program with that line alone: app.py, gunicorn and `flask`.
    """


@dataclass(frozen=True)
class Settings:
    """Everything that can be set; `load` holds the defaults."""

    port: int
    database: Path
    secret_key: str | None = field(repr=False)
    quotas: dict[str, Quota]
    max_sockets: int
    max_sockets_per_caller: int
    signups: bool
    proxy_hops: int
    platform: str | None  # the variable that gave it away
    web_concurrency: int


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings; raises SettingsError on the first that is wrong."""

    def integer(name: str, default: int, low: int, high: int = 10**6) -> int:
        text = environ.get(name) or str(default)
        if not (re.fullmatch("[0-9]{1,9}", text) and low <= int(text) <= high):
            raise SettingsError(f"{name} must be a whole number from {low} to {high}, not {text!r}")
        return int(text)

    if environ.get("REDIS_URL"):
        raise SettingsError("REDIS_URL is not supported by this version; unset it")
    signups = environ.get("SIGNUPS") or "open"
    if signups not in ("open", "closed"):
        raise SettingsError(f"SIGNUPS must be open or closed, not {signups!r}")
    try:
        quotas = parse_quotas(environ.get("RATE_LIMITS") or "free=1000/hour,pro=10000/hour")
    except ValueError as error:
        raise SettingsError(f"RATE_LIMITS: {error}") from None
    platform = next(filter(environ.get, PLATFORMS), None)
    return Settings(
        port=integer("PORT", 8000, 1, 65535),
        database=_database(environ.get("DATABASE_URL") or f"{SQLITE}demo.db"),
        secret_key=environ.get("SECRET_KEY", "").strip() or None,
        quotas=quotas,
        max_sockets=min(integer("MAX_SOCKETS", 5000, 0), max(0, file_limit() - SPARE_FILES)),
        max_sockets_per_caller=integer("MAX_SOCKETS_PER_CALLER", 100, 0),
        signups=signups == "open",
        proxy_hops=integer("PROXY_HOPS", 1 if platform else 0, 0, 10),
        platform=platform,
        web_concurrency=integer("WEB_CONCURRENCY", 1, 1),
    )


def file_limit() -> int:
    """How many files this process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 10**6 if limit == resource.RLIM_INFINITY else limit


def _database(url: str) -> Path:
    if not url.startswith(SQLITE) or url == SQLITE or ":memory:" in url:
        # The URL may hold a password, so it is not repeated.
        raise SettingsError("DATABASE_URL must be sqlite:///FILE (sqlite:////FILE is absolute)")
    path = Path(url.removeprefix(SQLITE))
    if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
        raise SettingsError(f"DATABASE_URL: {path} cannot be created or opened")
    return path
