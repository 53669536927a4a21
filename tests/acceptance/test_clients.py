"""Client libraries against the service, each by its script in `clients`, and the page on them."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paths import TEST
from serving import REPOSITORY, Server, clean_environment, eventually, free_port, working_tree

HERE = Path(__file__).parent / "clients"
PAGE = (REPOSITORY / "docs/testing-clients.md").read_text()
BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), "")
HTTP_CLIENTS = ["requests", "chromium", "fetch", "axios-retry", "got"]
SOCKET_CLIENTS = ["websockets", "ws", "wscat", "chromium"]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
SECONDS = 90  # for all clients at once, on a busy machine
REFUSALS = {  # what each client sees of a refused socket
    "websockets": {"status": 401, "code": "missing_api_key"},
    "ws": {"status": 401, "code": "missing_api_key"},
    "wscat": {"status": 401},
    "chromium": {"events": ["error"], "code": 1006},
}

Reports = Callable[[str], dict[str, Any]]


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


def run(client: str, output: Path, **variables: str) -> "subprocess.Popen[bytes]":
    script = script_of(client)
    command = [sys.executable if script.suffix == ".py" else "node", str(script)]
    how: dict[str, Any] = {"cwd": HERE, "env": os.environ | variables, "start_new_session": True}
    with output.open("wb") as out, output.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(command, stdout=out, stderr=errors, **how)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    """All clients at once against one server, which stops when each has its three seconds."""
    folder = tmp_path_factory.mktemp("clients")
    clients = [c for c in dict.fromkeys(HTTP_CLIENTS + SOCKET_CLIENTS) if not missing(c)]
    server = Server(folder, RATE_LIMITS="free=1000/hour,one=1/second")
    runs: dict[str, subprocess.Popen[bytes]] = {}

    def report(client: str) -> dict[str, Any]:
        """What it has reported so far."""
        if reason := missing(client):
            pytest.skip(reason)
        steps: dict[str, Any] = {}
        for line in (folder / client).read_text().split("\n")[:-1]:
            steps |= json.loads(line)
        assert not runs[client].poll(), (folder / f"{client}.err").read_text()
        return steps

    def is_done(client: str) -> bool:
        return runs[client].poll() is not None or "ticks" in report(client)

    try:
        shared = {"URL": server.start().url, "KEY": server.new_key(), "CHROMIUM": CHROMIUM}
        for client in clients:
            limited = server.new_key(tier="one")
            runs[client] = run(client, folder / client, **shared, LIMITED_KEY=limited)
        eventually(lambda: all(map(is_done, clients)), SECONDS, "not every client has its ticks")
        server.stop()
        for process in runs.values():
            process.wait(SECONDS)
        yield report
    finally:
        for process in runs.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        server.close()


@pytest.mark.parametrize("client", HTTP_CLIENTS)
def test_a_client_gets_the_documented_responses(reports: Reports, client: str) -> None:
    paths = json.loads((REPOSITORY / "docs" / "openapi.json").read_text())["paths"]
    documented = {
        path: item["get"]["responses"]["200"]["content"]["application/json"]["example"].keys()
        for path, item in paths.items()
    }
    answers = {path: body.keys() for path, body in reports(client)["answers"].items()}
    assert answers == {path: documented[path] for path in answers}
    assert len(answers) == 5


@pytest.mark.parametrize("client", HTTP_CLIENTS)
def test_a_client_over_the_limit_waits_until_it_is_served(reports: Reports, client: str) -> None:
    moments = reports(client)["limited"]
    assert None not in moments, "a rejected request"
    assert len({moment[: len("2026-11-21T03:49:09")] for moment in moments}) == 3


@pytest.mark.parametrize("client", SOCKET_CLIENTS)
def test_a_client_sees_refusal_ticks_and_stop_of_a_socket(reports: Reports, client: str) -> None:
    report = reports(client)
    assert report["refused"] == REFUSALS[client]
    assert report["ticks"] == ["auth_success", *["time_update"] * 3]
    assert report["closed"] == 1001


def test_curl_that_retries_gets_every_response(tmp_path: Path) -> None:
    """As the page says; one second allows five of the seven."""
    server = Server(tmp_path, RATE_LIMITS="free=5/second")
    with closing(server):
        key, url = server.start().new_key(), f"{server.url}{TEST}?[1-7]"
        curl = ["curl", "-sf", "--retry", "3", "-H", f"X-API-Key: {key}", url]
        assert subprocess.run(curl, capture_output=True).returncode == 0
        assert server.total(key) == 7


def test_the_table_of_clients_has_all_that_are_run() -> None:
    rows = re.findall(r"^\| ([a-z0-9-]+) \|", PAGE.split("## Clients")[1], re.MULTILINE)
    assert sorted(rows) == sorted({"client", *HTTP_CLIENTS, *SOCKET_CLIENTS})


def bash(script: str, cwd: Path, env: dict[str, str]) -> str:
    """What the commands print; each of them must succeed."""
    done = subprocess.run(
        ["bash", "-ec", script], cwd=cwd, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def yaml_block(word: str) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return next(
        yaml.safe_load(block)
        for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
        if block.startswith(word)
    )


CLIENT_TEST = """
import os, urllib.request
def test_key():
    headers = {"X-API-Key": os.environ["KEY"]}
    url = os.environ["URL"] + "/api/v1/protected/test"
    assert urllib.request.urlopen(urllib.request.Request(url, headers=headers)).status == 200
"""


def test_the_job_for_github_actions_runs_client_tests(tmp_path: Path) -> None:
    """Its two commands; this environment stands in for a new one."""
    job, port, folder = yaml_block("jobs")["jobs"]["test"], str(free_port()), tmp_path / "service"
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


def test_the_compose_file_runs_client_tests(tmp_path: Path) -> None:
    """The page's commands, with a server in place of the container `demo`."""
    demo, tests = (yaml_block("services")["services"][name] for name in ("demo", "tests"))
    assert (REPOSITORY / demo["build"]["dockerfile"]).exists()
    (tmp_path / "test_client.py").write_text(CLIENT_TEST)
    server = Server(tmp_path, WEB_CONCURRENCY="1")
    url = tests["environment"][1].replace("http://demo:8000", server.url)
    docker = """docker() { case $2 in
        exec) shift 4; cd $REPOSITORY; "$@";;
        run) env $URL $TESTS;;
    esac; }"""
    commands = PAGE.split("```sh\n")[-1].partition("```")[0]
    given = {"PATH": PATH, "REPOSITORY": str(REPOSITORY), "URL": url, "TESTS": tests["command"]}
    with closing(server):
        assert "1 passed" in bash(f"{docker}\n{commands}", tmp_path, server.start().env | given)
