"""openapi.json against the running service, and against what is made of it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rawsocket import UPGRADE, RawSocket, request_bytes
from serving import REPOSITORY, Server, eventually

CLIENTS = Path(__file__).parent / "clients"
OPENAPI = REPOSITORY / "openapi.json"
DOCUMENT = json.loads(OPENAPI.read_text())
PROTECTED = "/api/v1/protected/test"
NOT_PROVOKED = {"internal_error"}  # that takes a bug

Body = dict[str, Any]


def documented() -> dict[str, tuple[Body, Body]]:
    """Each example with its schema, by its path or code."""
    found = {}
    for path, item in DOCUMENT["paths"].items():
        content = item["get"]["responses"]["200"]["content"]["application/json"]
        found[path] = (content["example"], content["schema"])
    for response in DOCUMENT["components"]["responses"].values():
        content = response["content"]["application/problem+json"]
        for code, example in content["examples"].items():
            found[code] = (example["value"], content["schema"])
    return found


EXAMPLES = documented()


def command(name: str) -> str:
    """A command of this Python's environment; skips where it is missing."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"the Python package {name} is not installed")
    return str(path)


def npm(package: str) -> str:
    """The command of an npm package; skips where it is missing."""
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    path = CLIENTS / "node_modules/.bin" / package
    if not path.exists():
        pytest.skip(f"the command {package} is not installed in tests/clients")
    return str(path)


def output(*arguments: str, cwd: Path, **variables: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        arguments, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("openapi"), RATE_LIMITS="free=1000/hour,one=1/day")
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture(scope="module")
def key(described: Server) -> str:
    return described.new_key("demo")


@pytest.fixture(scope="module")
def spent_key(described: Server) -> str:
    """A key with nothing left for today."""
    key = described.new_key(tier="one")
    with RawSocket(described.port) as connection:
        assert connection.request(PROTECTED, X_API_Key=key).status == 200
    return key


@pytest.fixture(scope="module")
def live(described: Server, key: str, spent_key: str) -> dict[str, Body]:
    """A live answer for each example."""

    def ask(path: str, **headers: str) -> Body:
        with RawSocket(described.port) as connection:
            body: Body = connection.request(path, **headers).json()
            return body

    def say(headers: dict[str, str]) -> Body:
        with RawSocket(described.port) as connection:
            connection.send(request_bytes("/api/v1/status", headers))
            body: Body = connection.answer().json()
            return body

    answers = {path: ask(path, X_API_Key=key) for path in DOCUMENT["paths"]}
    answers["/api/v1/status"] = ask("/api/v1/status")
    answers["missing_api_key"] = ask(PROTECTED)
    answers["invalid_api_key"] = ask(PROTECTED, X_API_Key="nonsense")
    answers["rate_limited"] = ask(PROTECTED, X_API_Key=spent_key)
    answers["bad_request"] = say({})
    answers["no_websocket"] = say(UPGRADE)
    answers["content_too_large"] = say({"Host": "localhost", "Content-Length": "1000000"})
    return answers


def form(body: Body) -> Body:
    """The part of a body that is the same in each answer: no number, moment or name of a user."""

    def fixed(name: str, value: Any) -> Any:
        if name == "status" or isinstance(value, bool):
            return value
        if isinstance(value, str) and name not in ("username", "email"):
            return re.sub(r"\d+", "0", value)
        return type(value)

    return {name: fixed(name, value) for name, value in body.items()}


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - NOT_PROVOKED - {"unavailable"}))
def test_an_example_has_the_form_of_the_live_answer(live: dict[str, Body], name: str) -> None:
    example, _ = EXAMPLES[name]

    assert list(example) == list(live[name])
    assert form(example) == form(live[name])


def test_the_example_without_a_database_is_the_live_answer(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        key = server.start().new_key()
        for file in (server.database, server.database.with_name("service.db-wal")):
            file.write_bytes(b"garbage" * 10_000)

        def answer() -> Body:
            with RawSocket(server.port) as connection:
                body: Body = connection.request("/api/v1/user/me", X_API_Key=key).json()
                return body

        eventually(lambda: answer().get("code") == "unavailable")
        assert answer() == EXAMPLES["unavailable"][0]
    finally:
        server.close()


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_matches_its_schema(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    example, schema = EXAMPLES[name]
    whole = {**schema, "components": DOCUMENT["components"]}

    jsonschema.Draft202012Validator(whole, format_checker=jsonschema.FormatChecker()).validate(
        example
    )


def test_every_fixed_value_has_a_type() -> None:
    """Without a type beside it, generators drop a `const` or make it `any`."""

    def untyped(node: Any, path: str) -> Iterator[str]:
        if isinstance(node, dict):
            if {"const", "enum"} & node.keys() and "type" not in node:
                yield path
            for name, inner in node.items():
                yield from untyped(inner, f"{path}/{name}")

    assert list(untyped(DOCUMENT["components"], "#")) == []


def test_no_boolean_has_a_fixed_value() -> None:
    """openapi-generator's Python models compare it with the text "true", and refuse the answer."""
    schemas = DOCUMENT["components"]["schemas"].values()
    booleans = [
        schema
        for outer in schemas
        for schema in outer.get("properties", {}).values()
        if schema.get("type") == "boolean"
    ]

    assert booleans
    assert not any({"const", "enum"} & schema.keys() for schema in booleans)


@pytest.mark.parametrize("caller", ["with a key", "without a key", "over the limit"])
def test_schemathesis_finds_nothing(
    described: Server, key: str, spent_key: str, tmp_path: Path, caller: str
) -> None:
    keys = {"with a key": [key], "over the limit": [spent_key]}.get(caller, [])
    headers = [f"--header=X-API-Key: {key}" for key in keys]
    options = ["--checks=all", "--max-examples=20", "--no-color", f"--url={described.url}"]

    output(command("schemathesis"), "run", str(OPENAPI), *options, *headers, cwd=tmp_path)


def test_spectral_finds_nothing(tmp_path: Path) -> None:
    ruleset = f"--ruleset={CLIENTS / 'spectral.yaml'}"

    output(npm("spectral"), "lint", ruleset, "--fail-severity=hint", str(OPENAPI), cwd=tmp_path)


def test_a_generated_python_client_calls_the_service(
    described: Server, key: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"post_hooks": []}')
    options = ["--meta=none", "--output-path=generated", f"--config={config}", f"--path={OPENAPI}"]

    printed = output(command("openapi-python-client"), "generate", *options, cwd=tmp_path)
    shutil.copy(CLIENTS / "call_generated.py", tmp_path)
    called = output(sys.executable, "call_generated.py", cwd=tmp_path, URL=described.url, KEY=key)

    assert "WARNING" not in printed.upper()
    assert json.loads(called)["code"] == "missing_api_key"
    assert json.loads(called)["remaining"] < 1000


def test_generated_typescript_is_strict_and_calls_the_service(
    described: Server, key: str, tmp_path: Path
) -> None:
    generate, compile = npm("openapi-typescript"), npm("tsc")
    (tmp_path / "node_modules").symlink_to(CLIENTS / "node_modules")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    shutil.copy(CLIENTS / "call_generated.ts", tmp_path)
    options = ["--strict", "--skipLibCheck", "--types", "node", "--target", "es2022"]

    output(generate, str(OPENAPI), "-o", "api.ts", cwd=tmp_path)
    output(compile, *options, "--module", "nodenext", "call_generated.ts", cwd=tmp_path)
    called = output("node", "call_generated.js", cwd=tmp_path, URL=described.url, KEY=key)

    assert json.loads(called)["code"] == "missing_api_key"
    assert json.loads(called)["remaining"] < 1000
