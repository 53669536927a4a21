"""The SQLite file after a power failure: the disk has what was flushed to it, and some of the rest.

strace records what the service writes and flushes. From that, images are made of what a disk may
hold at some moment: writes that were not flushed are there, or not, or in part, in any order.
"""

import random
import re
import shutil
import sqlite3
import sys
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from conftest import StartServer
from load import Load
from serving import eventually

SERVED_SECONDS, IMAGED_SECONDS = 8, 15
STRACE = ["strace", "-D", "-f", "-y", "-ttt", "-s8192", "-etrace=pwrite64,fsync,fdatasync"]
CALL = re.compile(
    r"^(\d+) +([\d.]+) (?:(pwrite64|fsync|fdatasync)\(\d+<(\S+\.db(?:-wal)?)>|<\.\.\. fd?\w*sync r)"
    r'(?:, "(.*)", \d+, (\d+))?(.*)$',
    re.MULTILINE,
)


class Write(NamedTuple):
    file: str
    data: bytes
    offset: int


class Moment(NamedTuple):
    """`writes` have begun, of which the first ones were flushed, for each file so many."""

    seconds: float
    writes: int
    flushed: dict[str, int]


def read_trace(text: str) -> tuple[list[Write], list[Moment]]:
    """All writes, and a moment after each call has begun or ended."""
    writes, moments, flushed = list[Write](), list[Moment](), dict[str, int]()
    flushing: dict[str, dict[str, int]] = {}  # by thread
    for thread, seconds, call, file, data, offset, end in CALL.findall(text):
        if call == "pwrite64":
            plain = data.encode().decode("unicode_escape").encode("latin-1")
            writes.append(Write(file, plain, int(offset)))
        elif call:
            flushing[thread] = {file: len(writes)}
        if call != "pwrite64" and "unfinished" not in end:
            flushed = flushed | flushing.pop(thread, {})
        moments.append(Moment(float(seconds), len(writes), flushed))
    return writes, moments


def image(writes: list[Write], moment: Moment, chance: random.Random) -> dict[str, bytearray]:
    """The files that a disk may hold: of what was not flushed a random part, from none to all."""
    kept, files = chance.choice([0, 0.2, 0.5, 0.8, 1]), defaultdict[str, bytearray](bytearray)
    for number, (name, data, offset) in enumerate(writes[: moment.writes]):
        if number >= moment.flushed.get(name, 0):
            if chance.random() > kept:
                continue
            if chance.random() < 0.1:  # torn between two sectors
                data = data[: chance.randrange(0, len(data) + 1, 512)]
        files[name].extend(bytes(max(0, offset - len(files[name]))))
        files[name][offset : offset + len(data)] = data
    return files


def test_a_power_failure_loses_no_user(start_server: StartServer, tmp_path: Path) -> None:
    """Counts since the last checkpoint may be lost, but the file is whole."""
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    server = start_server(*STRACE, "-o", str(trace), sys.executable, "app.py")
    users = [started := time.time()]  # when they were stored; the first one is `demo`
    with Load(server.port, *re.findall(r"sk_live_\w+", server.log())[:1], rest=0.1):
        while time.time() < started + SERVED_SECONDS:
            assert server.sign_up(f"user{len(users)}").status == 303
            users.append(time.time())
            time.sleep(0.5)
    server.stop()
    eventually(lambda: "exited with 0" in trace.read_text())
    writes, moments = read_trace(trace.read_text())
    served = [moment for moment in moments if started < moment.seconds < users[-1]]

    chance = random.Random(seed := random.randrange(10**6))
    print(f"The images are made with the seed {seed}")
    folder, images = tmp_path / "image", 0
    while time.time() < users[-1] + IMAGED_SECONDS:
        folder.mkdir()
        moment = chance.choice(served)
        for name, data in image(writes, moment, chance).items():
            (folder / Path(name).name).write_bytes(data)
        with closing(sqlite3.connect(folder / server.database.name)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            [(stored,)] = database.execute('SELECT count(*) FROM "user"')
            assert stored >= sum(when < moment.seconds for when in users)
        shutil.rmtree(folder)
        images += 1
    print(f"{images} images of {len(writes)} writes")
    assert images > 100
