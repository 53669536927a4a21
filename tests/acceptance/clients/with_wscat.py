"""wscat in a terminal: it prints the status of a refusal, each message and the close code."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

from script import KEY, MESSAGES, TIME, report

WSCAT = Path(__file__).parent / "node_modules/wscat/bin/wscat"


def wscat(*arguments: str) -> Iterator[str]:
    """The lines that wscat prints on a terminal of its own, until it ends."""
    command = shlex.join(["node", str(WSCAT), "--no-color", *arguments])
    terminal = ["script", "-qec", command, "/dev/null"]
    with Popen(terminal, stdin=PIPE, stdout=PIPE, text=True) as process:
        yield from process.stdout or ()


refusal = re.search(r"Unexpected server response: (\d+)", "".join(wscat("-c", TIME)))
report("refused", {"status": int(refusal[1])} if refusal else None)

types: list[str] = []
for line in wscat("-c", TIME, "-H", f"X-API-Key: {KEY}"):
    if message := re.search(r"< (\{.*\})", line):
        types.append(json.loads(message[1])["type"])
        if len(types) == MESSAGES:
            report("ticks", types)
    if closed := re.search(r"Disconnected \(code: (\d+)", line):
        report("closed", int(closed[1]))
