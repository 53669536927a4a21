"""What client libraries see of the service: each runs its script in `clients`."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from serving import REPOSITORY, Server, eventually

HERE = Path(__file__).parent / "clients"
PAGE = REPOSITORY / "docs/testing-clients.md"
BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
HTTP_CLIENTS = ["urllib3", "requests", "httpx", "aiohttp", "chromium"]
HTTP_CLIENTS += ["fetch", "axios-retry", "got"]
SOCKET_CLIENTS = ["websockets", "websocket-client", "aiohttp", "ws", "wscat", "chromium"]
MODULES = {"websocket-client": "websocket", "chromium": "playwright"}  # where the name is another
SECONDS = 90  # for all clients at once, on a busy machine

Report = dict[str, Any]
Reports = Callable[[str], Report]


class Run(NamedTuple):
    """One client at work; what it reports goes to a file."""

    process: "subprocess.Popen[bytes]"
    output: Path
    errors: Path

    def report(self) -> Report:
        """Its steps so far."""
        report: Report = {}
        for line in self.output.read_text().split("\n")[:-1]:
            report |= json.loads(line)
        return report

    def is_done(self) -> bool:
        """Whether it needs the server no longer, but to see it stop."""
        return self.process.poll() is not None or "ticks" in self.report()


def missing(client: str) -> str:
    """Why this client cannot run here; empty if it can."""
    script = script_of(client)
    if script.suffix == ".mjs" or client == "wscat":
        if not shutil.which("node"):
            return "node is not installed"
        if client != "fetch" and not (HERE / "node_modules" / client).is_dir():
            return f"the npm package {client} is not installed in tests/clients"
        return ""
    if not importlib.util.find_spec(MODULES.get(client, client)):
        return f"the Python package {MODULES.get(client, client)} is not installed"
    if client == "chromium" and not any(map(shutil.which, BROWSERS)):
        return "no browser found"
    return ""


def script_of(client: str) -> Path:
    name = f"with_{client.replace('-', '_')}"
    return next(path for path in (HERE / f"{name}.py", HERE / f"{name}.mjs") if path.exists())


def run(client: str, directory: Path, **variables: str) -> Run:
    script = script_of(client)
    interpreter = sys.executable if script.suffix == ".py" else "node"
    output, errors = directory / f"{client}.out", directory / f"{client}.err"
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            [interpreter, str(script)],
            cwd=HERE,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    return Run(process, output, errors)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    """All clients at once against one server, which stops when each has its three seconds."""
    directory = tmp_path_factory.mktemp("clients")
    names = dict.fromkeys([*HTTP_CLIENTS, *SOCKET_CLIENTS, "ratelimit-header-parser"])
    server = Server(directory, RATE_LIMITS="free=1000/hour,one=1/second")
    runs: dict[str, Run] = {}
    try:
        server.start()
        shared = {"URL": server.url, "KEY": server.new_key("clients")}
        for name in names:
            if not missing(name):
                limited = server.new_key(tier="one") if name in HTTP_CLIENTS else ""
                runs[name] = run(name, directory, **shared, LIMITED_KEY=limited)
        for name, running in runs.items():
            eventually(running.is_done, SECONDS, f"{name} has not got its ticks")
        server.stop()
        for running in runs.values():
            running.process.wait(SECONDS)

        def report(client: str) -> Report:
            if reason := missing(client):
                pytest.skip(reason)
            assert runs[client].process.returncode == 0, runs[client].errors.read_text()
            return runs[client].report()

        yield report
    finally:
        for running in runs.values():
            if running.process.poll() is None:
                os.killpg(running.process.pid, signal.SIGKILL)
                running.process.wait()
        server.close()


@pytest.mark.parametrize("client", HTTP_CLIENTS)
def test_a_client_gets_the_documented_answers(reports: Reports, client: str) -> None:
    paths = json.loads((REPOSITORY / "openapi.json").read_text())["paths"]
    documented = {
        path: item["get"]["responses"]["200"]["content"]["application/json"]["example"].keys()
        for path, item in paths.items()
    }

    answers = reports(client)["answers"]

    assert {path: body.keys() for path, body in answers.items()} == documented
    assert answers["/api/v1/protected/test"]["api_key_name"] == "clients"


@pytest.mark.parametrize("client", HTTP_CLIENTS)
def test_a_client_over_the_limit_waits_until_it_is_served(reports: Reports, client: str) -> None:
    moments = reports(client)["limited"]

    assert None not in moments, "a refused request"
    assert len({moment[: len("2026-11-21T03:49:09")] for moment in moments}) == 3


@pytest.mark.parametrize(
    ("client", "seen"),
    [
        ("websockets", {"status": 401, "code": "missing_api_key"}),
        ("websocket-client", {"status": 401, "code": "missing_api_key"}),
        ("aiohttp", {"status": 401}),
        ("ws", {"status": 401, "code": "missing_api_key"}),
        ("wscat", {"status": 401}),
        ("chromium", {"events": ["error"], "code": 1006}),
    ],
)
def test_a_refused_socket_is_seen_as_one(reports: Reports, client: str, seen: Report) -> None:
    assert reports(client)["refused"] == seen


@pytest.mark.parametrize("client", SOCKET_CLIENTS)
def test_a_socket_gets_its_ticks(reports: Reports, client: str) -> None:
    assert reports(client)["ticks"] == ["auth_success", *["time_update"] * 3]


@pytest.mark.parametrize("client", SOCKET_CLIENTS)
def test_a_socket_sees_1001_when_the_server_stops(reports: Reports, client: str) -> None:
    assert reports(client)["closed"] == 1001


@pytest.mark.parametrize("client", ["websockets", "ws"])
def test_a_socket_offered_subprotocols_accepts_the_first(reports: Reports, client: str) -> None:
    assert reports(client)["subprotocol"] == "demo"


def test_the_table_of_clients_has_all_that_are_run() -> None:
    rows = re.findall(r"^\| ([a-z0-9-]+) \|", PAGE.read_text(), re.MULTILINE)
    scripts = [path.stem.removeprefix("with_").replace("_", "-") for path in HERE.glob("with_*")]

    assert sorted(rows) == sorted(["client", *scripts])


def shown(heading: str) -> tuple[str, str]:
    """The first command under a heading of the page, and what the page says it prints."""
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    found = re.search(r"```sh\n(.*?)```\n+```text\n(.*?)```", section, re.DOTALL)
    assert found
    return found[1], found[2]


@pytest.fixture(scope="module")
def five_a_day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The limit of the page, but no turn of the window meanwhile."""
    server = Server(tmp_path_factory.mktemp("page"), RATE_LIMITS="free=5/day")
    try:
        yield server.start()
    finally:
        server.close()


@pytest.mark.parametrize(
    "heading",
    ["A 429 in ten seconds", "401", "426", "1009: a message too large", "1003: a binary message"],
)
def test_a_command_of_the_page_prints_what_it_says(five_a_day: Server, heading: str) -> None:
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    command, expected = shown(heading)
    command = command.replace("127.0.0.1:8000", f"127.0.0.1:{five_a_day.port}")
    command = command.replace(".venv/bin/python", sys.executable)
    key = five_a_day.new_key()

    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "KEY": key}, capture_output=True, text=True
    )

    assert done.stdout == expected


def test_ratelimit_header_parser_reads_only_the_older_headers(reports: Reports) -> None:
    report = reports("ratelimit-header-parser")

    assert report["older headers"] == 1000
    assert report["all headers"] is None, "it reads RateLimit now: change the table of clients"
