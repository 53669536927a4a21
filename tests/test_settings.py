"""Every setting read, and every wrong value refused by the name of its variable."""

import dataclasses
import resource
import secrets
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
        database=Path("demo.db"),
        secret_key=None,
        quotas={"free": Quota("free", 1000, 3600), "pro": Quota("pro", 10_000, 3600)},
        max_sockets=5000,
        max_sockets_per_caller=100,
        signups=True,
        proxy_hops=0,
        platform=None,
        web_concurrency=1,
    )


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("PORT", "1", "port", 1),
        ("PORT", "65535", "port", 65_535),
        ("DATABASE_URL", "sqlite:////tmp/a.db", "database", Path("/tmp/a.db")),
        ("DATABASE_URL", "sqlite:///a.db", "database", Path("a.db")),
        ("SECRET_KEY", "  kept to ourselves\n", "secret_key", "kept to ourselves"),
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
def test_an_empty_variable_is_as_good_as_none(variable: str) -> None:
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
        ("REDIS_URL", "redis://localhost"),
        ("DATABASE_URL", "demo.db"),
        ("DATABASE_URL", "sqlite://demo.db"),
        ("DATABASE_URL", "sqlite:///"),
        ("DATABASE_URL", "sqlite:///:memory:"),
        ("DATABASE_URL", "sqlite:////"),
        ("DATABASE_URL", "sqlite:////no/such/directory/demo.db"),
        ("DATABASE_URL", "postgresql://localhost/demo"),
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
        ("PORT", "65536", "PORT must be a whole number from 1 to 65535, not '65536'"),
        ("SIGNUPS", "no", "SIGNUPS must be open or closed, not 'no'"),
        ("RATE_LIMITS", "free", "RATE_LIMITS: 'free' is not like free=1000/hour"),
    ],
)
def test_a_wrong_value_is_told_what_would_be_right(variable: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as mistake:
        load({variable: text})
    assert str(mistake.value) == message


def test_a_wrong_setting_ends_any_program_without_a_traceback() -> None:
    assert issubclass(SettingsError, SystemExit)


def test_a_password_in_the_database_url_is_not_repeated() -> None:
    password = secrets.token_urlsafe()
    with pytest.raises(SettingsError) as mistake:
        load({"DATABASE_URL": f"mysql://ada:{password}@localhost/demo"})
    assert password not in str(mistake.value)


def test_the_secret_key_is_not_in_the_repr() -> None:
    secret = secrets.token_hex()
    loaded = load({"SECRET_KEY": secret})
    assert loaded.secret_key == secret
    assert secret not in repr(loaded)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load({}).port = 1  # type: ignore[misc]


@pytest.mark.parametrize("variable", ["DYNO", "RENDER", "FLY_APP_NAME", "RAILWAY_ENVIRONMENT"])
def test_a_platform_stands_one_router_in_front(variable: str) -> None:
    loaded = load({variable: "anything"})
    assert (loaded.platform, loaded.proxy_hops) == (variable, 1)


def test_a_platforms_routers_can_be_counted_otherwise() -> None:
    assert load({"DYNO": "web.1", "PROXY_HOPS": "0"}).proxy_hops == 0


def test_sockets_leave_files_for_everything_else(limit_files: LimitFiles) -> None:
    limit_files(1000)
    assert load({}).max_sockets == 1000 - settings.SPARE_FILES


def test_too_few_files_leave_no_socket_rather_than_less(limit_files: LimitFiles) -> None:
    limit_files(settings.SPARE_FILES - 10)
    assert load({}).max_sockets == 0


def test_the_environment_is_read_when_asked_not_on_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PORT", "1234")
    assert load().port == 1234
