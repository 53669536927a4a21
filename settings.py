"""The settings, read from the environment and checked."""

import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from ratelimit import Quota, parse_quotas

PROJECT = Path(__file__).parent  # the folder of the project
# How many entries the routers of each platform append to X-Forwarded-For.
PLATFORM_HOPS = {
    "DYNO": "1",  # Heroku
    "FLY_APP_NAME": "2",
    "RENDER": "3",
    "RAILWAY_ENVIRONMENT": "2",
    "RAILWAY_ENVIRONMENT_NAME": "2",
}
# Pages show this address in code, so it has only characters that need no quoting in a shell, in
# Python, or in JavaScript.
API_ADDRESS = (
    r"(https?://([A-Za-z0-9][A-Za-z0-9._~-]*|\[[0-9A-Fa-f:.]+\])(:[1-9][0-9]{0,4})?"
    "(/[A-Za-z0-9._~:-]+)*)?"
)
URL_FORMS = "sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME?OPTIONS (percent-encoded)"
MIN_SECRET_CHARACTERS = 16
MAX_KEYS = 50  # of one user, including rotated keys in their grace period
MAKE_SECRET = "make one: python3 -c 'import secrets; print(secrets.token_hex())'"


class SettingsError(SystemExit):
    """A setting is wrong; the message is one line that names it.

    It is a SystemExit, so it ends app.py, gunicorn and `flask` with that line and no traceback.
    """


def _whole(text: str, low: int = 0, high: int = 10**6) -> int:
    if not (re.fullmatch("[0-9]{1,9}", text) and low <= int(text) <= high):
        raise ValueError(f"must be a whole number from {low} to {high}, not {text!r}")
    return int(text)


def _secret(text: str) -> str | None:
    if 0 < len(text) < MIN_SECRET_CHARACTERS:
        raise ValueError(f"must have at least {MIN_SECRET_CHARACTERS} characters; {MAKE_SECRET}")
    return text or None


def _matching(text: str, pattern: str, what: str) -> str:
    if not re.fullmatch(pattern, text):
        raise ValueError(f"must be {what}, not {text!r}")
    return text


def _database(url: str) -> Path | str:
    """The SQLite file, or the URL of PostgreSQL as psycopg and peewee want it."""
    if re.match("postgres(ql)?://", url):
        return _postgres(url.replace("postgres://", "postgresql://", 1))
    found = re.fullmatch("sqlite:///(.+)", url)
    if not found or ":memory:" in url:  # the URL may hold a password, so no error quotes it
        raise ValueError(f"must be {URL_FORMS}")
    path = PROJECT / found[1]  # relative paths start at the project's folder
    path.parent.stat()  # raises OSError
    if path.is_dir():
        raise ValueError(f"{path} is a folder; add the name of a file")
    return path


def _postgres(url: str) -> str:
    """The URL, if libpq can read it.

    An error quotes no part of the URL that might be a part of the password.
    """
    try:
        from psycopg import ProgrammingError, conninfo  # the driver is optional
    except ImportError:
        raise ValueError(
            "PostgreSQL needs a driver: run `.venv/bin/pip install -r requirements-postgres.txt`"
        ) from None
    with suppress(ProgrammingError, UnicodeError):
        parts = conninfo.conninfo_to_dict(url)
        # libpq's errors quote these parts. If the password has an unescaped @, / or ?, one of them
        # contains a piece of it: for user:pass@word@host, the host is `word@host`.
        names = str(parts.get("host")) + str(parts.get("dbname"))
        if "@" not in names and re.fullmatch("[0-9,]*", str(parts.get("port", ""))):
            return url
    raise ValueError(f"must be {URL_FORMS}")


def setting(default: str, parse: Callable[[str], Any]) -> Any:
    """A field that is read from the variable of the same name, in capitals."""
    return field(repr=False, metadata={"default": default, "parse": parse})


@dataclass(frozen=True)
class Settings:
    """All settings. They may hold passwords, so none of them is printed."""

    database_url: Path | str = setting("sqlite:///demo.db", _database)
    port: int = setting("8000", partial(_whole, low=1, high=65535))
    secret_key: str | None = setting("", _secret)
    rate_limits: dict[str, Quota] = setting(
        "free=1000/hour,pro=10000/hour,tiny=5/minute", parse_quotas
    )
    max_sockets: int = setting("5000", _whole)
    max_sockets_per_caller: int = setting("100", _whole)
    signups: bool = setting(
        "open", lambda text: _matching(text, "open|closed", "open or closed") == "open"
    )
    keys_per_user: int = setting(str(MAX_KEYS), partial(_whole, high=MAX_KEYS))
    site_name: str = setting(
        "Demo Service",
        partial(
            _matching, pattern=r"\S.{0,63}", what="a name like My API, of at most 64 characters"
        ),
    )
    api_url: str = setting(  # of the API that this service guards
        "", partial(_matching, pattern=API_ADDRESS, what="like https://api.example.com/v1")
    )
    proxy_hops: int = setting("0", partial(_whole, high=10))
    web_concurrency: int = setting("1", partial(_whole, low=1))
    script_name: str = setting(  # which gunicorn reads itself, too
        "", partial(_matching, pattern="(/[A-Za-z0-9_.~-]+)*", what="like /demo")
    )

    @property
    def sqlite(self) -> Path | None:
        """The database file; None with PostgreSQL, where `database_url` is its URL."""
        return self.database_url if isinstance(self.database_url, Path) else None


VARIABLES = {each.name.upper() for each in fields(Settings)}


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings; raises SettingsError for the first wrong one."""
    by_platform = {
        "PROXY_HOPS": next((PLATFORM_HOPS[name] for name in PLATFORM_HOPS if environ.get(name)), "")
    }
    values = {}
    for each in fields(Settings):
        name = each.name.upper()
        text = environ.get(name) or by_platform.get(name) or each.metadata["default"]
        try:
            # A file from Windows, for example, leaves a carriage return at the end of a value.
            if re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", text):
                raise ValueError("must not contain control characters")
            values[each.name] = each.metadata["parse"](text)
        except (OSError, ValueError) as error:
            raise SettingsError(f"{name}: {error}") from None
    return Settings(**values)


def misspelled(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A warning for each variable whose name is nearly that of a setting.

    `APP_URL`, which some platforms set, is not so near to `API_URL`.
    """
    for name in sorted(environ.keys() - VARIABLES):
        for meant in get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.87):
            yield f"{name} is not a setting of this service; did you mean {meant}?"


def max_connections() -> int:
    """Half of the files that may be open; the other half is for what requests open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def max_websockets() -> int:
    """All connections except a quarter (at most 1,000), which is reserved for requests."""
    return max_connections() - min(max_connections() // 4, 1000)


def raise_file_limit() -> None:
    """Raise the limit on open files as far as allowed; raises SettingsError if it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports no limit, but accepts only 10,240. The last one that is accepted counts.
    for files in (max(soft, 10_240), hard):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    if max_connections() < 64:
        raise SettingsError("the limit on open files is below 128: run `ulimit -n 1024` as root")
