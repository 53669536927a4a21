"""The commands of README and CONTRIBUTING, pasted into a copy of the project, and their facts."""

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

import settings
from protocol.websocket import PING_SECONDS, STALLED_SECONDS, Close
from ratelimit import UNITS
from server.worker import SEND_SECONDS
from serving import REPOSITORY, clean_environment, eventually, free_port
from web import FORM_SECONDS

README = (REPOSITORY / "README.md").read_text()
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text()
OPENAPI = (REPOSITORY / "docs/openapi.json").read_text()
ASYNCAPI = (REPOSITORY / "docs/asyncapi.json").read_text()
FOLDERS = (REPOSITORY, REPOSITORY / "docs", REPOSITORY / "benchmarks")
DOCUMENTS = [path for folder in FOLDERS for path in folder.glob("*.md")]
PLATFORMS = {"DYNO": "Heroku", "FLY_APP_NAME": "Fly", "RENDER": "Render"}
PLATFORMS |= {"RAILWAY_ENVIRONMENT": "Railway", "RAILWAY_ENVIRONMENT_NAME": "Railway"}
START = ".venv/bin/python app.py"
# What differs from run to run; everything else has to be as it stands in README.
MOMENT = re.compile(r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{3})?( UTC|Z)")
YEAR = re.compile(r"\b20\d\d\b")


def blocks(language: str, text: str = README) -> list[str]:
    """The fenced blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def section(title: str, text: str = README) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def inline(label: str) -> list[str]:
    """The commands within the item of README's list that begins with this label."""
    found = re.search(rf"^- \*\*{label}:\*\*(.*?)(?=^- |^$)", README, re.MULTILINE | re.DOTALL)
    assert found, label
    return [code for code in re.findall("`([^`]+)`", found[1]) if " " in code]


def rows(title: str, text: str = README) -> list[list[str]]:
    """The cells of all table rows of a section, without the heads."""
    tables = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", section(title, text) + "\n", re.MULTILINE)
    return [line.strip("| ").split(" | ") for line in "".join(tables).splitlines()]


def pattern(text: str) -> str:
    """With what differs from run to run taken out."""
    return YEAR.sub("YEAR", MOMENT.sub("MOMENT", text.strip()))


# A step of a recipe: the file, where in it, and what to add.
PLACE = r"\s(above|below|in\splace\sof)\sthe\sline\swith\s`([^`]+)`"
STEP = re.compile(
    rf"[Ii]n\s(?:the\snew\sfile\s)?`([^`]+)`(?:,{PLACE})?:\n\n```\w+\n(.*?)^```", re.M | re.S
)
_, *parts = re.split(r"^### (.*)\n", section("Recipes", CONTRIBUTING), flags=re.MULTILINE)
RECIPES = dict(zip(parts[::2], parts[1::2], strict=True))


class Checkout:
    """A copy of the project, in which bash runs pasted commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ports = folder / "copy", {"8000": free_port(), "8001": free_port()}
        private = shutil.ignore_patterns(".*", "*.db*", "node_modules", "__pycache__")
        shutil.copytree(REPOSITORY, self.folder, ignore=private)
        (self.folder / "web/static/fonts").mkdir()  # static files may stand in folders
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
        pasted, env = ["bash", "-ec", self._on_our_ports(commands)], self.env | environment
        how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
        done = subprocess.run(pasted, cwd=self.folder, env=env, **how)
        assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
        return str(done.stdout)

    def has(self, name: str, _where: str, _marker: str, added: str) -> bool:
        file = self.folder / name
        return file.exists() and added in file.read_text()

    def follow(self, name: str, where: str, marker: str, added: str) -> None:
        """Take a step of a recipe; the marker must be in one line."""
        file = self.folder / name
        lines = file.read_text().splitlines(keepends=True) if where else [""]
        (at,) = [i for i, line in enumerate(lines) if marker in line]
        lines[at + (where == "below") : at + (where != "above")] = [added]
        file.write_text("".join(lines))

    @contextlib.contextmanager
    def running(self, command: str) -> Iterator[Callable[[], str]]:
        """Paste a command that serves, and end it with Ctrl-C; gives what it has printed so far."""
        with self._log.open("w") as log:
            pasted = ["bash", "-c", self._on_our_ports(command)]
            place: dict[str, Any] = {"cwd": self.folder, "env": self.env, "start_new_session": True}
            process = subprocess.Popen(pasted, stdout=log, stderr=log, **place)
        try:
            eventually(lambda: self._serves(process), 30, command)
            yield self._log.read_text
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(timeout=10) == 0, self._log.read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _serves(self, process: "subprocess.Popen[bytes]") -> bool:
        text = self._log.read_text()
        assert process.poll() is None, text
        return "Try it:" in text  # the demo has created its key

    def _on_our_ports(self, commands: str) -> str:
        for written, ours in self.ports.items():
            commands = re.sub(rf"\b{written}\b", str(ours), commands)
        return commands


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def installed(checkout: Checkout) -> Checkout:
    """With the environment, as README's first command leaves it."""
    checkout.paste("python3 -m venv .venv")
    return checkout


class TestCommands:
    def test_pasted_commands_print_what_readme_shows(self, checkout: Checkout) -> None:
        serve, ask, socket, *_ = blocks("sh")
        answers, frames = blocks("json")
        with checkout.running(serve):
            printed = checkout.paste(f"{ask}{socket}")
        assert pattern(printed) == pattern(answers + frames)
        (start_over,) = [code for code in inline("Start over") if code.startswith("rm")]
        checkout.paste(start_over)
        with checkout.running(START):  # until it shows a new key
            pass

    def test_another_port_and_an_access_log_can_be_had(self, installed: Checkout) -> None:
        (port,), (log,) = inline("Use another port"), inline("Show an access log")
        with installed.running(port.replace(" ", f" {log.partition(' .venv')[0]} ", 1)) as printed:
            installed.paste("curl -s http://127.0.0.1:8001/api/v1/status?private")
            eventually(lambda: '"GET /api/v1/status" 200' in printed())

    def test_six_requests_end_in_a_429(self, installed: Checkout) -> None:
        start, ask = inline("See a 429")
        create_key = blocks("sh")[1].splitlines()[0]
        with installed.running(start):
            if (second := time.time() % 60) > 40:
                time.sleep(60 - second)  # or the minute might end between the six
            answers = installed.paste(f"{create_key}\n{ask}").splitlines()
        assert [json.loads(answer).get("status", 200) for answer in answers] == [200] * 5 + [429]

    def test_test_command_runs_tests(self, checkout: Checkout) -> None:
        """One short file in place of all, in one process."""
        (command,) = blocks("sh", section("Tests"))
        short = "-n 0 -v tests/test_ratelimit.py"
        assert " passed" in checkout.paste(command, PYTEST_ADDOPTS=short)

    def test_blocks_can_be_pasted_into_any_shell(self) -> None:
        """No prompt, and no comment: interactive zsh runs it."""
        for block in [block for path in DOCUMENTS for block in blocks("sh", path.read_text())]:
            assert not re.search(r"^\s*[$>] |(^|\s)#", block, re.MULTILINE), block


@pytest.mark.ci
class TestRecipes:
    @pytest.mark.parametrize("name", RECIPES)
    def test_recipe_leaves_the_tests_green(self, installed: Checkout, name: str) -> None:
        """Its tests fail until the documents are right. What was done before is left as it is."""
        commands = "".join(blocks("sh", RECIPES[name]))
        steps = [step for step in STEP.findall(RECIPES[name]) if not installed.has(*step)]
        described = [step for step in steps if step[0].endswith((".md", ".json"))]
        for step in [step for step in steps if step not in described]:
            installed.follow(*step)
        if described:
            with pytest.raises(AssertionError, match=r"FAILED .*::TestFacts::"):
                installed.paste(commands)
        for step in described:
            installed.follow(*step)
        assert " passed" in installed.paste(commands)
        (check,) = [block for block in blocks("sh", CONTRIBUTING) if "mypy" in block]
        installed.paste(check)


class TestFacts:
    def test_links_lead_to_files_and_headings(self) -> None:
        link = r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\""
        found = [(path, *pair) for path in DOCUMENTS for pair in re.findall(link, path.read_text())]
        for document, target, image in found:
            path, _, anchor = (target or image).partition("#")
            file = (document.parent / path) if path else document
            assert "://" in target or file.exists(), target
            assert not anchor or "://" in target or anchor in anchors(file), target

    def test_map_names_every_module_and_package(self) -> None:
        found = [*REPOSITORY.glob("[a-z]*.py"), *REPOSITORY.glob("[a-z]*/*.py")]
        top = {path.relative_to(REPOSITORY).parts[0] for path in found} - {"docs"}
        cells = " ".join(row[0] for row in rows("Where things are", CONTRIBUTING))
        assert set(re.findall(r"\]\(([^)]+)\)", cells)) == top | {"deploy"}

    def test_settings_table_is_what_is_read(self) -> None:
        """Every setting is in it; given its defaults, the settings are those without any."""
        table = {row[0].strip("`"): row[1].strip("`") for row in rows("Settings and commands")}
        assert table.keys() == settings.NAMES
        hops = {PLATFORMS[name]: hops for name, hops in settings.PLATFORM_HOPS.items()}
        assert hops == dict(re.findall(r"(\w+) (\d)", table["PROXY_HOPS"]))
        assert settings.load(table | {"SECRET_KEY": "", "PROXY_HOPS": "0"}) == settings.load({})

    def test_endpoints_are_those_of_the_app(self, app: Flask) -> None:
        rules = {rule.rule for rule in app.url_map.iter_rules() if rule.rule.startswith("/api/")}
        assert set(re.findall(r"`(/api/[^`?]+)", "".join(map(str, rows("The API"))))) == rules
        described = {re.sub(r"{(\w+)}", r"<\1>", path) for path in json.loads(OPENAPI)["paths"]}
        assert described == {rule for rule in rules if "/ws/" not in rule}

    def test_units_are_those_of_the_limits(self) -> None:
        (units,) = re.findall(r"^The limits .* are per (.*)\.$", README, re.MULTILINE)
        assert units.replace("or ", "").split(", ") == [*UNITS]

    def test_codes_of_errors_are_those_of_the_descriptions(self) -> None:
        codes = set(re.findall(r'"code": (?:\{[^}]*"const": )?"([a-z_]+)"', OPENAPI + ASYNCAPI))
        codes |= {"not_found", "method_not_allowed"}  # in words, as they are not of one path
        table = " ".join(row[1] for row in rows("The API") if row[0].isdigit())
        assert set(re.findall("`([a-z_]+)`", table)) == codes

    def test_close_codes_are_those_of_the_service(self) -> None:
        codes = {1000, 1002, 1007} | {int(code) for code in Close}
        page = (REPOSITORY / "docs" / "testing-clients.md").read_text()
        assert {int(row[0]) for row in rows("WebSockets", page) if row[0].isdigit()} == codes
        assert set(map(int, json.loads(ASYNCAPI)["x-close-codes"])) == codes

    def test_seconds_are_those_of_the_code(self) -> None:
        """Tests of what takes so long patch these numbers."""
        text = "".join(path.read_text() for path in DOCUMENTS)
        config = (REPOSITORY / "gunicorn.conf.py").read_text()
        assert "\nkeepalive = 100 if settings.proxy_hops else 5\n" in config
        assert "A header has 5 seconds to arrive, or 100 behind a proxy" in text
        assert SEND_SECONDS == FORM_SECONDS == STALLED_SECONDS
        assert f"sends a form slowly, is disconnected after {SEND_SECONDS} seconds" in text
        assert f"sends a ping every {PING_SECONDS} seconds" in text

    def test_commands_are_those_of_flask(self, app: Flask) -> None:
        text = section("Settings and commands").rpartition("|\n")[2]
        named = set(re.findall("`([a-z]+)`", text))
        groups = [app.cli.commands[name] for name in ("user", "key")]
        assert named == {name for group in groups for name in group.commands}  # type: ignore[attr-defined]

    def test_every_requirement_is_pinned(self) -> None:
        text = "\n".join(file.read_text() for file in REPOSITORY.glob("requirements*.txt"))
        required = set(re.findall(r"(?m)^\w[\w-]*", text))
        pinned = re.findall("(?m)^(.+?)==", (REPOSITORY / "constraints.txt").read_text())
        assert {"flask", "psycopg", "ruff"} <= required <= set(pinned)

    def test_design_names_tests_that_exist(self) -> None:
        named = re.findall(r"`(test_\w+)`", (REPOSITORY / "docs" / "design.md").read_text())
        tests = "\n".join(file.read_text() for file in (REPOSITORY / "tests").rglob("test_*.py"))
        assert named
        assert not [name for name in named if f"def {name}(" not in tests]


def anchors(file: Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    headings = re.findall("^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
