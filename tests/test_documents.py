"""The facts of the documents, compared with the code: what is told of both must be the same."""

import builtins
import json
import re
import shlex
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from flask import Flask
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

import describe
import raised_errors
import settings
from accounts.users import UNMATCHABLE_HASH
from app import API_VERSION
from cli import PG_DUMP
from conftest import StartServer
from helpers.commands import names
from helpers.described import ANY_TIME, OPERATIONS, changed, misfits, parts_of, times_in
from helpers.documents import (
    API,
    CONTRIBUTING,
    DOCUMENTS,
    OPENAPI,
    README,
    SOCKETS,
    needs_key,
    resolved,
    rows,
    section,
    socket_operations,
)
from helpers.paths import SELDOM, STATUS, TEST
from helpers.rawsocket import handshake_bytes
from helpers.server import (
    REPOSITORY,
    eventually,
    patience,
    sources,
)
from models import DAY, FIELD_RULES, PREFIXES, ApiKey, User
from ratelimit import QUOTA, UNITS
from server import lifecycle, worker
from server.log import redact
from service import application, connections, responses
from storage import key_store, postgres, sqlite
from web import forms
from ws.connection import MAX_MESSAGE_BYTES, PING_SECONDS, STALLED_SECONDS, CloseCode

DEPLOYING = (REPOSITORY / "docs/deploying.md").read_text()
DEPLOY = {
    path.name: path.read_text()
    for path in (
        *(REPOSITORY / "deploy").iterdir(),
        *(REPOSITORY / name for name in ("Procfile", "compose.yaml", "requirements.txt")),
    )
}
PLATFORMS = {
    "DYNO": "Heroku",
    "FLY_APP_NAME": "Fly",
    "RENDER": "Render",
    "RAILWAY_ENVIRONMENT": "Railway",
    "RAILWAY_ENVIRONMENT_NAME": "Railway",
}


def test_links_lead_to_files_and_headings() -> None:
    link = r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\""
    for document, target, image in [
        (path, *pair) for path in DOCUMENTS for pair in re.findall(link, path.read_text())
    ]:
        path, _, anchor = (target or image).partition("#")
        file = (document.parent / path) if path else document
        assert "://" in target or file.exists(), target
        assert not anchor or "://" in target or anchor in anchors(file), target


def test_changelog_dates_the_version_that_status_says() -> None:
    dated = re.findall(
        r"(?m)^## \[(.*)\] - \d{4}-\d\d-\d\d$", (REPOSITORY / "CHANGELOG.md").read_text()
    )
    assert [dated[0], API["info"]["version"], SOCKETS["info"]["version"]] == [API_VERSION] * 3


def test_map_names_every_module_and_package() -> None:
    top = {path.relative_to(REPOSITORY).parts[0] for path in sources()}
    cells = " ".join(row[0] for row in rows("Where things are", CONTRIBUTING))
    assert {*re.findall(r"\]\(([^)]+)\)", cells)} == top | {"tests", "benchmarks", "deploy"}


def test_imports_run_one_way() -> None:
    """And what is above service/ knows nothing about HTTP; werkzeug.security hashes passwords."""
    row_of = {
        name: number
        for number, row in enumerate(rows("Where things are", CONTRIBUTING))
        for name in re.findall(r"\]\((.*?)(?:\.py)?\)", row[0])
    }
    http = r"(?m)^ *(?:from|import) (flask|werkzeug(?!\.security)|click|jinja2)"
    for path in sources():
        own = row_of.get(path.relative_to(REPOSITORY).parts[0].removesuffix(".py"), len(row_of))
        imported = re.findall(r"(?m)^ *(?:from|import) (\w+)", text := path.read_text())
        lower = {name for name in imported if row_of.get(name, 0) > own}
        lower |= {*re.findall(http, text)} if own < row_of["service"] else set()
        assert not lower, f"{path} imports {lower}"


def test_settings_table_is_what_is_read() -> None:
    """Every setting is in one of two tables; given their defaults, the settings are the same."""
    table = {
        row[0].strip("`"): row[1].strip("`") if row[1] != "none" else ""
        for row in (*rows("Settings and commands"), *rows("Other settings", DEPLOYING))
    }
    assert table.keys() == settings.VARIABLES, "edit docs/deploying.md or README.md"
    assert dict(re.findall(r"(\w+) (\d)", table["PROXY_HOPS"])) == {
        PLATFORMS[name]: hops for name, hops in settings.PLATFORM_HOPS.items()
    }
    assert settings.load(table | {"PROXY_HOPS": "0"}) == settings.load({}), (
        "edit README.md or docs/deploying.md"
    )
    for name, low, high in re.findall(
        r"(?m)^\| `([A-Z_]+)`.* (\d+) to ([\d,]*\d)(?: \||[.;)])", README + DEPLOYING
    ):
        with pytest.raises(SystemExit, match=f"{name}: .* {low} to {high.replace(',', '')},"):
            settings.load({name: "-1"})


def test_every_setting_is_used() -> None:
    used = {
        name.upper()
        for file in (*sources(), *REPOSITORY.glob("web/templates/*.html"))
        for name in re.findall(r"\bsettings\.(\w+)", file.read_text())
    }
    assert used >= settings.VARIABLES, "no code reads these settings"


# A path that tells how many WebSockets there are in the server's memory, open or not. Nothing may
# be left to the garbage collector: it comes so seldom that the memory would grow meanwhile.
# The response to another path takes as long as an outage of the database.
WEBSOCKETS = """
import gc, gevent, peewee, time
gc.disable()
from server import lifecycle
from ws.connection import WebSocket

def serving(worker, service, serving=lifecycle.serving):
    service.add_url_rule("/kept", "kept", kept)
    service.add_url_rule("/outage", "outage", outage)
    return serving(worker, service)

def messages(ws, messages=WebSocket.messages):
    for number, text in enumerate(messages(ws)):
        if not number:  # as if the client had waited for 25 s
            time.time = lambda clock=time.time: clock() + 25
        yield text

WebSocket.messages = messages

def kept():
    return str(sum(type(each) is WebSocket for each in gc.get_objects()))

def outage(execute=peewee.Database.execute_sql):
    peewee.Database.execute_sql = fail
    gevent.sleep(1.5)
    peewee.Database.execute_sql = execute
    return ""

def fail(*query):
    raise peewee.OperationalError("disk I/O error")

lifecycle.serving = serving
"""


def of(each: Any) -> list[Any]:
    """The messages of an operation or of a reply."""
    return [resolved(message, SOCKETS) for message in each["messages"]]


def received(
    ws: ClientConnection,
    seconds: float,
    types: set[str] | None = None,
    when: str = "",
    least: int = 0,
) -> list[Any]:
    """The messages of these seconds; with types, only until there are enough, and one of each."""
    bodies: list[Any] = []
    end = time.monotonic() + seconds
    with suppress(TimeoutError, ConnectionClosed):
        while types is None or len(bodies) < least or types - {body["type"] for body in bodies}:
            bodies.append(json.loads(ws.recv(timeout=max(0, end - time.monotonic()))))
    missing = (types or set()) - {body["type"] for body in bodies}
    assert not missing, (
        f"the socket sends no {missing} within {seconds} s {when}, only {bodies}: see Ticker; or "
        "let the first example of a message in docs/asyncapi.json ask for it; what is sent only "
        "when something is new belongs in SELDOM in tests/helpers/paths.py"
    )
    return bodies


@pytest.mark.parametrize("name", SOCKETS["channels"])
def test_messages_are_described(start_patched: StartServer, name: str) -> None:
    """One client sends the examples, and gets the replies; another gets what is sent besides.

    It is there before and after the first one. When both have left, nothing of them is kept, and
    two later ones get the same.
    """
    advice = f"edit docs/asyncapi.json: {name}"
    operations = socket_operations(name)
    assert {
        each.get("reply", each).get("channel", each["channel"])["$ref"] for each in operations
    } == {f"#/channels/{name}"}, (
        f"{advice}: an operation, with the messages that are sent, and its reply in this channel"
    )
    assert "summary" in SOCKETS["channels"][name], f"{advice}: summary"
    path = SOCKETS["channels"][name]["address"]
    server = start_patched(WEBSOCKETS, WEB_CONCURRENCY="1")
    assert (server.send(handshake_bytes(path)).status == 401) == needs_key(name), (
        f"{advice}: security"
    )

    asked = [each for each in operations if each["action"] == "receive"]
    replies = [text for each in asked if "reply" in each for text in of(each["reply"])]
    others = [text for each in operations if each["action"] == "send" for text in of(each)]
    to_one, to_other = (
        {each["payload"]["properties"]["type"]["const"]: each["payload"] for each in described}
        for described in (replies, others)
    )
    keys = [server.new_key(), server.new_key()]
    urls = [f"{server.ws_url}{path}?api_key={key}" for key in keys]
    examples = [
        body
        for each in asked
        for text in of(each)
        for example in [text["examples"][0]["payload"]]
        for body in (example, *(body for _, body in changed(example, text["payload"], SOCKETS)))
    ]
    # Or none, if it tells errors only, or if some messages have no reply.
    told = len(examples) * all("reply" in each and to_one.keys() - {"error"} for each in asked)
    for when in ("at first", "after all sockets have closed"):
        with connect(urls[1]) as other:
            with connect(urls[0]) as one:
                for example in examples:
                    one.send(example if isinstance(example, str) else json.dumps(example))
                # A reply is for who has sent a message.
                bodies = received(one, 10, {*to_one}, when, told) + received(one, 0.1)
                found = sum(body["type"] in to_one for body in bodies)
                assert one.close_code or found == told or not told, (
                    f"{name} sends {found} replies to {told} messages, right and wrong ones: "
                    f"send one to each, or close the socket: {examples}"
                )
                left = time.monotonic()
            assert time.monotonic() - left < patience(3), f"{name}: the handler must go on reading"
            # What is sent is for all clients.
            bodies += received(other, 10, {*to_other} - SELDOM, when)
        eventually(
            lambda: server.ask("/kept").body == b"0",
            5,
            f"{name}: a set, a queue, a greenlet, or a cycle of references keeps a left WebSocket",
        )
    assert all(abs(each - time.time()) < 60 for each in times_in(json.dumps(bodies))), (
        f"{name}: a time is not now: {bodies}"
    )
    assert not [key for key in keys if key[17:] in str(bodies)], f"{name}: it sends a key"
    shown = [each["payload"] for one in (*replies, *others) for each in one.get("examples", ())]
    assert not (
        early := [
            body
            for example in shown
            for times in [times_in(str(example))]
            # It has several times, and they are the same: when it is sent.
            if len({*times}) == 1 < len(times)
            for body in bodies
            if body["type"] == example["type"] not in to_other
            if min(times_in(str(body))) - time.time() < 30
        ]
    ), (
        f"{name}: a reply has a time from before its message: take the time after each message, or "
        f"edit the example in docs/asyncapi.json: {early}"
    )
    schemas = to_one | to_other
    for body in bodies + shown:
        assert body["type"] in schemas, f"{advice}: the message {body}"
        wrong = misfits(body, schemas[body["type"]], SOCKETS)
        assert not wrong, f"{advice}: {body['type']}: {'; '.join(wrong)}"


def heard(ws: ClientConnection, seconds: float) -> list[tuple[str, str, str]]:
    """What the messages of these seconds say: their types, fields, and values without times."""
    return [
        (body["type"], field, re.sub(ANY_TIME, "", str(value)))
        for body in received(ws, seconds)
        for field, value in body.items()
    ]


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in SOCKETS["channels"]
        if any(each["action"] == "send" for each in socket_operations(name))
    ],
)
def test_updates_go_on_and_are_those_of_a_new_client(start_patched: StartServer, name: str) -> None:
    """Unless the socket is closed. What changes, or isn't the same for two clients, is ignored."""
    server = start_patched(WEBSOCKETS, WEB_CONCURRENCY="1")
    server.may_log_a_traceback = True  # of a Ticker, which closes its sockets in an outage
    path = f"{server.ws_url}{SOCKETS['channels'][name]['address']}?api_key="
    urls = [path + server.new_key() for _ in range(2)]
    with connect(urls[0]) as old, connect(urls[1]) as other:
        first = Counter(heard(old, 2.5))
        fixed = {each for each in heard(other, 0) if first[each] > 1}
        with connect(urls[0]) as new:  # which may be counted
            fresh = heard(new, 1.5)
        told = {each[:2] for each in heard(old, 2) if each in fresh}
        stale = {each[:2] for each in fixed} - told & {each[:2] for each in fresh}
        assert old.close_code or not stale, (
            f"{name}: {stale} of an open socket are {fixed}, and of a new one {fresh}: ask again "
            "before each update"
        )
        server.ask("/outage")
        heard(old, 0)  # what came before
        assert old.close_code or heard(old, 3) or max(first.values(), default=0) < 2, (
            f"{name}: an outage has ended its updates, but not the socket: use a Ticker, or close "
            "the socket when the greenlet that sends fails"
        )


def test_fields_and_types_of_keys_are_described_as_they_are_checked() -> None:
    checked = {
        "username": {"pattern": f"^{FIELD_RULES['username'][0]}$"},
        # With the format "email", some clients would refuse users such as a@corp.local.
        "email": {"maxLength": User.email.max_length, "pattern": "^[!-~]+@[!-~]+$"},
        "api_key_name": {"minLength": 1, "maxLength": ApiKey.name.max_length},
        "api_key_type": {"enum": sorted(PREFIXES)},
        "rate_limit_tier": {"pattern": f"^{QUOTA.pattern[1:].partition(')')[0]}$"},
    }
    wrong = {
        name
        for each in parts_of([API, SOCKETS])
        for name in checked.keys() & (each.keys() if isinstance(each, dict) else ())
        if isinstance(each[name], dict) and not checked[name].items() <= each[name].items()
    }
    assert not wrong, f"edit docs/openapi.json and asyncapi.json: {wrong}: {checked}"
    assert {*re.findall(r"`(\w+)`\s\(`(sk_\w+)`\)", README)} == {*PREFIXES.items()}, (
        "edit README.md: the types of keys"
    )


def test_codes_of_errors_are_those_of_the_service() -> None:
    described = [
        *(
            (int(status), answer)
            for each in OPERATIONS
            for status, answer in each.responses.items()
        ),
        *(
            (refusal["status"], refusal)
            for channel in SOCKETS["channels"].values()
            for refusal in resolved(channel["x-refusals"], SOCKETS)
        ),
    ]
    wrong = [
        f"{header}, which a {status} lacks or which isn't in seconds: {row}"
        for row in (*API["x-codes"], *(answer for _, answer in described if "when" in answer))
        for before, header in re.findall(r"(\w+ in )?`([A-Z]\w*-[\w-]+)`", str(row))
        for status, answer in described
        if status == row["status"] and row["code"] in json.dumps(answer)
        if header not in answer.get("headers", ())
        or (before == "seconds in " and API["components"]["headers"][header]["example"] > DAY)
    ]
    assert not wrong, f"edit docs/endpoints.json: codes, or docs/asyncapi.json: {wrong[0]}"
    codes = {
        *re.findall(r'"code": "([a-z_]+)"', json.dumps(described)),
        *(code for code, _ in responses.DEFAULTS.values()),
    }
    listed = {(row["status"], row["code"]) for row in API["x-codes"]}
    assert codes <= {code for _, code in listed}, "edit docs/endpoints.json: codes"
    for path in [path for path in sources() if path.parent.name != "web"]:
        for status, code in raised_errors.errors_in(path.read_text()):
            assert (status, code) in listed, (
                f'edit docs/endpoints.json: codes: {{"status": {status}, "code": "{code}", '
                f'"when": "...", "then": "..."}} for {path}'
            )


def test_openapi_is_what_describe_writes(app: Flask) -> None:
    assert (
        describe.described(app, OPENAPI, json.loads(describe.ENDPOINTS.read_text())) == OPENAPI
    ), "run .venv/bin/python docs/describe.py"


def deployed(name: str, form: str) -> str:
    """What a file in deploy/ says."""
    return str([*re.findall(form, DEPLOY[name]), f"not in deploy/{name}"][0])


def websockets(files: int) -> int:
    """How many may be open, where so many files may be."""
    with mock.patch("resource.getrlimit", return_value=(files, files)):
        return settings.max_websockets()


GUNICORN = (REPOSITORY / "gunicorn.conf.py").read_text()
(IDLE,) = re.findall(r"keepalive = (\d+) if settings.proxy_hops else (\d+)", GUNICORN)
EXPLAINED = {  # words of `when` and `then`, which the console shows for each code
    '400, "code": "bad_request"': 'invalid.*": "Correct',
    '400, "code": "bad_handshake"': 'handshake is invalid.*": "Correct',
    '401, "code": "missing_api_key"': 'No key was sent, or an empty.*": "Send one',
    '401, "code": "invalid_api_key"': 'unknown, malformed, revoked, or exp.*": "Get another key',
    '404, "code": "not_found"': 'no such path.*": "Correct the path',
    '405, "code": "method_not_allowed"': 'not accept this.*": "Use a method that `Allow` lists',
    '408, "code": "request_timeout"': 'did not arrive.*": "Try again',
    '413, "code": "content_too_large"': 'is larger than.*": "Send a smaller',
    '426, "code": "upgrade_required"': 'takes WebSockets.*": "Use a WebSocket client',
    '429, "code": "rate_limited"': 'limit of the key is used up.*": "Wait .*`Retry-After`',
    '429, "code": "too_many_sockets"': 'This caller has too many.*": "Close one',
    '500, "code": "internal_error"': 'a bug in the service.*": "Report it',
    '503, "code": "unavailable"': 'The database can\'t be used.*": "Wait .*`Retry-After`',
    '503, "code": "too_many_sockets"': 'The server has too many.*": "Try again later',
    '"1000"': 'The client closed .* nothing more to send.*": "Do nothing',
    '"1001"': 'is stopping or restarting.*": "Wait .*, then reconnect; wait longer after each',
    '"1002"': 'violated RFC 6455.*": "Correct the client',
    '"1003"': 'sent a binary.*": "Send text',
    '"1006"': 'was lost.*": "Reconnect at once, then wait longer after each failure',
    '"1007"': 'not UTF-8.*": "Send UTF-8',
    '"1008"': 'revoked, has expired, or was deleted.*": "Get a new key.* refused with 401',
    '"1009"': 'was larger than.*": "Send smaller',
    '"1011"': 'a bug in the service.*": "Wait .*, then reconnect, and report',
}
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
FIGURES = [  # what a document tells, and what is true
    ("README.md", r"text message of up to ([\d,]+) bytes", f"{MAX_MESSAGE_BYTES:,}"),
    ("README.md", r"tiers; .* per (.*?) \|", ", ".join(UNITS).replace(" day", " or day")),
    ("SECURITY.md", r"form slowly, is disconnected after (\d+) seconds", worker.SEND_SECONDS),
    ("SECURITY.md", r"a ping, after (\d+)\.", PING_SECONDS + STALLED_SECONDS),
    ("SECURITY.md", r"arrive within (\d+) seconds, or (\d+) behind a proxy", IDLE[::-1]),
    (
        "SECURITY.md",
        r"can send (\d+) forms and (\d+) passwords a minute, and create (\d+) accounts an hour",
        tuple(str(each.limit) for each in (forms.FORMS, forms.PASSWORDS, forms.SIGN_UPS)),
    ),
    ("SECURITY.md", r"can try (\d+) passwords a minute", forms.PASSWORDS_FOR_ACCOUNT.limit),
    ("SECURITY.md", r"have (\d+) keys, each with 100", settings.MAX_KEYS),
    ("SECURITY.md", r"each with (\d+) time sockets", settings.load({}).max_sockets_per_caller),
    (
        "SECURITY.md",
        r"valid for (\d+) days",
        Flask.default_config["PERMANENT_SESSION_LIFETIME"].days,
    ),
    ("SECURITY.md", r"was deleted is rejected within (\d+) seconds", 2),  # see test_constants
    ("SECURITY.md", r"time sockets are closed with code (\d+)", CloseCode.REVOKED.value),
    ("SECURITY.md", r"over (\d+) connections doesn't", 20),  # as test_wire_floods.py does
    ("SECURITY.md", r"stays below (\d+) ms, or (\d+) ms with PostgreSQL", ("50", "150")),
    ("SECURITY.md", r"at most (\d+) ms above", 20),  # as test_cost.py has it
    ("SECURITY.md", r"at most (\d+) forms wait", forms.hash_slots.counter),
    ("SECURITY.md", r"its requests in each (\w+)", "hour"),
    ("CONTRIBUTING.md", r"codes are (\d+) to (\d+)", ("4000", "4999")),  # RFC 6455 part 7.4.2
    ("README.md", r"in this (\w+), in (\d+) hours, and in total", ("hour", "24")),
    ("README.md", r"`/(\w+\.\w+)` and `/(\w+\.\w+)` describe", ("openapi.json", "asyncapi.json")),
    ("README.md", r"each restart logs this user (\w+)", "out"),
    ("SECURITY.md", r"hashed with (\w+)", UNMATCHABLE_HASH.partition(":")[0]),
    ("SECURITY.md", r"loses at most the last (\w+)", "second"),
    ("README.md", r"at least (\d+) characters", settings.MIN_SECRET_CHARACTERS),
    ("README.md", r"`python app.py` on ([\d.]+)", "127.0.0.1"),
    ("README.md", r"needs Python (\S+) to (\S+) on", ("3.11", "3.15")),
    ("docs/operating.md", r"Python is older than (\S+)", "3.11"),
    ("pyproject.toml", r'python_version = "(\S+)"', "3.11"),
    (".ci/run", r"python3\.1{(\d)\.\.(\d)}", ("1", "5")),
    (
        ".ci/run",
        r"pytest --postgres tests/test_{(.*?)}\.py tests/wire/test_wire_(\w+)\.py",
        (
            ",".join(
                path.stem.removeprefix("test_")
                for path in sorted(REPOSITORY.glob("tests/test_*.py"))
                if re.search(
                    r"(?m)mark\.postgres|\bcluster\b|^pytestmark.*with_sample|so also in [P]ost",
                    path.read_text(),
                )
            ),
            "postgres",
        ),
    ),
    (".github/workflows/ci.yml", r"run: bash (.*?) env:", ".ci/run"),
    (
        ".github/workflows/ci.yml",
        r"python: \[(.*?)\]",
        ", ".join(f'"3.{minor}"' for minor in range(11, 16)),
    ),
    *(
        (
            "docs/asyncapi.json" if code.startswith('"') else "docs/endpoints.json",
            rf'({code})[^}}]*"when": "[^}}]*{words.replace(".*", "[^}]*")}',
            code,
        )
        for code, words in EXPLAINED.items()
    ),
    (
        "docs/openapi.json",
        r"(HEAD counts .*?)\. Any",
        "HEAD counts like GET, OPTIONS does not count",
    ),
    ("docs/openapi.json", r'"With a 429 or 503: the (\w+) to wait', "seconds"),
    (
        "docs/openapi.json",
        r'"public", "description": "(.*?)"',
        "Requires no key. Requests don't count.",
    ),
    (
        "docs/asyncapi.json",
        r'"too_many_sockets", "when": "(.*?) has .* "too_many_sockets", "when": "(This key) has',
        ("This client address", "This key"),
    ),
    ("docs/asyncapi.json", r"version other than (\d+)\..* other than (\d+)\.", ("13", "13")),
    ("docs/asyncapi.json", r"(\w+) subprotocol is accepted", "no"),
    ("docs/asyncapi.json", r"(\w+) displayed second is skipped or repeated", "No"),
    ("docs/asyncapi.json", r'; its messages ([^,."]*)', "don't count"),
    ("docs/asyncapi.json", r"ping every (\d+) seconds", PING_SECONDS),
    ("docs/asyncapi.json", r"for (\d+) seconds is disconnected", STALLED_SECONDS),
    ("docs/asyncapi.json", r"`time_update` within ([\d.]+) seconds", 0.2),  # see Ticker.stream
    ("docs/asyncapi.json", r"first update within ([\d.]+) seconds", 0.2),
    (
        "docs/asyncapi.json",
        r'"name": "text", [^{}]*"contentType": "(.*?)", "payload": {[^{}]*"maxLength": (\d+)',
        ("text/plain", str(MAX_MESSAGE_BYTES)),
    ),
    ("docs/asyncapi.json", r"Up to ([\d,]+) bytes", f"{MAX_MESSAGE_BYTES:,}"),
    ("docs/asyncapi.json", r'when": "A message was larger than (.*?) b', f"{MAX_MESSAGE_BYTES:,}"),
    ("docs/asyncapi.json", r'"asyncapi": "(.*?)"', "3.1.0"),  # tools read the others differently
    ("docs/asyncapi.json", r'"host": "(.*?)", "protocol": "(.*?)"', ("{host}", "ws")),
    ("docs/asyncapi.json", r'"default": "127.0.0.1:(\d+)"', settings.load({}).port),
    ("docs/asyncapi.json", r'"defaultContentType": "(.*?)"', "application/json"),
    ("docs/asyncapi.json", r'"method": "(\w+)".*"method": "(\w+)"', ("GET", "GET")),
    ("docs/asyncapi.json", r'"x-check": "(.*?)"', TEST),
    (
        "docs/asyncapi.json",
        r'"security": \[ { "\$ref": "(\S+)" }, { "\$ref": "(\S+)" } \]',
        ("#/components/securitySchemes/query", "#/components/securitySchemes/header"),
    ),
    # Anybody may ask for the status, with a key or without.
    ("docs/endpoints.json", r'"security": (.*?), "errors"', '[{}, {"apiKey": []}]'),
    ("docs/openapi.json", r'"openapi": "(.*?)"', "3.1.0"),
    ("docs/openapi.json", r'"servers": \[(.*?)\]', ' { "url": "." } '),  # where the file is
    *(
        (
            "docs/openapi.json",
            rf'"components": .*"status": {status}, "detail": "(.*?)"',
            responses.DEFAULTS[status][1],
        )
        for status in (400, 413, 500, 503)
    ),
    ("docs/endpoints.json", r"body is larger than (\d+) KiB", application.MAX_BODY_BYTES // 1024),
    ("docs/endpoints.json", r"body did not arrive within (\d+) s", application.BODY_SECONDS),
    ("docs/openapi.json", r"OPTIONS gets a (\d+) without a body", 200),
    ("docs/openapi.json", r"a prefix such as `(\w+)`", PREFIXES["production"]),
    (
        "docs/openapi.json",
        r'"ContentTooLarge": { "description": ".*? larger than (\d+) KiB',
        application.MAX_BODY_BYTES // 1024,
    ),
    ("gunicorn.conf.py", r'bind = f"(.*?):', "0.0.0.0"),  # or no router of a platform reaches it
    ("docs/deploying.md", r"open for (\d+) seconds instead of (\d+)", IDLE),
    ("docs/deploying.md", r"belong to user (\d+)", deployed("Dockerfile", r"--uid (\d+)")),
    ("docs/deploying.md", r"-v demo-data:(\S+)", deployed("Dockerfile", r"sqlite:///(/\w+)/")),
    ("docs/deploying.md", r"volumes create (\w+)", deployed("fly.toml", r'source = "(.*)"')),
    ("docs/deploying.md", r"data -r (\w+)", deployed("fly.toml", r'primary_region = "(.*?)"')),
    (
        "docs/deploying.md",
        r"/dev/stdin (\S+)",
        deployed("demo-service.service", r"EnvironmentFile=(.*)"),
    ),
    (
        "docs/deploying.md",
        r"-p EnvironmentFile=(\S+)",
        deployed("demo-service.service", r"EnvironmentFile=(.*)"),
    ),
    (
        "docs/deploying.md",
        r"git clone URL (\S+)",
        deployed("demo-service.service", r"WorkingDirectory=(.*)"),
    ),
    ("docs/deploying.md", r"nologin (\S+)", deployed("demo-service.service", r"User=(.*)")),
    ("docs/deploying.md", r"-p User=(\S+)", deployed("demo-service.service", r"User=(.*)")),
    ("docs/deploying.md", r"default is `(.*?):PORT`", "0.0.0.0"),
    ("docs/deploying.md", r"`Procfile`'s `(.*?)`", DEPLOY["Procfile"][5:-1]),
    (
        "docs/deploying.md",
        r"`(RAILWAY_DEPLOYMENT_DRAINING_SECONDS=\d+)",
        "RAILWAY_DEPLOYMENT_DRAINING_SECONDS=10",
    ),
    ("docs/deploying.md", r"stop takes \[up to (\d+) seconds", 5),
    (
        "docs/deploying.md",  # nobody else reaches it, and it may do nothing else
        r"docker run (.*?) -v",
        "-d --name demo --read-only --cap-drop ALL --security-opt no-new-privileges \\ "
        "-p 127.0.0.1:8000:8000",
    ),
    # Its database is kept, and the proxy tells it who asks.
    ("docs/deploying.md", r"-v (\S+) -e (\S+) -e", ("demo-data:/data", "PROXY_HOPS=1")),
    *(  # what a start needs
        (page, rf"(SECRET_KEY){before_it}", "SECRET_KEY")
        for page, before_it in [
            ("docs/deploying.md", r"=\S+ -c '[^']*'\) fly deploy"),
            ("docs/deploying.md", "` and `RAILWAY"),
            ("docs/deploying.md", r'=" \+ [^|]*\| sudo install .* systemctl enable'),
            ("docs/growing.md", r"=\S+ -c '[^']*'\) WEB_CONCURRENCY=2 \.venv/bin/gunicorn"),
        ]
    ),
    ("docs/growing.md", r"at most (\d+) connections: 7", postgres.KEY_CONNECTIONS + 3),
    ("docs/growing.md", r"(\d+) for keys", postgres.KEY_CONNECTIONS),
    ("docs/growing.md", r"(\d+) for pages", postgres.PAGE_CONNECTIONS),
    ("docs/growing.md", r"at most (\w+) requests per round", WORDS[postgres.KEY_CONNECTIONS]),
    ("docs/growing.md", r"a connection for ([\d.]+) s at most", postgres.CONNECTION_SECONDS),
    ("docs/growing.md", r"to each statement for ([\d.]+) s\.", postgres.ANSWER_SECONDS),
    ("docs/growing.md", r"503 within (\w+) seconds, pages", WORDS[round(postgres.HIT_SECONDS)]),
    ("docs/deploying.md", r"\| with `(\w+)`, users can be", "closed"),
    ("docs/deploying.md", r"needs (\w+) `worker_connections` and (\w+) open", ("two", "two")),
    ("docs/growing.md", r"processes, (\d+) by default", settings.load({}).web_concurrency),
    ("docs/growing.md", r"only the last (\w+) of the chart", "second"),
    ("docs/growing.md", r"With PostgreSQL (\d+) or later", 14),
    ("docs/growing.md", r"pages within (\w+), and public", "ten"),
    (
        "docs/growing.md",
        r"add up to (\w+) seconds, those of a page to (\w+)\.",
        ("eight", "fifteen"),
    ),
    ("docs/growing.md", r"again within (\w+) seconds and pages within a (\w+)", ("5", "minute")),
    ("docs/operating.md", r"notices changes within (\w+) seconds", "two"),
    ("docs/operating.md", r"longer than ([\d,]+) characters", f"{len(redact('x.' * 9999)):,}"),
    ("docs/operating.md", r"says `([\w ]+):` with the cause", "database unavailable"),
    (
        "docs/operating.md",
        r"`(\w+ \w+)`, each once a (\w+) at most",
        ("error connecting", "minute"),
    ),
    ("docs/operating.md", r"up to ([\w ]+) of counts \(SQLite\)", "one second"),
    ("docs/operating.md", r"at least (\d+) to start", 128),
    ("docs/operating.md", r"at most ([\d,]+), is reserved", f"{9000 - websockets(18_000):,}"),
    ("docs/operating.md", r"start waits up to (\w+) seconds", WORDS[round(sum(sqlite.PAUSES))]),
    ("docs/operating.md", r"512 connections and (\d+) sockets", websockets(1024)),
    ("docs/operating.md", r"([\d,]+) sockets need a limit of 12,000", f"{websockets(12_000):,}"),
    (
        "docs/protecting-your-api.md",
        r"after (\d+) seconds at most",
        int(deployed("gate.nginx.conf", r"next_upstream_timeout (\d+)s"))
        + int(deployed("gate.nginx.conf", r"proxy_read_timeout (\d+)s;")),
    ),
    ("docs/protecting-your-api.md", r"user may have (\d+) keys", settings.MAX_KEYS),
    ("docs/protecting-your-api.md", r"up to (\d+) times an hour", forms.NEW_KEYS.limit),
    ("docs/testing-clients.md", r"more than ([\d,]+) bytes", f"{MAX_MESSAGE_BYTES:,}"),
    ("docs/testing-clients.md", r"more than (\w+) seconds, and read", WORDS[STALLED_SECONDS]),
    ("docs/testing-clients.md", r"a binary message with (\d+)", CloseCode.NOT_TEXT.value),
    ("docs/testing-clients.md", r"closes the socket with code (\d+)", CloseCode.TOO_BIG.value),
    ("docs/testing-clients.md", r"each (\d+), (\d+), and (\d+) of a pro", ("200", "204", "429")),
    (
        "docs/testing-clients.md",
        r"get a (\d+), (\d+), (\d+), or (\d+)",
        ("414", "417", "431", "501"),
    ),
    ("docs/protecting-your-api.md", r"your API that are idle for a (\w+)", "second"),
    ("docs/protecting-your-api.md", r"connection to the pages gets a (\d+)", 421),
    ("docs/protecting-your-api.md", r"the key's ID \(Caddy: `(.*?)`\)", "user_id"),
    ("docs/protecting-your-api.md", r"error log is kept at `(\w+)`", "emerg"),
    ("docs/protecting-your-api.md", r"get a (\d+), (\d+), or (\d+)", ("502", "503", "504")),
    ("docs/protecting-your-api.md", r"at most (\d+) KiB in (\d+) fields", ("32", "90")),
]


@pytest.mark.parametrize(("page", "told", "is_so"), FIGURES)
def test_figures_are_those_of_the_service(page: str, told: str, is_so: object) -> None:
    text = " ".join((REPOSITORY / page).read_text().split())
    # It may say so several times, such as for each socket with a key.
    assert {*re.findall(told, text)} == {is_so if isinstance(is_so, tuple) else str(is_so)}, (
        f"edit {page}: {told}"
    )


CODE = "".join(  # with the names of the files
    f"{path} {path.read_text()} "
    for path in (
        *sources(),
        *REPOSITORY.glob("[bdt]*/**/*.py"),
        *REPOSITORY.glob("web/*/*.[hj]*"),
        *REPOSITORY.glob("docs/*/*.patch"),
    )
)
LINES = [  # of files in DEPLOY, with what users would notice without them
    ("demo-service.service", "Requires=demo-service.socket", "a start listens on 127.0.0.1 only"),
    ("demo-service.service", "StartLimitIntervalSec=0", "five failed starts end nothing for good"),
    ("demo-service.service", "Type=notify", "systemd knows when it is ready"),
    ("demo-service.service", "User=demo-service", "a hole in the service gives nobody root"),
    ("demo-service.service", "WorkingDirectory=/srv/demo-service", "it finds gunicorn.conf.py"),
    ("demo-service.service", "Environment=PROXY_HOPS=1", "clients have addresses of their own"),
    ("demo-service.service", "StateDirectory=demo-service", "the database is kept"),
    (
        "demo-service.service",
        "Environment=DATABASE_URL=sqlite:////var/lib/demo-service/demo.db",
        "the database is kept",
    ),
    ("demo-service.service", "StateDirectoryMode=0700", "nobody else on the machine reads keys"),
    ("demo-service.service", "SystemCallErrorNumber=EPERM", "to ask for more files kills nothing"),
    ("demo-service.service", "SystemCallFilter=@system-service", "it may do what a server does"),
    ("demo-service.service", "KillMode=mixed", "only the master gets the signal"),
    ("demo-service.service", "Restart=on-failure", "a crash ends no service for good"),
    ("demo-service.service", "UMask=0077", "nobody else on the machine reads what it writes"),
    ("demo-service.service", "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX", "it may notify"),
    ("demo-service.service", "WantedBy=multi-user.target", "it starts with the machine"),
    ("demo-service.socket", "ListenStream=127.0.0.1:8000", "nobody forges X-Forwarded-For"),
    ("demo-service.socket", "WantedBy=sockets.target", "it starts with the machine"),
    ("demo-service.service", "ProtectHostname=yes", "it changes nothing of the machine"),
    ("demo-service.service", "ProcSubset=pid", "it reads nothing of the machine"),
    (
        "nginx.conf",
        "log_format demo_service '$remote_addr [$time_local] "
        '"$request_method $demo_service_path" $status \'',
        "the log says who has asked for what, and the answer",
    ),
    ("nginx.conf", "return 301 https://$host$request_uri;", "a page stays the same with TLS"),
    ("nginx.conf", "listen [::]:80;", "IPv6 is served"),
    ("nginx.conf", "listen [::]:443 ssl;", "IPv6 is served"),
    ("Dockerfile", "RUN useradd .* && install -d -o app -g app -m 700 /data", "it may write there"),
    ("Dockerfile", "USER app", "a hole in the service gives nobody root"),
    (
        "Dockerfile",
        "COPY constraints.txt requirements.txt requirements-postgres.txt ./\nARG POSTGRES\n"
        "RUN pip install --no-cache-dir -r requirements.txt "
        "${POSTGRES:+-r requirements-postgres.txt}",
        "with POSTGRES=1, the driver is installed",
    ),
    ("Dockerfile", "EXPOSE 8000", "the port that a platform asks"),
    (
        "Dockerfile",
        "ENV DATABASE_URL=sqlite:////data/demo.db TMPDIR=/dev/shm PYTHONUNBUFFERED=1",
        "the database is kept; it starts with --read-only; the log is complete",
    ),
    ("Dockerfile", "FROM python:3.13-slim", "its Python is supported, and has wheels"),
    ("Dockerfile", "WORKDIR /app", "flask finds the app in `docker exec`"),
    ("fly.toml", 'DATABASE_URL = "sqlite:////data/demo.db"', "the database is kept"),
    ("fly.toml", 'destination = "/data"', "the database is kept"),
    ("render.yaml", "- key: DATABASE_URL\n        value: sqlite:////data/demo.db", "it is kept"),
    ("render.yaml", "plan: starter", "the free plan has no disks"),
    ("render.yaml", "mountPath: /data", "the database is kept"),
    ("Dockerfile.dockerignore", "*\n!*.py", "the image has no secrets of a developer"),
    (
        "Dockerfile.dockerignore",
        "!docs\ndocs/*\n!docs/openapi.json\n!docs/asyncapi.json\n**/.*\n**/*.db*",
        "the image has the descriptions, and no database or hidden file of a developer",
    ),
    ("fly.toml", "internal_port = 8000", "it is the one that the image exposes"),
    ("fly.toml", 'dockerfile = "Dockerfile"', "the image is made of that file"),
    ("fly.toml", 'ignorefile = "Dockerfile.dockerignore"', "it has no database of a developer"),
    ("fly.toml", 'auto_stop_machines = "off"', "no pause closes WebSockets"),
    ("fly.toml", "min_machines_running = 1", "no pause closes WebSockets"),
    ("fly.toml", "force_https = true", "no key is sent in the clear"),
    ("fly.toml", 'memory = "512mb"', "5,000 sockets have room"),
    ("fly.toml", f'path = "{STATUS}"', "a service that answers is healthy"),
    ("render.yaml", f"healthCheckPath: {STATUS}", "a service that answers is healthy"),
    ("render.yaml", "buildCommand: pip install -r requirements.txt", "all packages are there"),
    ("render.yaml", "startCommand: gunicorn", "it is our server"),
    ("render.yaml", "- key: SECRET_KEY\n        generateValue: true", "it is made, and stays"),
    ("render.yaml", "- key: PYTHON_VERSION\n        value: 3.13.*", "a Python that is supported"),
    *(
        (
            name,
            "command: sh -c 'SECRET_KEY=$$(python -c "
            '"import secrets; print(secrets.token_hex())") exec gunicorn\'',
            "it starts",
        )
        for name in ("compose.yaml", "gate.compose.yaml")
    ),
    (
        "compose.yaml",
        "build: {context: ., dockerfile: deploy/Dockerfile, args: {POSTGRES: 1}}",
        "the image is made of that file, with the driver",
    ),
    ("compose.yaml", "DATABASE_URL: postgresql://postgres:postgres@db/postgres", "it is there"),
    ("compose.yaml", "environment: {POSTGRES_PASSWORD: postgres}", "it is that of the URL"),
    ("compose.yaml", "image: postgres:17", "18 stores elsewhere, and so would lose keys"),
    (
        "compose.yaml",
        "healthcheck: {test: pg_isready -U postgres -h 127.0.0.1, interval: 1s}",
        "while it sets itself up, PostgreSQL listens on a Unix socket only",
    ),
    ("compose.yaml", "depends_on: {db: {condition: service_healthy}}", "it is there at a start"),
    ("gate.compose.yaml", "build: {context: .., dockerfile: deploy/Dockerfile}", "it is there"),
    (
        "gate.compose.yaml",
        "command: python -m http.server 9000 --directory /usr/share",
        "the API is on its port, and Caddy reaches it",
    ),
    ("gate.compose.yaml", "GATE_HOST: localhost", "https://localhost is the API"),
    ("gate.compose.yaml", "GATE_KEYS_HOST: keys.localhost", "it has the pages"),
    ("gate.compose.yaml", "GATE_SERVICE: service:8000", "Caddy finds the service"),
    ("gate.compose.yaml", "GATE_API: api:9000", "Caddy finds the API"),
    ("gate.Caddyfile", "{$GATE_HOST:example.org} {", "Compose chooses the name"),
    ("gate.Caddyfile", "{$GATE_KEYS_HOST:keys.example.com} {", "Compose chooses the name"),
    ("gate.Caddyfile", "to {$GATE_SERVICE:127.0.0.1:8000}", "Compose chooses the service"),
    ("gate.Caddyfile", "to {$GATE_API:127.0.0.1:9000}", "Compose chooses the API"),
    ("gate.nginx.conf", "proxy_set_header Host gate;", "the service refuses it for no odd Host"),
    (
        "gate.nginx.conf",
        "proxy_ignore_headers X-Accel-Redirect X-Accel-Expires X-Accel-Limit-Rate "
        "X-Accel-Buffering X-Accel-Charset;",
        "no header of the API changes what the gate does",
    ),
    ("gate.nginx.conf", "client_max_body_size 0;", "uploads may have any size"),
    ("gate.Caddyfile", "max_size 1", "a pre-flight has no body"),
    ("gate.Caddyfile", "max_header_size 1MiB", "Caddy 2.11 would take 16 KiB only"),
    ("gate.Caddyfile", 'request>method regexp "[^A-Z].*" ""', "Caddy 2.11 logs long ones, too"),
    ("gate.nginx.conf", "proxy_buffers 4 68k;", "large downloads cost little"),
    ("gate.nginx.conf", "# limit_req_status 429;", "clients take it for no outage"),
    (
        "gate.nginx.conf",
        "# limit_req_zone $binary_remote_addr zone=gate:10m rate=100r/s;",
        "each address has a limit of its own",
    ),
    ("gate.nginx.conf", "# limit_req zone=gate burst=200 nodelay;", "no request waits for it"),
    ("compose.yaml", 'ports: ["127.0.0.1:8000:8000"]', "others reach no demo"),
    ("compose.yaml", 'volumes: ["data:/var/lib/postgresql/data"]', "keys stay"),
    ("gate.compose.yaml", 'ports: ["127.0.0.1:443:443"]', "others reach no demo"),
    (
        "gate.compose.yaml",
        'environment: {PROXY_HOPS: "1", API_URL: "https://localhost"}',
        "users get the API's code",
    ),
    ("gate.compose.yaml", 'volumes: ["keys:/data"]', "keys stay"),
    (
        "gate.compose.yaml",
        'volumes: ["./gate.Caddyfile:/etc/caddy/Caddyfile:ro", "certificates:/data"]',
        "Caddy reads that file, and certificates stay",
    ),
    ("Procfile", "web: gunicorn -k gevent app:app", "docs/deploying.md names this command"),
    ("demo-service.service", "RestartSec=1", "it is back soon"),
    ("demo-service.service", "After=network-online.target", "PostgreSQL can be reached"),
    ("demo-service.service", "ExecStart=/srv/demo-service/.venv/bin/gunicorn", "it is our server"),
    ("Dockerfile", 'CMD ["gunicorn"]', "it is our server"),
    ("Dockerfile", "COPY . .", "a hole in the service lets nobody change its code"),
    ("fly.toml", 'kill_signal = "SIGTERM"', "a stop loses no counts"),
    ("fly.toml", "kill_timeout = 10", "a stop takes 5 s, and longer on a busy machine"),
    (
        "demo-service.service",
        "TimeoutStopSec=25",
        "a stop takes 5 s, and at most 20 s if the machine is busy",
    ),
    ("fly.toml", f"soft_limit = {settings.load({}).max_sockets}", "all sockets have room"),
    ("fly.toml", "auto_start_machines = false", "no pause closes WebSockets"),
    ("fly.toml", 'type = "connections"', "WebSockets have room"),
    ("fly.toml", 'method = "GET"', "a service that answers is healthy"),
    (
        "fly.toml",
        'interval = "15s"\n    timeout = "5s"\n    grace_period = "10s"',
        "it is served soon",
    ),
    ("render.yaml", "- type: web", "others reach it"),
    ("render.yaml", "runtime: python", "buildCommand installs all packages"),
    ("gate.compose.yaml", "image: caddy:2", "gate.Caddyfile is for this version"),
    (
        "nginx.conf",
        "                        '$body_bytes_sent $upstream_status $upstream_addr';",
        "the log says what the service has answered",
    ),
    ("requirements.txt", "-c constraints.txt", "everybody has the same versions"),
    ("requirements.txt", "# .* file://.*", "Railway copies constraints.txt, too"),
]


# What each file sets, and how often. If something is new, decide: do all promises of the service
# hold with it? (A WatchdogSec of the unit would end the service, because gunicorn doesn't tell
# systemd that it is alive. A proxy that sends a POST again may let the API do something twice.)
DIRECTIVES = {
    "Caddyfile": """
        example.org fields format keepalive keepalive_idle_conns_per_host log request>headers
        request>uri reverse_proxy transport wrap {""",
    "Dockerfile": "ARG CMD COPY*2 ENV EXPOSE FROM HEALTHCHECK RUN*2 USER WORKDIR",
    "Dockerfile.dockerignore": """
        !*.py !LICENSE !accounts !constraints.txt !docs !docs/asyncapi.json !docs/openapi.json
        !requirements-postgres.txt !requirements.txt !server !service !storage !web !ws *
        **/*.db* **/.* **/__pycache__ docs/*""",
    "Procfile": "web",
    "compose.yaml": """
        DATABASE_URL app build command db depends_on environment*2 healthcheck image ports
        services volumes*2""",
    "demo-service.service": """
        After CapabilityBoundingSet Description Environment*2 EnvironmentFile ExecStart KillMode
        KillSignal LimitNOFILE LockPersonality MemoryDenyWriteExecute NoNewPrivileges
        PrivateDevices PrivateTmp PrivateUsers ProcSubset ProtectClock ProtectControlGroups
        ProtectHome ProtectHostname ProtectKernelLogs ProtectKernelModules ProtectKernelTunables
        ProtectProc ProtectSystem RemoveIPC Requires Restart RestartSec RestrictAddressFamilies
        RestrictNamespaces RestrictRealtime RestrictSUIDSGID StartLimitIntervalSec
        StateDirectory StateDirectoryMode SystemCallArchitectures SystemCallErrorNumber
        SystemCallFilter*2 TimeoutStopSec Type UMask User WantedBy Wants WorkingDirectory
        [Install] [Service] [Unit]""",
    "demo-service.socket": "Description ListenStream WantedBy [Install] [Socket] [Unit]",
    "fly.toml": """
        DATABASE_URL [[http_service.checks]] [[vm]] [build] [env] [http_service.concurrency]
        [http_service] [mounts] app auto_start_machines auto_stop_machines destination
        dockerfile force_https grace_period ignorefile internal_port interval kill_signal
        kill_timeout memory method min_machines_running path primary_region soft_limit source
        timeout type""",
    "gate.Caddyfile": """
        (api) (service) @accepted @body @connect*2 @none_asked @other_protocol @preflight
        @upgrade auto_https compression*2 default dial_timeout fields flush_interval format
        handle handle_response header*2 header_down*3 header_regexp*3 header_up*25 import*4
        keepalive*2 keepalive_idle_conns_per_host*2 log*3 map max_header_size max_size method*3
        protocols request>headers request>host request>method request>tls>server_name
        request>uri request_body request_header*8 resp_headers respond*3
        response_header_timeout reverse_proxy*4 rewrite route*2 servers strict_sni_host to*2
        transport*2 vars*5 wrap { {$GATE_HOST {$GATE_KEYS_HOST""",
    "gate.compose.yaml": """
        GATE_API GATE_HOST GATE_KEYS_HOST GATE_SERVICE api build caddy command*2 depends_on
        environment*2 image*2 ports service services volumes*3""",
    "gate.nginx.conf": """
        access_log*2 add_header*8 auth_request auth_request_set*11 client_max_body_size*3
        default*9 default_type error_log*2 error_page*3 gzip if*5 ignore_invalid_headers internal*3
        keepalive*2 keepalive_timeout*2 large_client_header_buffers listen*2 location*8
        log_format map*10 proxy_buffer_size proxy_buffering proxy_buffers proxy_connect_timeout*3
        proxy_hide_header*2 proxy_http_version*2 proxy_ignore_headers proxy_intercept_errors*2
        proxy_method proxy_next_upstream_timeout proxy_pass*4 proxy_pass_request_body*2
        proxy_pass_request_headers*2 proxy_read_timeout*2 proxy_request_buffering
        proxy_send_timeout proxy_set_header*27 recursive_error_pages return*7 rewrite*2 server*5
        server_name*2 ssl_certificate ssl_certificate_key underscores_in_headers upstream*3
        websocket""",
    "nginx.conf": """
        access_log*2 default*2 error_log keepalive keepalive_timeout listen*4 location
        log_format map*3 proxy_http_version proxy_pass proxy_read_timeout proxy_set_header*5
        return server*3 server_name*2 ssl_certificate ssl_certificate_key upstream""",
    "render.yaml": """
        buildCommand disk envVars generateValue healthCheckPath key*3 mountPath name*2 plan
        runtime services sizeGB startCommand type value*2""",
}


@pytest.mark.parametrize(("name", "line", "promise"), LINES)
def test_deployment_has_the_lines_that_keep_its_promises(
    name: str, line: str, promise: str
) -> None:
    form = re.escape(line).replace(r"\.\*", ".*")
    assert re.search(rf"(?m)^[ \t]*{form}(  #|$)", DEPLOY[name]), f"edit {name}: {line}: {promise}"


@pytest.mark.parametrize("name", DIRECTIVES)
def test_each_directive_was_decided_on(name: str) -> None:
    found = Counter(re.findall(r"""(?m)^\s*(?:- )?([^\s#:=};~'"]+)""", DEPLOY[name]))
    words = {each + f"*{count}" * (count > 1) for each, count in found.items()}
    assert words == {*DIRECTIVES[name].split()}, f"edit {name}, or DIRECTIVES if it is right"


def test_numbers_of_deployments_are_enough() -> None:
    """For the sockets, for the longest wait, and for connections that nobody closes too soon."""
    assert (
        websockets(int(deployed("demo-service.service", r"\nLimitNOFILE=(\d+)")))
        >= settings.load({}).max_sockets
    ), "edit LimitNOFILE in deploy/demo-service.service"
    # A pong that comes at last puts the next ping off.
    assert int(deployed("nginx.conf", r"proxy_read_timeout (\d+)s;")) > (
        PING_SECONDS + STALLED_SECONDS
    ), "edit deploy/nginx.conf: proxy_read_timeout"
    waits = {
        name: " ".join(re.findall(r"(?:keepalive\w*|host|ion|val|out)[ =](\d\w*)\b(?!\.)", text))
        for name, text in DEPLOY.items()
        if "Caddy" in name or "nginx" in name
    }
    assert waits == {
        "Caddyfile": "60s 32",
        "nginx.conf": "64 60s 60s",
        "gate.Caddyfile": "2s 50ms 2s 1s 9s 60s 32 20ms 1s 32",
        "gate.nginx.conf": "1s 1s 32 60s 32 1s 10s 1h 1h 1s 9s 2s 1s",
    }, (
        "edit deploy/: each proxy keeps connections, for less than the 100 s of gunicorn.conf.py, "
        "and than the 2 s of other APIs; an answer may take 8 s, all questions about a request 11 s"
    )
    assert {"off", "emerg", "demo_service", "gate"} == {
        *re.findall(r"_log (?:.* )?(\S+);", "".join(DEPLOY.values()))
    }, "edit deploy/*.conf: access_log with a log_format of the file, error_log with emerg"


def test_constants_add_up_to_what_is_promised() -> None:
    """Seconds. Tests replace some of them, and are patient on a busy machine."""
    # Within a second each, gunicorn sees a stop and ends connections, and a running save ends.
    others = 3 + sqlite.LAST_SECONDS
    assert 1 <= lifecycle.GRACEFUL_SECONDS <= 5 - others, "requests have a second, a stop has five"
    assert lifecycle.GRACEFUL_SECONDS + others + 1 <= sum(sqlite.PAUSES), (
        "a start waits for the previous service"
    )
    assert 0.5 <= connections.CLOSE_SECONDS < 1 - lifecycle.PING_ROUND_SECONDS, (
        "a client has time to read and to close its side; at a stop, sockets close within a second"
    )
    assert lifecycle.SAVE_SECONDS + postgres.SAVE_CONNECTION_SECONDS <= 1, "counts are saved"
    assert key_store.CACHE_SECONDS + lifecycle.SAVE_SECONDS < 2, "a change of a key is noticed"
    connected = (
        postgres.CONNECT_SECONDS
        + postgres.CONNECTION_SECONDS
        + postgres.ANSWER_SECONDS
        + postgres.connection_pool("postgresql://", 1).reconnect_timeout
    )
    assert connected < 5, "hits are back after an outage: psycopg would back off for minutes"
    assert postgres.options("postgresql://?connect_timeout=15")["connect_timeout"] == "15", (
        "DATABASE_URL may allow a database that is far away more time"
    )
    assert postgres.KEY_CONNECTIONS * postgres.SHRINK_SECONDS < 60, "connections of the idle end"
    assert int(re.findall(r"graceful_timeout = (\d+)", GUNICORN)[0]) >= 20, (
        "a stop takes 5 s, and longer on a busy machine"
    )
    assert 5 <= application.BODY_SECONDS <= worker.SEND_SECONDS, (
        "a form may take as long as it is told"
    )
    assert 4 * (postgres.CONNECTION_SECONDS + postgres.ANSWER_SECONDS) < 8, (
        "a request asks four times at most: look-up, hit, what is left, owner"
    )
    assert postgres.MAX_WAITING * 18 < 10_000, "KiB that requests of an outage keep"


@mock.patch("cli.Command.invoke", mock.Mock())  # they are only parsed
def test_commands_are_those_of_flask(app: Flask) -> None:
    """README.md names those of a group after it: `flask user` with `create` or `list`."""
    assert PG_DUMP in (REPOSITORY / "docs/operating.md").read_text()
    lines = re.findall(r"(?m)^- `\.venv/bin/flask (\w+)(.*)", section("Settings and commands"))
    named = set()
    for name, rest in lines:
        named |= {f"{name} {each}" for each in re.findall("`([a-z]+)`", rest)} or {name}
    assert named == {*names(app.cli.commands)}, "edit README.md: the commands"
    command = (
        r"\b(?:flask|demo) ((?:user|key) [a-z]+|usage|backup)\b"
        r"""((?: +(?:"[^"\n]*"|[\w@./=:-]+))*)"""
    )
    for name, words in re.findall(
        command,
        README + "".join(path.read_text() for path in DOCUMENTS if path.parent.name == "docs"),
    ):
        parsed = app.test_cli_runner().invoke(
            args=[*name.split(), *(shlex.split(words) or ["--help"])]
        )
        assert not parsed.exit_code, f"edit the document with {name}{words}: {parsed.output}"


def test_every_requirement_is_pinned() -> None:
    required = {
        name
        for file in (*REPOSITORY.glob("requirements*.txt"), REPOSITORY / ".ci/requirements.txt")
        for name in re.findall(r"(?m)^\w[\w-]*", file.read_text())
    }
    pinned = {*re.findall("(?m)^(.+?)==", (REPOSITORY / "constraints.txt").read_text())}
    assert {"flask", "psycopg", "ruff"} <= required <= pinned


OTHERS = (  # what other programs say
    *("Address already in use", "Connection in use", "No matching distribution found"),
    *("No module named", "Could not locate a Flask application", "PYTHONSAFEPATH"),
    *("No application module specified", "unable to open database file", "database is locked"),
)


@pytest.mark.parametrize(
    ("page", "quoted"),
    [
        *(
            (page, r"`([^`\s]+)`")
            for page in ("CONTRIBUTING.md", "README.md", "SECURITY.md", "docs/design.md")
        ),
        *(  # only headers and settings
            (f"docs/{page}.md", r"`([A-Z]\w*-[A-Z][\w-]+|[A-Z_]+_[A-Z_]+(?==))")
            for page in ("growing", "operating", "protecting-your-api", "testing-clients")
        ),
    ],
)
def test_names_in_documents_are_those_of_the_code(page: str, quoted: str) -> None:
    """Of functions, tests, files, headers; what is `of` or `in` a file; and texts of pages."""
    text = (REPOSITORY / page).read_text()
    known = {*dir(builtins), *re.findall(r"\w+", CODE), *re.findall(r"[\w-]+", CODE)}
    named = {*re.findall(r"[A-Za-z_][\w-]*\w", " ".join(re.findall(quoted, text)))}
    named |= {*re.findall(r"[^*]\*(\w[^*]+)\*[^*]", text)}
    lost = {each for each in named - known if " " not in each or each not in CODE}
    assert not lost, f"edit {page}: {lost}"
    for name, file in re.findall(r"`(\w+)` (?:of|in) `([\w/]+\.\w+)`", text):
        assert name in (REPOSITORY / file).read_text(), f"edit {page}: {name} is not in {file}"


def test_troubleshooting_quotes_what_the_service_says() -> None:
    table = rows("Troubleshooting", (REPOSITORY / "docs/operating.md").read_text())
    said = {*re.findall(r"`(?:\.\.\. )?([^`]+)`", " ".join(row[0] for row in table))}
    lost = {each for each in said if each not in CODE and not each.startswith(OTHERS)}
    assert not lost, f"edit docs/operating.md: {lost}"


def test_design_has_a_row_for_each_module() -> None:
    design = (REPOSITORY / "docs" / "design.md").read_text()
    listed = {
        *re.findall(r"\[(\w+\.py)\]", section("The core", design)),
        *(row[0].strip("`") for row in rows("The other modules", design)),
    }
    found = {str(path.relative_to(REPOSITORY)) for path in sources() if path.stem != "__init__"}
    assert listed == found, "edit docs/design.md: the other modules"


def anchors(file: Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    return {
        re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        for heading in re.findall("(?m)^#+ (.*)$", file.read_text().lower())
    }
