"""docs/testing-clients.md: its commands, and its job for GitHub Actions."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from serving import REPOSITORY, bash, clean_environment, free_port, working_tree

PAGE = (REPOSITORY / "docs/testing-clients.md").read_text()
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


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
