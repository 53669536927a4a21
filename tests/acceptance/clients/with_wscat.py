"""wscat in a terminal: it prints the status of a refusal, each message and the close code."""

import json
import os
import pty
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from script import KEY, MESSAGES, TIME, report

WSCAT = Path(__file__).parent / "node_modules/wscat/bin/wscat"


def wscat(*arguments: str) -> Iterator[str]:
    """The lines that wscat prints, until it ends."""
    master, terminal = pty.openpty()
    command = ["node", str(WSCAT), "--no-color", *arguments]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    with open(master, encoding="utf-8", errors="replace") as lines:
        try:
            yield from lines
        except OSError:  # Linux reports the end of a terminal as an error
            process.wait()


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
