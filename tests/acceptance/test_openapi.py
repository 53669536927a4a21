"""openapi.json and asyncapi.json against the service, by fuzzing, a validator and clients."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paths import TEST
from rawsocket import TEXT, RawSocket, frame
from serving import REPOSITORY, Server

CLIENTS = Path(__file__).parent / "clients"
OPENAPI, ASYNCAPI = REPOSITORY / "docs" / "openapi.json", REPOSITORY / "docs" / "asyncapi.json"


def run(*command: str, cwd: Path, **variables: str) -> str:
    """What a program prints; it must succeed, and is skipped where it is not installed."""
    name, *arguments = command
    places = [Path(sys.executable).parent, CLIENTS / "node_modules/.bin"]
    path = next((str(place / name) for place in places if (place / name).exists()), name)
    if not shutil.which(path):
        pytest.skip(f"{name} is not installed: .ci/clients")
    done = subprocess.run(
        [path, *arguments], cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("caller", ["with a key", "without a key", "over the limit"])
def test_schemathesis_finds_nothing(server: Server, tmp_path: Path, caller: str) -> None:
    key = server.new_key(tier="once" if caller == "over the limit" else "pro")
    assert server.ask(TEST, X_API_Key=key).status == 200
    headers = [] if caller == "without a key" else [f"--header=X-API-Key: {key}"]
    options = ["--checks=all", "--max-examples=20", "--no-color", f"--url={server.url}"]
    # Not the stateful phase: no response links to another, and sometimes it never ends.
    options.append("--phases=examples,coverage,fuzzing")
    run("schemathesis", "run", str(OPENAPI), *options, *headers, cwd=tmp_path)


def test_spectral_finds_nothing() -> None:
    options = ["--ruleset=spectral.yaml", "--fail-severity=hint"]
    run("spectral", "lint", *options, str(OPENAPI), str(ASYNCAPI), cwd=CLIENTS)


def test_a_generated_python_client_works(server: Server, server_key: str, tmp_path: Path) -> None:
    section = (REPOSITORY / "docs/testing-clients.md").read_text().split("## Generated clients")[1]
    _, shell, _, python, *_ = re.split(r"```(?:sh|python)?\n", section)
    program, *arguments = shell.replace("http://127.0.0.1:8000", server.url).split()
    call = "from demo_client.api.protected import get_usage\nprint(get_usage.sync(client=client))"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for its formatter
    given = f"url, key = {server.url!r}, {server_key!r}\n"
    printed = run(program, *arguments, cwd=tmp_path, PATH=path)
    called = run(sys.executable, "-c", f"{given}{python}{call}", cwd=tmp_path)
    assert "WARNING" not in printed.upper()
    assert "requests_remaining=" in called


def test_messages_of_sockets_are_as_described(server: Server, server_key: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    document = json.loads(ASYNCAPI.read_text())
    echo, clock = (document["channels"][name]["address"] for name in ("echo", "time"))
    messages = document["components"]["messages"]

    def check(payload: Any, message: str) -> None:
        jsonschema.Draft7Validator(messages[message]["payload"]).validate(payload)

    for name, message in messages.items():
        for example in message["examples"]:
            check(example["payload"], name)
    with RawSocket(server.port) as one, RawSocket(server.port) as other:
        one.open(echo).send(frame(TEXT, b"hello"))
        check(one.frame().json(), "echo")
        other.open(f"{clock}?api_key={server_key}")
        check(other.frame().json(), "auth_success")
        check(other.frame().json(), "time_update")
