"""docs/testing-clients.md: its commands, and the clients that it names."""

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen, check_output
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from conftest import StartServer
from paths import TEST, TIME
from serving import REPOSITORY, bash, clean_environment, free_port, working_tree

PAGE = (REPOSITORY / "docs/testing-clients.md").read_text()
WSCAT = Path(__file__).parent / "clients/node_modules/.bin/wscat"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def get_with_curl(url: str, key: str) -> str:
    command = ["curl", "-sf", "--retry", "3", "-H", f"X-API-Key: {key}", url]
    return check_output(command, text=True)


def get_with_requests(url: str, key: str) -> str:
    requests: Any = pytest.importorskip("requests", reason="requests is not installed")
    waiting = requests.adapters.HTTPAdapter(max_retries=requests.adapters.Retry(3))
    with requests.Session() as session:
        session.mount("http://", waiting)
        return str(session.get(url, headers={"X-API-Key": key}).text)


@pytest.mark.parametrize("get", [get_with_curl, get_with_requests])
def test_client_waits_after_a_429(
    start_server: StartServer, get: Callable[[str, str], str]
) -> None:
    server = start_server(RATE_LIMITS="free=1/second")
    key = server.new_key()
    answers = [json.loads(get(server.url + TEST, key)) for _ in range(3)]
    assert len({answer["timestamp"][: len("2026-11-21T03:49:09")] for answer in answers}) == 3


def test_websockets_sees_refusal_updates_and_stop(start_server: StartServer) -> None:
    server = start_server()
    with pytest.raises(InvalidStatus) as refusal:
        connect(server.ws_url + TIME)
    assert json.loads(refusal.value.response.body or b"")["code"] == "missing_api_key"
    with connect(server.ws_url + TIME, additional_headers={"X-API-Key": server.new_key()}) as ws:
        assert [json.loads(ws.recv())["type"] for _ in range(2)] == ["auth_success", "time_update"]
        os.kill(server.pid, signal.SIGTERM)
        for message in ws:  # which ends without an exception
            assert json.loads(message)["type"] == "time_update"
        assert ws.close_code == 1001


def test_wscat_shows_refusal_updates_and_stop(start_server: StartServer) -> None:
    if not WSCAT.exists():
        pytest.skip("wscat is not installed: .ci/clients")
    server = start_server()

    def wscat(query: str) -> "Popen[str]":
        """On a terminal of its own."""
        command = shlex.join([str(WSCAT), "--no-color", "-c", f"{server.ws_url}{TIME}{query}"])
        return Popen(["script", "-qec", command, "/dev/null"], stdin=PIPE, stdout=PIPE, text=True)

    with wscat("") as refused:
        assert any("server response: 401" in line for line in refused.stdout or ())
    with wscat(f"?api_key={server.new_key()}") as client:
        assert any('"type":"time_update"' in line for line in client.stdout or ())
        os.kill(server.pid, signal.SIGTERM)
        assert any("Disconnected (code: 1001" in line for line in client.stdout or ())


@pytest.mark.parametrize("start", ["**429.**", "**401.**", "A message of more than"])
def test_a_command_of_the_page_prints_what_it_says(
    start_server: StartServer, tmp_path: Path, start: str
) -> None:
    section = PAGE.split(f"\n{start}")[1]
    _, command, _, expected, *_ = re.split(r"```(?:sh|text)?\n", section)
    server = start_server(RATE_LIMITS="free=5/day")  # no window ends meanwhile
    command = command.replace(":8000", f":{server.port}")
    command = command.replace(".venv/bin/python", sys.executable)
    printed = bash(command, tmp_path, server.env | {"KEY": server.new_key()})
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
