"""Every setting is read, and every wrong value is refused with the name of its variable."""

import dataclasses
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import settings
from ratelimit import Quota
from serving import SETTINGS
from settings import SettingsError, load

LimitFiles = Callable[[int], None]


@pytest.fixture
def limit_files() -> Iterator[LimitFiles]:
    """Sets how many files this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda files: resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_set_gives_the_defaults(
    limit_files: LimitFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_files(5000 + settings.SPARE_FILES)
    monkeypatch.chdir(tmp_path)
    assert load({}) == settings.Settings(
        port=8000,
        sqlite=settings.HERE / "demo.db",
        postgres=None,
        secret_key=None,
        quotas={"free": Quota("free", 1000, 3600), "pro": Quota("pro", 10_000, 3600)},
        max_sockets=5000,
        max_sockets_per_caller=100,
        signups=True,
        proxy_hops=0,
        platform="",
        web_concurrency=1,
    )


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("PORT", "1", "port", 1),
        ("PORT", "65535", "port", 65_535),
        ("DATABASE_URL", "sqlite:////tmp/a.db", "sqlite", Path("/tmp/a.db")),
        ("DATABASE_URL", "sqlite:///a.db", "sqlite", settings.HERE / "a.db"),
        ("DATABASE_URL", "sqlite:///tests/a.db", "sqlite", settings.HERE / "tests" / "a.db"),
        ("SECRET_KEY", "  two words\n", "secret_key", "two words"),
        ("SECRET_KEY", "  \n", "secret_key", None),
        ("RATE_LIMITS", "free=1/day", "quotas", {"free": Quota("free", 1, 86_400)}),
        ("MAX_SOCKETS", "0", "max_sockets", 0),
        ("MAX_SOCKETS", "7", "max_sockets", 7),
        ("MAX_SOCKETS_PER_CALLER", "0", "max_sockets_per_caller", 0),
        ("MAX_SOCKETS_PER_CALLER", "7", "max_sockets_per_caller", 7),
        ("SIGNUPS", "open", "signups", True),
        ("SIGNUPS", "closed", "signups", False),
        ("PROXY_HOPS", "0", "proxy_hops", 0),
        ("PROXY_HOPS", "10", "proxy_hops", 10),
        ("WEB_CONCURRENCY", "4", "web_concurrency", 4),
    ],
)
def test_a_setting_changes_its_field_alone(
    variable: str, text: str, field: str, value: object
) -> None:
    changes: dict[str, Any] = {field: value}
    assert load({variable: text}) == dataclasses.replace(load({}), **changes)


@pytest.mark.parametrize("variable", sorted(SETTINGS))
def test_an_empty_variable_is_the_same_as_none(variable: str) -> None:
    assert load({variable: ""}) == load({})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        *[
            (name, text)
            for name in (
                "PORT",
                "MAX_SOCKETS",
                "MAX_SOCKETS_PER_CALLER",
                "PROXY_HOPS",
                "WEB_CONCURRENCY",
            )
            for text in ("-1", "+1", "1.5", "1e3", "one", " 1", "1\n", "\u0661", "1000001")
        ],
        ("PORT", "0"),
        ("PORT", "65536"),
        ("PROXY_HOPS", "11"),
        ("WEB_CONCURRENCY", "0"),
        ("SIGNUPS", "yes"),
        ("SIGNUPS", "Closed"),
        ("SIGNUPS", "0"),
        ("RATE_LIMITS", "free=1000"),
        ("RATE_LIMITS", "pro=1/hour"),
        ("RATE_LIMITS", "free=1/hour,free=2/hour"),
        ("DATABASE_URL", "demo.db"),
        ("DATABASE_URL", "sqlite://demo.db"),
        ("DATABASE_URL", "sqlite:///"),
        ("DATABASE_URL", "sqlite:///:memory:"),
        ("DATABASE_URL", "sqlite:////"),
        ("DATABASE_URL", "sqlite:////no/such/directory/demo.db"),
        ("DATABASE_URL", f"sqlite:////tmp/{'a' * 300}.db"),
        ("DATABASE_URL", f"sqlite:////{'a' * 300}/demo.db"),
        ("DATABASE_URL", "a" * 300),
        ("SECRET_KEY", "no UTF-8: \udcff"),
        ("SECRET_KEY", "two\nlines"),
    ],
)
def test_a_wrong_value_is_one_line_with_the_variable_first(variable: str, text: str) -> None:
    with pytest.raises(SettingsError) as mistake:
        load({variable: text})
    assert str(mistake.value).startswith(variable)
    assert "\n" not in str(mistake.value)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("PORT", "65536", "PORT: must be a whole number from 1 to 65535, not '65536'"),
        ("SIGNUPS", "no", "SIGNUPS: must be open or closed, not 'no'"),
        ("RATE_LIMITS", "free", "RATE_LIMITS: 'free' is not like free=1000/hour"),
    ],
)
def test_a_wrong_value_is_shown_with_the_right_form(variable: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as mistake:
        load({variable: text})
    assert str(mistake.value) == message


def test_a_wrong_setting_ends_any_program_without_a_traceback() -> None:
    assert issubclass(SettingsError, SystemExit)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://localhost/demo",
        "postgresql:///demo",
        "postgresql://ada@localhost/demo",
        "postgresql://ada:secret@localhost/demo",
        "postgresql://ada:s%40cr%2Ft@db.example.com:6432/demo",
        "postgresql://ada:@localhost/demo",
        "postgresql://[::1]:5432/demo",
        "postgresql://ada:secret@[::1]:5432,db.example.com/demo",
        "postgresql://ada:secret@one:5432,two:5432/demo",
        "postgresql://ada:secret@localhost/demo?sslmode=require&application_name=a%20b",
    ],
)
@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_both_schemes_of_postgresql_are_one(scheme: str, url: str) -> None:
    loaded = load({"DATABASE_URL": url.replace("postgresql", scheme, 1)})
    assert loaded.postgres == url


@pytest.mark.parametrize(
    "url",
    [
        "mysql://ada:swordfish@localhost/demo",
        "postgresql:ada:swordfish@localhost/demo",
        "postgresql+psycopg://ada:swordfish@localhost/demo",
        "POSTGRESQL://ada:swordfish@localhost/demo",
        "postgresql://ada:swordfish@localhost",
        "postgresql://ada:swordfish@localhost/",
        "postgresql://ada:swordfish@/@localhost/demo",
        "postgresql://ada:swordfish#1@localhost/demo",
        "postgresql://ada:swordfish?@localhost/demo",
        "postgresql://ada:swordfish:1@localhost/demo",
        "postgresql://ada:swordfish%@localhost/demo",
        "postgresql://ada:sword%00fish@localhost/demo",
        "postgresql://ada:swordfish@[::1/demo",
        "postgresql://ada:swordfish@[]/demo",
        "postgresql://ada:swordfish@[::1]x/demo",
        "postgresql://ada:swordfish@localhost:port/demo",
        "postgresql://ada:swordfish%zz@localhost/demo",
        "postgresql://ada:swordfish @localhost/demo",
        "postgresql://ada:swordfish\n@localhost/demo",
        "postgresql://ada:swordfish@localhost/demo\n",
        "postgresql://localhost/demo?password=swordfish%",
        "postgresql://localhost/demo?password=swordfish#",
        "postgresql://localhost/demo?swordfish",
        "postgresql://localhost/demo?password=&swordfish",
        "sqlite:///:memory:?swordfish",
    ],
)
def test_a_refused_database_url_is_not_repeated(url: str) -> None:
    with pytest.raises(SettingsError) as mistake:
        load({"DATABASE_URL": url})
    assert str(mistake.value).startswith("DATABASE_URL: must be ")
    assert "swordfish" not in str(mistake.value)


@pytest.mark.parametrize(
    ("url", "workers"), [("", 1), ("postgresql://localhost/demo", 4)], ids=["SQLite", "PostgreSQL"]
)
def test_only_postgresql_has_more_than_one_worker(url: str, workers: int) -> None:
    loaded = load({"DATABASE_URL": url, "WEB_CONCURRENCY": "4"})
    assert loaded.workers == workers
    assert len(list(settings.warnings(loaded))) == (workers == 1)


@pytest.mark.parametrize(
    ("variable", "text"),
    [("SECRET_KEY", "swordfish"), ("DATABASE_URL", "postgresql://ada:swordfish@localhost/demo")],
)
def test_no_secret_is_in_the_repr(variable: str, text: str) -> None:
    assert "swordfish" not in repr(load({variable: text}))


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load({}).port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("variable", "hops"),
    [("DYNO", 1), ("FLY_APP_NAME", 2), ("RENDER", 3), ("RAILWAY_ENVIRONMENT", 0)],
)
def test_a_platform_is_recognised_with_its_hops(variable: str, hops: int) -> None:
    loaded = load({variable: "anything"})
    assert (loaded.platform, loaded.proxy_hops) == (variable, hops)


def test_proxy_hops_win_over_the_platform() -> None:
    assert load({"DYNO": "web.1", "PROXY_HOPS": "0"}).proxy_hops == 0


@pytest.mark.parametrize("variable", settings.PLATFORM_HOPS)
def test_sqlite_on_a_platform_is_warned_about(variable: str) -> None:
    warning, *_ = settings.warnings(load({variable: "anything"}))
    assert warning.startswith(f"{variable} is set, and platforms lose ")
    postgres = load({variable: "anything", "DATABASE_URL": "postgresql://localhost/demo"})
    assert not [text for text in settings.warnings(postgres) if "lose" in text]


def test_railway_without_proxy_hops_is_warned_about() -> None:
    railway = {"RAILWAY_ENVIRONMENT": "production", "DATABASE_URL": "postgresql://localhost/demo"}
    (warning,) = settings.warnings(load(railway))
    assert warning.startswith("PROXY_HOPS is not set")
    assert not list(settings.warnings(load(railway | {"PROXY_HOPS": "1"})))


@pytest.mark.parametrize("hard", [settings.MIN_FILES, settings.MIN_FILES - 1])
def test_the_file_limit_is_raised_as_far_as_allowed(hard: int) -> None:
    """In a process of its own, because a hard limit can only be lowered."""
    script = (
        f"import resource, settings; resource.setrlimit(resource.RLIMIT_NOFILE, (20, {hard}));"
        "settings.raise_file_limit(); print(settings.file_limit())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=settings.HERE, capture_output=True, text=True
    )
    if hard == settings.MIN_FILES:
        assert (done.returncode, done.stdout) == (0, f"{hard}\n")
    else:
        assert (
            done.stderr == f"ulimit -n is {hard}; at least {settings.MIN_FILES} files are needed\n"
        )


def test_sockets_leave_files_for_everything_else(limit_files: LimitFiles) -> None:
    limit_files(1000)
    assert load({}).max_sockets == 1000 - settings.SPARE_FILES


@pytest.mark.parametrize("files", [settings.MIN_FILES, settings.SPARE_FILES])
def test_few_files_leave_a_quarter_for_sockets(limit_files: LimitFiles, files: int) -> None:
    limit_files(files)
    assert load({}).max_sockets == files // 4
    assert load({"MAX_SOCKETS": "7"}).max_sockets == 7


@pytest.mark.parametrize(("soft", "raised"), [(256, 10_240), (65_536, 65_536)])
def test_macos_limit_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, soft: int, raised: int
) -> None:
    """The hard limit is said to be infinite there, and cannot be set."""
    infinite = 2**63 - 1
    limits = [soft, infinite]

    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] == infinite:
            raise ValueError
        limits[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    settings.raise_file_limit()
    assert limits == [raised, infinite]


def test_the_environment_is_read_by_load_and_not_on_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PORT", "1234")
    assert load().port == 1234
