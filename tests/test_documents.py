"""The facts of the documents, compared with the code: what is told of both must be the same."""

import html
import json
import re
from pathlib import Path

from flask import Flask
from flask.testing import FlaskClient

import settings
from auth import INVALID_KEY
from commands.cli import PG_DUMP
from documents import ASYNCAPI, CONTRIBUTING, DOCUMENTS, OPENAPI, README, rows, section
from models import PREFIXES
from paths import STATS
from ratelimit import UNITS
from serving import REPOSITORY
from ws.connection import PING_SECONDS, CloseCode

CLIENTS = (REPOSITORY / "docs/testing-clients.md").read_text()
DEPLOYING = (REPOSITORY / "docs/deploying.md").read_text()
PLATFORMS = {"DYNO": "Heroku", "FLY_APP_NAME": "Fly", "RENDER": "Render"}
PLATFORMS |= {"RAILWAY_ENVIRONMENT": "Railway", "RAILWAY_ENVIRONMENT_NAME": "Railway"}

NEVER_429 = {STATS}  # keyed endpoints that answer when nothing is left


def test_links_lead_to_files_and_headings() -> None:
    link = r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\""
    found = [(path, *pair) for path in DOCUMENTS for pair in re.findall(link, path.read_text())]
    for document, target, image in found:
        path, _, anchor = (target or image).partition("#")
        file = (document.parent / path) if path else document
        assert "://" in target or file.exists(), target
        assert not anchor or "://" in target or anchor in anchors(file), target


def test_map_names_every_module_and_package() -> None:
    found = [*REPOSITORY.glob("[a-z]*.py"), *REPOSITORY.glob("[a-z]*/*.py")]
    top = {path.relative_to(REPOSITORY).parts[0] for path in found} - {"docs"}
    cells = " ".join(row[0] for row in rows("Where things are", CONTRIBUTING))
    assert set(re.findall(r"\]\(([^)]+)\)", cells)) == top | {"deploy"}


def test_imports_run_one_way() -> None:
    cells = [row[0] for row in rows("Where things are", CONTRIBUTING)]
    names = [re.findall(r"\]\((.*?)(?:\.py)?\)", cell) for cell in cells]
    row_of = {name: number for number, row in enumerate(names) for name in row}
    for path in [*REPOSITORY.glob("[a-z]*.py"), *REPOSITORY.glob("[a-z]*/*.py")]:
        own = row_of.get(path.relative_to(REPOSITORY).parts[0].removesuffix(".py"), len(names))
        imported = re.findall(r"(?m)^ *(?:from|import) (\w+)", path.read_text())
        lower = {name for name in imported if row_of.get(name, 0) > own}
        assert not lower, f"{path} imports {lower}"


def test_settings_table_is_what_is_read() -> None:
    """Every setting is in one of two tables; given their defaults, the settings are the same."""
    listed = [*rows("Settings and commands"), *rows("Other settings", DEPLOYING)]
    table = {row[0].strip("`"): row[1].strip("`") for row in listed}
    assert table.keys() == settings.VARIABLES, "edit docs/deploying.md or README.md"
    hops = {PLATFORMS[name]: hops for name, hops in settings.PLATFORM_HOPS.items()}
    assert hops == dict(re.findall(r"(\w+) (\d)", table["PROXY_HOPS"]))
    shown = settings.load(table | {"SECRET_KEY": "", "PROXY_HOPS": "0"})
    assert shown == settings.load({}), "edit README.md or docs/deploying.md"


def test_endpoints_are_those_of_the_app(app: Flask) -> None:
    rules = {rule.rule for rule in app.url_map.iter_rules() if rule.rule.startswith("/api/")}
    described = {re.sub(r"{(\w+)}", r"<\1>", path) for path in json.loads(OPENAPI)["paths"]}
    assert described == {rule for rule in rules if "/ws/" not in rule}, "edit docs/openapi.json"
    listed = set(re.findall(r"`(/api/[^`?]+)", "".join(map(str, rows("The API")))))
    assert listed == rules, "edit README.md: the table of endpoints"


def test_sockets_are_those_of_the_app(app: Flask) -> None:
    described = {channel["address"] for channel in json.loads(ASYNCAPI)["channels"].values()}
    rules = {rule.rule for rule in app.url_map.iter_rules() if "/ws/" in rule.rule}
    assert described == rules, "edit docs/asyncapi.json: channels"


def test_answers_are_described(client: FlaskClient, key: str) -> None:
    api = json.loads(OPENAPI)
    for path, operation in api["paths"].items():
        details = operation["get"]
        names = {each["name"]: each["example"] for each in details.get("parameters", [])}
        url = path.format(**names)
        body = client.get(url, headers={"X-API-Key": key}).get_json()
        content = details["responses"]["200"]["content"]["application/json"]
        schema = content["schema"]
        if "$ref" in schema:
            schema = api["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        for described in (schema["properties"], schema["required"], content.get("example", body)):
            assert set(described) == set(body), f"edit docs/openapi.json: the fields of {path}"
        errors = {"401", "429"} if client.get(url).status_code == 401 else set()
        errors -= {"429"} if path in NEVER_429 else set()
        listed = {"401", "429"} & set(details["responses"])
        advice = f"edit docs/openapi.json, or NEVER_429 in {Path(__file__).name}"
        assert listed == errors, f"{advice}: the errors of {path}"


def test_types_of_keys_are_described() -> None:
    schemas = json.loads(OPENAPI)["components"]["schemas"]
    types = schemas["AuthenticationTest"]["properties"]["api_key_type"]["enum"]
    assert set(types) == set(PREFIXES), "edit docs/openapi.json: api_key_type"
    listed = set(re.findall(r"`(\w+)` \(`(sk_\w+)`\)", README))
    assert listed == set(PREFIXES.items()), "edit README.md: the types of keys"
    assert INVALID_KEY in OPENAPI, "edit docs/openapi.json: invalid_api_key"
    assert INVALID_KEY in CLIENTS, "edit docs/testing-clients.md: invalid_api_key"


def test_units_are_those_of_the_limits() -> None:
    (units,) = re.findall(r"the tiers.* per (.*) \|$", README, re.MULTILINE)
    assert units.replace("or ", "").split(", ") == [*UNITS], "edit README.md: RATE_LIMITS"


def test_codes_of_errors_are_those_of_the_descriptions() -> None:
    codes = set(re.findall(r'"code": (?:\{[^}]*"const": )?"([a-z_]+)"', OPENAPI + ASYNCAPI))
    codes |= {"not_found", "method_not_allowed"}  # in words, as they are not of one path
    table = " ".join(row[1] for row in rows("HTTP", CLIENTS) if row[0].isdigit())
    assert set(re.findall("`([a-z_]+)`", table)) == codes, "edit docs/testing-clients.md: errors"


def test_close_codes_are_those_of_the_service() -> None:
    codes = {1000, 1002, 1007} | {int(code) for code in CloseCode}
    listed = {int(row[0]) for row in rows("WebSockets", CLIENTS) if row[0].isdigit()}
    assert listed == codes, "edit docs/testing-clients.md: close codes"
    described = set(map(int, json.loads(ASYNCAPI)["x-close-codes"]))
    assert described == codes, "edit docs/asyncapi.json: x-close-codes"


def test_console_explains_codes_as_the_documents_do(client: FlaskClient) -> None:
    """And the tiers as the settings have them."""
    found = re.findall(r"<dt>(.*?)</dt>\s*<dd>(.*?)</dd>", html.unescape(client.get("/").text))
    shown = {re.sub("<.*?>", "", term): re.sub("<.*?>", "", words) for term, words in found}
    expected = {"free": "1,000 requests per hour", "pro": "10,000 requests per hour"}
    expected |= {"five": "5 requests per day", "once": "1 request per day"}
    for *code, meaning, advice in [*rows("HTTP", CLIENTS), *rows("WebSockets", CLIENTS)]:
        if code and code[0].isdigit():
            words = f"{meaning[0].upper()}{meaning[1:]}. {advice[0].upper()}{advice[1:]}."
            expected[" ".join(code).replace("`", "")] = words.replace("`", "")
    assert shown == expected, "edit web/templates/console.html"


def test_times_of_deployments_are_those_of_the_service() -> None:
    """A stop takes 5 seconds; a WebSocket is silent between two pings."""
    unit, fly, nginx = (
        (REPOSITORY / "deploy" / name).read_text()
        for name in ("demo-service.service", "fly.toml", "nginx.conf")
    )
    stops = re.findall(r"(?m)^(?:TimeoutStopSec=|kill_timeout = )(\d+)", unit + fly)
    assert len(stops) == 2
    assert min(map(int, stops)) >= 2 * 5
    assert "\nKillMode=mixed\n" in unit, "only the master gets the signal"
    (silence,) = re.findall(r"proxy_read_timeout (\d+)s;", nginx)
    assert int(silence) > PING_SECONDS


def test_commands_are_those_of_flask(app: Flask) -> None:
    text = section("Settings and commands").rpartition("|\n")[2]
    named = set(re.findall("`([a-z]+)`", text))
    assert PG_DUMP in (REPOSITORY / "docs/operating.md").read_text()
    groups = [app.cli.commands[name] for name in ("user", "key")]
    commands = {name for group in groups for name in group.commands}  # type: ignore[attr-defined]
    assert named == commands, "edit README.md: the commands"


def test_every_requirement_is_pinned() -> None:
    files = [*REPOSITORY.glob("requirements*.txt"), REPOSITORY / ".ci" / "requirements.txt"]
    text = "\n".join(file.read_text() for file in files)
    required = set(re.findall(r"(?m)^\w[\w-]*", text))
    pinned = re.findall("(?m)^(.+?)==", (REPOSITORY / "constraints.txt").read_text())
    assert {"flask", "psycopg", "ruff"} <= required <= set(pinned)


def test_design_names_tests_that_exist() -> None:
    named = re.findall(r"`(test_\w+)`", (REPOSITORY / "docs" / "design.md").read_text())
    tests = "\n".join(file.read_text() for file in (REPOSITORY / "tests").rglob("test_*.py"))
    assert named
    assert not [name for name in named if f"def {name}(" not in tests]


def anchors(file: Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    headings = re.findall("^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
