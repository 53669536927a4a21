"""docs/testing-clients.md: its commands."""

import re
import sys
from pathlib import Path

import pytest

from conftest import StartServer
from helpers.server import REPOSITORY, bash

PAGE = (REPOSITORY / "docs/testing-clients.md").read_text()


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
