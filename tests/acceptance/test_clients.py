"""The service as clients meet it: fuzzing, a generated client, and docs/testing-clients.md."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from conftest import StartServer
from helpers.documents import blocks, section
from helpers.paths import TEST
from helpers.server import PATH, REPOSITORY, Server, bash, find_program
from test_deploy import FLASK

PAGE = (REPOSITORY / "docs/testing-clients.md").read_text()


def run(*command: str, cwd: Path) -> str:
    """What a program prints; it must succeed."""
    find_program(command[0])
    return bash(f"{shlex.join(command)} 2>&1", cwd, {**os.environ, "PATH": PATH}, 170)


def timeless(text: str) -> list[str]:
    """The words, without the seconds of a window."""
    return re.sub(r"(?<=[tw]=)\d+|(?<=After: )\d+", "", text).split()


@pytest.mark.parametrize("caller", ["with a key", "without a key", "over the limit"])
def test_schemathesis_finds_nothing(server: Server, tmp_path: Path, caller: str) -> None:
    key = server.new_key(tier="once" if caller == "over the limit" else "pro")
    assert server.ask(TEST, X_API_Key=key).status == 200
    headers = [] if caller == "without a key" else [f"--header=X-API-Key: {key}"]
    options = [
        *("--checks=all", "--max-examples=20", "--no-color", f"--url={server.url}"),
        # Not the stateful phase: no response links to another, and sometimes it never ends.
        "--phases=examples,coverage,fuzzing",
    ]
    run("schemathesis", "run", f"{REPOSITORY}/docs/openapi.json", *options, *headers, cwd=tmp_path)


def test_a_generated_python_client_works(server: Server, server_key: str, tmp_path: Path) -> None:
    page = section("Generated clients", PAGE)
    (shell,), (python,) = blocks("sh", page), blocks("python", page)
    program, *arguments = shell.replace("http://127.0.0.1:8000", server.url).split()
    call = "from demo_client.api.protected import get_usage\nprint(get_usage.sync(client=client))"
    given = f"url, key = {server.url!r}, {server_key!r}\n"
    assert "WARNING" not in run(program, *arguments, cwd=tmp_path).upper()
    assert "requests_remaining=" in run(
        sys.executable, "-c", f"{given}{python}{call}", cwd=tmp_path
    )


@pytest.mark.parametrize(
    ("start", "commands"), [("**429.**", 2), ("**401.**", 1), ("A message of more than", 1)]
)
def test_commands_of_the_page_print_what_it_says(
    start_server: StartServer, tmp_path: Path, start: str, commands: int
) -> None:
    """But for seconds: here, no window ends meanwhile."""
    _, *parts = re.split(r"```(?:sh|text)?\n", PAGE.split(f"\n{start}")[1])
    server = start_server(RATE_LIMITS="free=5/day,tiny=5/day")
    script = "".join(parts[: 4 * commands : 4]).replace(".venv/bin/python", sys.executable)
    script = script.replace(":8000", f":{server.port}")
    assert timeless(
        bash(script, tmp_path, server.env | {"KEY": server.new_key(tier="tiny")})
    ) == timeless("".join(parts[2 : 4 * commands : 4])), "edit docs/testing-clients.md"


def test_commands_of_the_table_of_closes_work(tmp_path: Path) -> None:
    """Of the user of the demo, who has the key that the page makes before."""
    create = ".venv/bin/flask user create demo demo@example.com --password-stdin <<< 'long enough'"
    table = re.findall(r"`([^`]*flask [^`]*)`", section("WebSockets", PAGE).replace(r"\|", "|"))
    script = "\n".join([create, blocks("sh", PAGE)[1], *table]).replace(".venv/bin/flask", FLASK)
    bash(script, tmp_path, Server(tmp_path, RATE_LIMITS="free=5/day,tiny=5/day").env)
