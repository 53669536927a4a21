"""README's commands, pasted into a copy of the tracked files, and the facts in its tables."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from websockets.sync.client import connect

import settings
from protocol.websocket import Close
from serving import REPOSITORY, clean_environment, eventually, free_port

README = (REPOSITORY / "README.md").read_text()
DOCUMENTS = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += sorted((REPOSITORY / "docs").glob("*.md"))
START = ".venv/bin/python app.py"
# What differs from run to run; everything else has to be as it stands in README.
MOMENT = re.compile(r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{3})?( UTC|Z)")
YEAR = re.compile(r"\b20\d\d\b")


def blocks(language: str) -> list[str]:
    """The fenced blocks of README in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def inline(label: str) -> list[str]:
    """The commands within the item of README's list that begins with this label."""
    found = re.search(rf"^- \*\*{label}:\*\*(.*?)(?=^- |^$)", README, re.MULTILINE | re.DOTALL)
    assert found, label
    return [code for code in re.findall("`([^`]+)`", found[1]) if " " in code]


def rows(title: str) -> list[list[str]]:
    """The cells of all table rows of a section, without the heads."""
    tables = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", section(title) + "\n", re.MULTILINE)
    return [line.strip("| ").split(" | ") for line in "".join(tables).splitlines()]


def tracked() -> list[str]:
    """The files of the project; skips a test outside of a git repository."""
    command = ["git", "ls-files", "--cached", "-z"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"git lists no files: {listed.stderr.strip()}")
    return listed.stdout.split("\0")[:-1]


def pattern(text: str) -> str:
    """With what differs from run to run taken out."""
    return YEAR.sub("YEAR", MOMENT.sub("MOMENT", text.strip()))


class Checkout:
    """A copy of what git tracks, with README's commands run in it by bash."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ports = folder / "copy", {"8000": free_port(), "8001": free_port()}
        for name in tracked():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes((REPOSITORY / name).read_bytes())
        # The environment of these tests stands in for a new one. pip only checks that it would do.
        (folder / "python3").write_text(
            f'#!/bin/sh\n[ "$1 $2" = "-m venv" ] && exec ln -sfn {shlex.quote(sys.prefix)} "$3"\n'
            f'exec {shlex.quote(sys.executable)} "$@"\n'
        )
        (folder / "python3").chmod(0o755)
        self.env = clean_environment(HOME=str(folder), PIP_DRY_RUN="1", PIP_NO_INDEX="1")
        for name in [name for name in self.env if name.startswith("COVERAGE")]:
            del self.env[name]  # the copy is gone when coverage looks for its files
        self.env |= {"PATH": f"{folder}:{self.env['PATH']}", "PORT": str(self.ports["8000"])}
        self._log = folder / "log"

    def paste(self, commands: str, **environment: str) -> str:
        """What the commands print; each of them must succeed."""
        script = f"set -e\n{self._on_our_ports(commands)}"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.env | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def running(self, command: str) -> Iterator[Callable[[], str]]:
        """Paste a command that serves, and end it with Ctrl-C; gives what it has printed so far."""
        command = self._on_our_ports(command)
        with self._log.open("w") as log:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            eventually(lambda: "Booting worker" in self.printed(process), 30, command)
            yield self._log.read_text
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(timeout=10) == 0, self._log.read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def printed(self, process: "subprocess.Popen[bytes]") -> str:
        text = self._log.read_text()
        assert process.poll() is None, text
        return text

    def _on_our_ports(self, commands: str) -> str:
        for written, ours in self.ports.items():
            commands = re.sub(rf"\b{written}\b", str(ours), commands)
        return commands


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    if not shutil.which("curl"):
        pytest.skip("there is no curl here")
    return Checkout(tmp_path)


@pytest.fixture
def installed(checkout: Checkout) -> Checkout:
    """With the environment, as the command of `Run it` leaves it."""
    checkout.paste("python3 -m venv .venv")
    return checkout


# Commands


def test_pasted_commands_print_what_readme_shows(checkout: Checkout) -> None:
    serve, ask, _ = blocks("sh")
    answers, frames = blocks("json")
    with checkout.running(serve):
        printed = checkout.paste(f'{ask}echo "$KEY"')
        *got, key = printed.splitlines()
        assert pattern("\n".join(got)) == pattern(answers)
        assert received(checkout, key) == pattern(frames)


def received(checkout: Checkout, key: str) -> str:
    """What the socket of README's line sends first."""
    command = shlex.split(blocks("sh")[2])
    assert command[:3] == ["npx", "wscat", "-c"]
    url = command[3].replace("$KEY", key).replace("8000", str(checkout.ports["8000"]))
    with connect(url) as ws:
        return pattern("\n".join(str(ws.recv(timeout=10)) for _ in range(2)))


def test_start_over_makes_a_new_key(installed: Checkout) -> None:
    (remove,) = [code for code in inline("Start over") if code.startswith("rm")]
    shown = []
    for _ in range(2):
        with installed.running(START) as printed:
            shown.append(re.findall("sk_live_[0-9A-Za-z_]+", printed())[0])
        installed.paste(remove)
    assert shown[0] != shown[1]


def test_other_port_serves_there(installed: Checkout) -> None:
    (command,) = inline("Another port")
    with installed.running(command):
        port = installed.ports["8001"]
        assert "operational" in installed.paste(f"curl -s http://127.0.0.1:{port}/api/v1/status")


def test_access_log_has_a_line_for_a_request(installed: Checkout) -> None:
    (command,) = inline("Access log")
    with installed.running(command) as printed:
        installed.paste("curl -s http://127.0.0.1:8000/api/v1/status?private")
        eventually(lambda: '"GET /api/v1/status" 200' in printed())


def test_six_requests_end_in_a_429(installed: Checkout) -> None:
    start, ask = inline("A 429 in ten seconds")
    make_key = blocks("sh")[1].splitlines()[0]
    with installed.running(start):
        key = installed.paste(f'{make_key}\necho "$KEY"').strip()
        if (second := time.time() % 60) > 55:
            time.sleep(60 - second)  # or the minute might end between the six
        answers = installed.paste(ask, KEY=key).splitlines()
    assert [json.loads(answer).get("status", 200) for answer in answers] == [200] * 5 + [429]


def test_test_command_runs_tests(checkout: Checkout) -> None:
    (command,) = inline("Test it")
    # One short file in place of all, in one process; the requirements are those of the command.
    assert " passed" in checkout.paste(command, PYTEST_ADDOPTS="-n 0 -v tests/test_timestamps.py")


def test_two_commands_are_single_lines() -> None:
    install = "python3 -m venv .venv && .venv/bin/pip install -r"
    assert blocks("sh")[0] == f"{install} requirements.txt && {START}\n"
    assert inline("Test it") == [f"{install} requirements-dev.txt && .venv/bin/pytest"]


def test_nothing_to_be_pasted_begins_with_a_prompt() -> None:
    for document in DOCUMENTS:
        assert not re.search(r"^ *\$ ", document.read_text(), re.MULTILINE), document


# Facts


def test_readme_has_at_most_120_lines() -> None:
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    text = document.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text)
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (document.parent / path) if path else document
        if "://" not in target:
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def anchors(file: Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    headings = re.findall("^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_map_names_every_module_and_room() -> None:
    top = {name.partition("/")[0] for name in tracked() if name.endswith(".py")} - {"docs"}
    mapped = re.findall(r"\]\(([^)]+)\)", " ".join(row[0] for row in rows("Where things are")))
    assert set(mapped) == top | {"deploy"}


def test_what_the_map_points_to_is_in_that_file() -> None:
    for places, text in rows("Where things are"):
        paths = [REPOSITORY / path for path in re.findall(r"\]\(([^)]+)\)", places)]
        files = [
            file for path in paths for file in (path.glob("*.py") if path.is_dir() else [path])
        ]
        source = "\n".join(file.read_text() for file in files)
        for name in re.findall(r"`([^` ]+)`", text):
            part = name.strip("@()").rpartition(".")[2]
            defined = re.search(rf"^ *(def|class) {part}\b|^{part} =", source, re.MULTILINE)
            assert defined or any(name == file.name for file in [*files, *REPOSITORY.iterdir()]), (
                name
            )


def test_settings_table_names_what_is_read() -> None:
    asked: set[str] = set()

    class Asked(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.add(name)
            return default

    settings.load(Asked())
    cells = [row[0] for row in rows("Settings and commands")]
    assert set(re.findall("`([A-Z_]+)`", " ".join(cells))) == asked - set(settings.PLATFORM_HOPS)


def test_settings_table_has_the_defaults() -> None:
    table = {row[0].strip("`"): row[1].strip("`") for row in rows("Settings and commands")}
    given = {name: table[name] for name in ("PORT", "DATABASE_URL", "RATE_LIMITS", "SIGNUPS")}
    assert settings.load(given) == settings.load({})


def test_endpoints_are_those_of_the_app(app: Flask) -> None:
    rules = {rule.rule for rule in app.url_map.iter_rules() if rule.rule.startswith("/api/")}
    assert set(re.findall(r"`(/api/[^`?]+)", section("The API"))) == rules


def test_codes_of_errors_are_those_of_openapi() -> None:
    described = (REPOSITORY / "openapi.json").read_text()
    table = " ".join(row[1] for row in rows("The API") if row[0][0].isdigit())
    for code in re.findall("`([a-z_]+)`", table):
        assert f'"{code}"' in described or code in source_of("protocol", "sockets.py"), code


def source_of(*names: str) -> str:
    files = [file for name in names for file in REPOSITORY.glob(f"{name}/*.py")]
    files += [REPOSITORY / name for name in names if name.endswith(".py")]
    return "\n".join(file.read_text() for file in files)


def test_close_codes_are_those_of_the_service() -> None:
    (text,) = re.findall(r"\*\*Close codes:\*\*(.*?)\n\n", README, re.DOTALL)
    named = {int(code) for code in re.findall(r"\b1\d{3}\b", text)}
    assert named == {1002, 1007} | {int(code) for code in Close} - {Close.ABNORMAL}


def test_commands_are_those_of_flask(app: Flask) -> None:
    text = section("Settings and commands").rpartition("\n\n")[0].rpartition("\n\n")[2]
    named = re.findall("`([a-z]+)`", text)
    groups = [app.cli.commands[name] for name in ("user", "key", "db")]
    assert sorted(named) == sorted(name for group in groups for name in group.commands)  # type: ignore[attr-defined]


def test_design_names_tests_that_exist() -> None:
    named = re.findall(r"`(test_\w+)`", (REPOSITORY / "docs" / "design.md").read_text())
    tests = "\n".join(file.read_text() for file in (REPOSITORY / "tests").glob("test_*.py"))
    assert named
    assert not [name for name in named if f"def {name}(" not in tests]
