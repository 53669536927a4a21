"""Client libraries against the service, each by its script in `clients`, and the page on them."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from serving import REPOSITORY, Server, bash, clean_environment, eventually, free_port, working_tree

HERE = Path(__file__).parent / "clients"
PAGE = (REPOSITORY / "docs/testing-clients.md").read_text()
BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), "")
HTTP_CLIENTS = ["requests", "chromium", "fetch", "axios-retry", "got"]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
SECONDS = 90  # for one client, on a busy machine
REFUSALS = {  # what each client of WebSockets sees of a refused one
    "websockets": {"status": 401, "code": "missing_api_key"},
    "ws": {"status": 401, "code": "missing_api_key"},
    "wscat": {"status": 401},
    "chromium": {"events": ["error"], "code": 1006},
}


def missing(client: str) -> str:
    """Why this client cannot run here; empty if it can."""
    if script_of(client).suffix == ".mjs" or client == "wscat":
        installed = client == "fetch" or (HERE / "node_modules" / client).is_dir()
        return "" if installed and shutil.which("node") else f"{client} is not installed"
    if client == "chromium":
        return "" if CHROMIUM else "no browser found"
    return "" if importlib.util.find_spec(client) else f"{client} is not installed"


def script_of(client: str) -> Path:
    return next(HERE.glob(f"with_{client.replace('-', '_')}.*"))


def run(client: str, folder: Path) -> dict[str, Any]:
    """What a client reports; once it has its three seconds, the server stops."""
    if reason := missing(client):
        pytest.skip(reason)
    script, output = script_of(client), folder / "output"
    command = [sys.executable if script.suffix == ".py" else "node", str(script)]
    server = Server(folder, RATE_LIMITS="free=1000/hour,one=1/second")
    keys = {"KEY": server.new_key(), "LIMITED_KEY": server.new_key(tier="one")}
    env = os.environ | keys | {"URL": server.url, "CHROMIUM": CHROMIUM}
    with closing(server.start()), output.open("wb") as out:
        process = subprocess.Popen(command, cwd=HERE, env=env, stdout=out, start_new_session=True)
        try:
            eventually(lambda: process.poll() is not None or "ticks" in output.read_text(), SECONDS)
            server.stop()
            assert process.wait(SECONDS) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    steps: dict[str, Any] = {}
    for line in output.read_text().splitlines():
        steps |= json.loads(line)
    return steps


@pytest.mark.parametrize("client", HTTP_CLIENTS)
def test_a_client_gets_every_response(tmp_path: Path, client: str) -> None:
    report = run(client, tmp_path)
    paths = json.loads((REPOSITORY / "docs" / "openapi.json").read_text())["paths"]
    documented = {
        path: item["get"]["responses"]["200"]["content"]["application/json"]["example"].keys()
        for path, item in paths.items()
    }
    answers = {path: body.keys() for path, body in report["answers"].items()}
    assert answers == {path: documented[path] for path in answers}
    assert len(answers) == 5
    moments = report["limited"]
    assert None not in moments, "a rejected request"
    assert len({moment[: len("2026-11-21T03:49:09")] for moment in moments}) == 3


@pytest.mark.parametrize("client", REFUSALS)
def test_a_client_sees_refusal_ticks_and_stop_of_a_socket(tmp_path: Path, client: str) -> None:
    report = run(client, tmp_path)
    assert report["refused"] == REFUSALS[client]
    assert report["ticks"] == ["auth_success", *["time_update"] * 3]
    assert report["closed"] == 1001


def test_the_table_of_clients_has_all_that_are_run() -> None:
    rows = re.findall(r"^\| ([a-z0-9-]+) \|", PAGE.split("## Clients")[1], re.MULTILINE)
    assert sorted(rows) == sorted({"client", *HTTP_CLIENTS, *REFUSALS})


@pytest.mark.parametrize("start", ["**429.**", "**401.**", "A message of more than"])
def test_a_command_of_the_page_prints_what_it_says(tmp_path: Path, start: str) -> None:
    section = PAGE.split(f"\n{start}")[1]
    _, command, _, expected, *_ = re.split(r"```(?:sh|text)?\n", section)
    server = Server(tmp_path, RATE_LIMITS="free=5/day")  # no window ends meanwhile
    command = command.replace(":8000", f":{server.port}")
    command = command.replace(".venv/bin/python", sys.executable)
    with closing(server):
        printed = bash(command, tmp_path, server.env | {"KEY": server.start().new_key()})
    assert printed.strip() == expected.strip()


CLIENT_TEST = """
import os, urllib.request
def test_key():
    headers = {"X-API-Key": os.environ["KEY"]}
    url = os.environ["URL"] + "/api/v1/protected/test"
    assert urllib.request.urlopen(urllib.request.Request(url, headers=headers)).status == 200
"""


def test_the_job_for_github_actions_runs_client_tests(tmp_path: Path) -> None:
    """Its two commands; this environment stands in for a new one."""
    yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")
    job = yaml.safe_load(PAGE.split("```yaml\n")[1].split("```")[0])["jobs"]["test"]
    port, folder = str(free_port()), tmp_path / "service"
    start, test = (step["run"] for step in job["steps"] if "run" in step)
    start = start.replace("DEMO_SERVICE", f"file://{working_tree(tmp_path)}")
    start = start.replace("/tmp/demo-service", str(folder))
    start = re.sub("python3 -m venv .venv && .*", f"ln -s {sys.prefix} .venv", start)
    url = job["env"]["URL"].replace("8000", port)
    env = clean_environment(PORT=port, URL=url, GITHUB_ENV=f"{tmp_path}/env", PATH=PATH)
    (tmp_path / "test_client.py").write_text(CLIENT_TEST)
    try:
        bash(start, tmp_path, env)
        key = (tmp_path / "env").read_text().strip().removeprefix("KEY=")
        assert "1 passed" in bash(f"{test} test_client.py", tmp_path, env | {"KEY": key})
    finally:
        master = re.search(r"\[(\d+)\] \[INFO\] Listening", (folder / "service.log").read_text())
        os.kill(int(master[1]), signal.SIGTERM) if master else None
