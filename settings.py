"""The environment, read once into one typed and checked value."""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

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
DEMO = f"{SQLITE}demo.db"
# libpq repeats parts of a URL that it cannot read, so such URLs are refused before it sees them.
ENCODED = r"(?:[^\s:/@%?#]|%[0-9a-fA-F]{2})"
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

    sqlite: Path  # the database file, unless `postgres` is set
    postgres: str | None = field(repr=False)  # the URL, with its password
    port: int
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
    read = partial(_read, environ)
    platform = next(filter(environ.get, PLATFORM_HOPS), None)
    return Settings(
        sqlite=read("DATABASE_URL", DEMO, _sqlite),
        postgres=read("DATABASE_URL", DEMO, _postgres),
        port=read("PORT", "8000", whole(1, 65535)),
        secret_key=read("SECRET_KEY", "", _secret),
        quotas=read("RATE_LIMITS", "free=1000/hour,pro=10000/hour", parse_quotas),
        max_sockets=read("MAX_SOCKETS", "5000", _sockets),
        max_sockets_per_caller=read("MAX_SOCKETS_PER_CALLER", "100", whole(0)),
        signups=read("SIGNUPS", "open", _is_open),
        proxy_hops=read("PROXY_HOPS", str(PLATFORM_HOPS.get(platform or "", 0)), whole(0, 10)),
        platform=platform,
        web_concurrency=read("WEB_CONCURRENCY", "1", whole(1)),
    )


def _read(environ: Mapping[str, str], name: str, default: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(environ.get(name) or default)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{name}: {error}") from None


def whole(low: int, high: int = 10**6) -> Callable[[str], int]:
    """A parser of whole numbers in this range."""

    def parse(text: str) -> int:
        if not (re.fullmatch("[0-9]{1,9}", text) and low <= int(text) <= high):
            raise ValueError(f"must be a whole number from {low} to {high}, not {text!r}")
        return int(text)

    return parse


def _sockets(text: str) -> int:
    return min(whole(0)(text), max(0, file_limit() - SPARE_FILES))


def _secret(text: str) -> str | None:
    if not text.strip().isprintable():  # bytes that are no UTF-8, for example
        raise ValueError("must be printable text")
    return text.strip() or None


def _is_open(text: str) -> bool:
    if text not in ("open", "closed"):
        raise ValueError(f"must be open or closed, not {text!r}")
    return text == "open"


def _postgres(url: str) -> str | None:
    """The URL, if it is one of PostgreSQL, as libpq spells it."""
    return url.replace("postgres://", "postgresql://", 1) if POSTGRES.fullmatch(url) else None


def _sqlite(url: str) -> Path:
    """The file of a SQLite URL; not used with a URL of PostgreSQL."""
    if POSTGRES.fullmatch(url):
        return Path()
    if not url.startswith(SQLITE) or url == SQLITE or ":memory:" in url:
        # The URL may hold a password, so it is not repeated.
        raise ValueError(
            "must be sqlite:///FILE (sqlite:////FILE is absolute) or "
            "postgresql://USER:PASSWORD@HOST/NAME, special characters percent-encoded"
        )
    path = HERE / url.removeprefix(SQLITE)  # the same file, from whatever folder a command runs
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path} cannot be created or opened")
    return path


def warnings(settings: Settings) -> list[str]:
    """What an operator should know at the start, though it is no error."""
    found = []
    if settings.web_concurrency != settings.workers:
        found.append("WEB_CONCURRENCY is ignored with SQLite: each worker would count for itself")
    if settings.platform and not settings.postgres:
        lost = "is set, and platforms lose files that are not on a mounted volume"
        found.append(f"{settings.platform} {lost}: {settings.sqlite}; see DATABASE_URL")
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
    for files in (10_240, hard):  # macOS says that its limit is infinite, and takes 10,240
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    if file_limit() < MIN_FILES:
        raise SettingsError(f"ulimit -n is {file_limit()}; at least {MIN_FILES} files are needed")
