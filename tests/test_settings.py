"""Every setting is read, and every wrong value is refused with the name of its variable."""

import contextlib
import dataclasses
import re
import resource
import sys
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import unquote

import pytest
from psycopg.conninfo import conninfo_to_dict

from ratelimit import Quota
from server import demo
from settings import (
    PLATFORM_HOPS,
    PROJECT,
    VARIABLES,
    SettingsError,
    load,
    max_connections,
    max_websockets,
    misspelled,
    raise_file_limit,
)

HOURLY = Quota("free", 2, 3600)
LONGEST = Quota(f"z{'a-_0189' * 4}bcd", 999_999_999_999, 1)  # each kind of character


def refusal(**environ: str) -> str:
    with pytest.raises(SettingsError) as mistake:
        load(environ)
    assert "\n" not in str(mistake.value), f"a refusal is one line: {mistake.value}"
    return str(mistake.value)


RIGHT = [
    ("PORT", "65535", 65_535),
    ("PORT", "1", 1),
    ("DATABASE_URL", "sqlite:////tmp/a.db", Path("/tmp/a.db")),
    ("DATABASE_URL", "sqlite:///tests/a.db", PROJECT / "tests" / "a.db"),
    ("DATABASE_URL", "postgres://[::1]:5432,b/c", "postgresql://[::1]:5432,b/c"),
    ("DATABASE_URL", "postgresql:///demo", "postgresql:///demo"),
    ("DATABASE_URL", "postgresql://localhost", "postgresql://localhost"),
    ("SECRET_KEY", "sixteen in words", "sixteen in words"),
    ("RATE_LIMITS", "free=1/day", {"free": Quota("free", 1, 86_400)}),
    ("RATE_LIMITS", "a=1/day, free=2/hour", {"a": Quota("a", 1, 86_400), "free": HOURLY}),
    (
        "RATE_LIMITS",
        f"free=2/hour,{LONGEST[0]}=999999999999/second",
        {"free": HOURLY} | {LONGEST[0]: LONGEST},
    ),
    ("MAX_SOCKETS", "0", 0),
    ("MAX_SOCKETS", "1000000", 1_000_000),
    ("MAX_SOCKETS_PER_CALLER", "0", 0),
    ("MAX_SOCKETS_PER_CALLER", "1000000", 1_000_000),
    ("SIGNUPS", "closed", False),
    ("KEYS_PER_USER", "0", 0),
    ("KEYS_PER_USER", "50", 50),
    ("SITE_NAME", "a" * 64, "a" * 64),
    (
        "SITE_NAME",
        "Adas API: caf\u00e9 \U0001f469\u200d\U0001f4bb",
        "Adas API: caf\u00e9 \U0001f469\u200d\U0001f4bb",
    ),
    ("API_URL", "https://my-api_1.example.com", "https://my-api_1.example.com"),
    ("API_URL", "http://[::1]:65535/v1.0/a_b~c", "http://[::1]:65535/v1.0/a_b~c"),
    ("PROXY_HOPS", "10", 10),
    ("WEB_CONCURRENCY", "4", 4),
    ("SCRIPT_NAME", "/my-demo_1/v2", "/my-demo_1/v2"),
]


@pytest.mark.parametrize(("variable", "text", "value"), RIGHT)
def test_setting_changes_its_field_alone_and_the_demo_leaves_it(
    tmp_path: Path, variable: str, text: str, value: Any
) -> None:
    environ = {"SECRET_KEY": "sixteen in words", variable: text}
    with (
        contextlib.chdir(tmp_path),  # a path starts at the project's folder, wherever it is read
        mock.patch.dict("os.environ", environ, clear=True),
        mock.patch("os.execv"),
        mock.patch("sys.argv", ["app.py"]),
        mock.patch("server.demo.refuse_used_port"),
    ):
        assert load({variable: text}) == dataclasses.replace(load({}), **{variable.lower(): value})
        demo.main()
        assert load() == load(environ), f"let main() of server/demo.py hand on {variable}"


WRONG = {
    "PORT": ["0", "65536", "one", "-1", "+1", "1.5", "1e3", " 1", "\u0661"],
    "MAX_SOCKETS": ["one", "1000001"],
    "MAX_SOCKETS_PER_CALLER": ["one"],
    "KEYS_PER_USER": ["one", "51", "-1"],
    "SITE_NAME": [" ", "a" * 65],
    "API_URL": [
        *("api.example.com", "ftp://a", "http://", "http://a/", "http://a//b", "http://a:0"),
        *("http://a:100000", "http://[::g]", "http://a/?b=c", "http://a/#b", "http://ada@a"),
        *(f"http://a/{character}" for character in "'\"`$\\ ;&|<>(){}[]*!%,\u00e4"),
    ],
    "PROXY_HOPS": ["one", "11"],
    "WEB_CONCURRENCY": ["one", "0"],
    "SCRIPT_NAME": ["demo", "/demo/", "/", "/a b"],
    "SIGNUPS": ["Closed"],
    "RATE_LIMITS": ["free=lots"],
    "DATABASE_URL": [
        *("demo.db", "sqlite://demo.db", "sqlite:///:memory:", "sqlite:////tmp"),
        *("sqlite:////no/such/directory/demo.db", f"sqlite:////{'a' * 300}/demo.db"),
    ],
    "SECRET_KEY": ["no UTF-8: \udcff", "fifteen letters"],
}
# A carriage return at the end of a line, as Windows writes it, would name another file.
CONTROLS = [f"sqlite:////tmp/demo.db{character}" for character in "\r\n\t\x00\x7f\x9b"]


@pytest.mark.parametrize("variable", sorted(VARIABLES))
def test_wrong_value_is_one_line_with_the_variable_first(variable: str) -> None:
    assert variable in {name for name, *_ in RIGHT}, f"add a value of {variable} to RIGHT above"
    assert any(map(str.isprintable, WRONG.get(variable, ()))), (
        f'add to WRONG above: "{variable}": [...], with a value that its function refuses'
    )
    for text in (*WRONG[variable], *CONTROLS):
        line = refusal(**{variable: text})
        assert line.startswith(f"{variable}: "), f"{text!r} is refused without the name: {line}"
        assert variable != "SECRET_KEY" or not text or text not in line, "the secret is shown"


@pytest.mark.parametrize(("port", "other"), [(80, 8000), (1024, 1025), (65_535, 8000)])
def test_port_that_cannot_be_used_is_refused_with_one_that_can(port: int, other: int) -> None:
    with (
        mock.patch("socket.create_server", side_effect=PermissionError(13, "")),
        pytest.raises(SettingsError, match=f"^PORT: {port} .*: Permission .* PORT={other}$"),
    ):
        demo.refuse_used_port(port)


UNREADABLE = [  # what libpq takes for the host, the port or the name, its errors repeat
    *("sword@fish", "sword/fish", "sword fish", "sword%fish", "sword%00fish", "swordfish/"),
    *("@swordfish", "12/swordfish", "12@swordfish", "12/?#@swordfish"),
]


@pytest.mark.parametrize(
    "password",
    ["sword?fish", "sword#fish", "sword:fish", "swordfish?", "12#swordfish", "sword%40fish"],
)
def test_password_of_a_url_is_read_as_it_is_written(password: str) -> None:
    loaded = load({"DATABASE_URL": f"postgresql://ada:{password}@localhost/demo"})
    assert "fish" not in repr(loaded), "the repr of Settings shows the password of the URL"
    assert conninfo_to_dict(str(loaded.database_url)) == {
        "user": "ada",
        "password": unquote(password),
        "host": "localhost",
        "dbname": "demo",
    }


@pytest.mark.parametrize(
    "url",
    [
        *(f"postgresql://ada:{password}@localhost/demo" for password in UNREADABLE),
        "mysql://ada:swordfish@localhost/demo",
        "postgresql://ada:swordfish@[::1/demo",
        "postgresql://ada:swordfish@localhost:port/demo",
        "postgresql://ada:swordfish",
        "postgresql://localhost/demo?password=swordfish%",
        "postgresql://localhost/demo?swordfish",
        # Here libpq would take a part of the password for the name of a parameter.
        "postgresql://ada:12/?fish=1@localhost/demo",
        "postgresql://ada:sword?fish=1",
    ],
)
def test_url_that_cannot_be_read_is_refused_but_not_shown(url: str) -> None:
    line = refusal(DATABASE_URL=url)
    assert line.startswith("DATABASE_URL: must be sqlite:///"), f"see _postgres: {line}"
    assert "fish" not in line, f"the line shows the password of the URL: {line}"


def test_missing_driver_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)  # an import of it fails
    (file,) = re.findall(
        "PostgreSQL needs a driver: run `.venv/bin/pip install -r (.*)`$",
        refusal(DATABASE_URL="postgresql://localhost/demo"),
    )
    assert "\npsycopg[binary,pool]" in (PROJECT / file).read_text()


@pytest.mark.parametrize(
    ("render", "hops", "value"), [("", "", 0), ("true", "", 3), ("true", "0", 0), ("true", "1", 1)]
)
def test_variable_wins_over_what_a_platform_brings_unless_it_is_empty(
    render: str, hops: str, value: int
) -> None:
    """An empty variable, of a platform or of a setting, is as if it was not set."""
    assert load(
        dict.fromkeys((*VARIABLES, *PLATFORM_HOPS), "") | {"RENDER": render, "PROXY_HOPS": hops}
    ) == dataclasses.replace(load({}), proxy_hops=value), (
        "an empty variable is as if it was not set: see `load` in settings.py"
    )


@pytest.mark.parametrize(
    ("name", "setting"),
    [("RATE_LIMIT", "RATE_LIMITS"), ("DATABASE_URI", "DATABASE_URL"), ("signups", "SIGNUPS")],
)
def test_misspelled_variable_is_warned_about(name: str, setting: str) -> None:
    others = {"PATH", "HOME", "TERM", "HOSTNAME", "DATABASE_PUBLIC_URL", "APP_URL", "APP_NAME"}
    assert [*misspelled(dict.fromkeys({name, setting} | others, "1"))] == [
        f"{name} is not a setting of this service; did you mean {setting}?"
    ]


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "sockets"),
    [
        (20, 1024, 1024, 384),
        (1024, 65_536, 65_536, 31_768),
        (256, 2**63 - 1, 10_240, 4120),
        (65_536, 2**63 - 1, 65_536, 31_768),
    ],
)
def test_file_limit_is_raised_as_far_as_allowed(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int, sockets: int
) -> None:
    """On macOS the hard limit is said to be infinite, and cannot be set."""
    limits = [soft, hard]

    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > min(hard, 10**6):
            raise ValueError
        limits[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    raise_file_limit()
    assert limits == [raised, hard], "the limit on open files is raised: see raise_file_limit"
    assert (max_connections(), max_websockets()) == (raised // 2, sockets)
