"""The environment, read once into one typed and checked value."""

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

HERE = Path(__file__).parent
# How many entries the routers of each platform append to X-Forwarded-For. Railway documents none.
PLATFORM_HOPS = {"DYNO": 1, "FLY_APP_NAME": 2, "RENDER": 3, "RAILWAY_ENVIRONMENT": 0}
MAX_BODY_BYTES = 16 * 1024  # of a request; forms are small, and the API takes no body
MIN_FILES = 128  # open files without which the server cannot work
SPARE_FILES = 256  # open files kept for requests, the database and logs, not for WebSockets
SQLITE = "sqlite:///"
# libpq repeats parts of a URL that it cannot read, so such URLs are refused before it sees them.
ENCODED = "(?:[^\\s:/@%?#]|%[0-9a-fA-F]{2})"
POSTGRES = re.compile(
    rf"postgres(ql)?://({ENCODED}*(:{ENCODED}*)?@)?[^\s/@?#%]*/{ENCODED}+"
    r"(\?([^\s#%]|%[0-9a-fA-F]{2})*)?"
)


class SettingsError(SystemExit):
    """A setting is wrong; the message is one line that starts with the variable's name.

    It is a SystemExit, so it ends app.py, gunicorn and `flask` with that line and no traceback.
    """


@dataclass(frozen=True)
class Settings:
    """All settings; `load` holds the defaults."""

    port: int
    sqlite: Path  # the database file, unless `postgres` is set
    postgres: str | None = field(repr=False)  # the URL, with its password
    secret_key: str | None = field(repr=False)
    quotas: dict[str, Quota]
    max_sockets: int
    max_sockets_per_caller: int
    signups: bool
    proxy_hops: int
    platform: str | None  # the variable by which the platform was recognised
    web_concurrency: int

    @property
    def workers(self) -> int:
        """With SQLite only one: each would count for itself, and double every allowance."""
        return self.web_concurrency if self.postgres else 1


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings; raises SettingsError for the first wrong one."""
    platform = next(filter(environ.get, PLATFORM_HOPS), None)
    sqlite, postgres = _database(environ.get("DATABASE_URL") or f"{SQLITE}demo.db")
    sockets = _integer(environ, "MAX_SOCKETS", 5000, 0)
    return Settings(
        port=_integer(environ, "PORT", 8000, 1, 65535),
        sqlite=sqlite,
        postgres=postgres,
        secret_key=_secret_key(environ),
        quotas=_quotas(environ),
        max_sockets=min(sockets, max(0, file_limit() - SPARE_FILES)),
        max_sockets_per_caller=_integer(environ, "MAX_SOCKETS_PER_CALLER", 100, 0),
        signups=_signups(environ),
        proxy_hops=_integer(environ, "PROXY_HOPS", PLATFORM_HOPS.get(platform or "", 0), 0, 10),
        platform=platform,
        web_concurrency=_integer(environ, "WEB_CONCURRENCY", 1, 1),
    )


def warnings(settings: Settings) -> list[str]:
    """What an operator should know at the start, though it is no error."""
    found = []
    if settings.web_concurrency != settings.workers:
        found.append("WEB_CONCURRENCY is ignored with SQLite: each worker would count for itself")
    if settings.platform and not settings.postgres:
        found.append(
            f"{settings.platform} is set, and platforms lose {settings.sqlite} at every restart "
            "unless it is on a mounted volume; see DATABASE_URL"
        )
    if settings.platform == "RAILWAY_ENVIRONMENT" and not settings.proxy_hops:
        found.append("PROXY_HOPS is not set: all clients seem to have the router's address")
    return found


def file_limit() -> int:
    """How many files this process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 10**6 if limit == resource.RLIM_INFINITY else limit


def raise_file_limit() -> None:
    """Raise the limit on open files as far as allowed; raises SettingsError if it is too low."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for files in (hard, 10_240):  # macOS says that its limit is infinite, and takes 10,240
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
            break
        except (ValueError, OSError):
            continue
    if file_limit() < MIN_FILES:
        raise SettingsError(f"ulimit -n is {file_limit()}; at least {MIN_FILES} files are needed")


def _integer(
    environ: Mapping[str, str], name: str, default: int, low: int, high: int = 10**6
) -> int:
    text = environ.get(name) or str(default)
    if not (re.fullmatch("[0-9]{1,9}", text) and low <= int(text) <= high):
        raise SettingsError(f"{name} must be a whole number from {low} to {high}, not {text!r}")
    return int(text)


def _secret_key(environ: Mapping[str, str]) -> str | None:
    secret = environ.get("SECRET_KEY", "").strip()
    if not secret.isprintable():  # bytes that are no UTF-8, for example
        raise SettingsError("SECRET_KEY must be printable text")
    return secret or None


def _quotas(environ: Mapping[str, str]) -> dict[str, Quota]:
    try:
        return parse_quotas(environ.get("RATE_LIMITS") or "free=1000/hour,pro=10000/hour")
    except ValueError as error:
        raise SettingsError(f"RATE_LIMITS: {error}") from None


def _signups(environ: Mapping[str, str]) -> bool:
    signups = environ.get("SIGNUPS") or "open"
    if signups not in ("open", "closed"):
        raise SettingsError(f"SIGNUPS must be open or closed, not {signups!r}")
    return signups == "open"


def _database(url: str) -> tuple[Path, str | None]:
    """The SQLite file and the PostgreSQL URL; the first is unused where there is the second."""
    if POSTGRES.fullmatch(url):
        return Path(), url.replace("postgres://", "postgresql://", 1)
    if not url.startswith(SQLITE) or url == SQLITE or ":memory:" in url:
        # The URL may hold a password, so it is not repeated.
        raise SettingsError(
            "DATABASE_URL must be sqlite:///FILE (sqlite:////FILE is absolute) or "
            "postgresql://USER:PASSWORD@HOST/NAME, special characters percent-encoded"
        )
    path = HERE / url.removeprefix(SQLITE)  # the same file, from whatever folder a command runs
    try:
        usable = os.access(path.parent, os.W_OK | os.X_OK) and not path.is_dir()
    except OSError:
        usable = False
    if not usable:
        raise SettingsError(f"DATABASE_URL: {path} cannot be created or opened")
    return path, None
