"""The SQLite file after a power failure: the disk has what was flushed to it, and some of the rest.

strace records what the service writes and flushes. From that, images are made of what a disk may
hold at some moment: writes that were not flushed are there, or not, or in part, in any order.
"""

import contextlib
import random
import re
import shutil
import sqlite3
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from conftest import StartServer
from load import Load, accepted
from rawsocket import form_bytes
from serving import eventually, patience

LOST_SECONDS = 10  # what docs/operating.md says
CALLS = "pwrite64,ftruncate,fsync,fdatasync,unlink"
LINE = re.compile(r"(\d+) +([\d.]+) (?:<\.\.\. )?(\w+)(?: resumed>|\()(.*)")
FIND = 'SELECT (SELECT count(*) FROM "user"), coalesce((SELECT total FROM api_key), 0)'
WRITE = re.compile(r'\d+<(.*?)>, "(.*)", \d+, (\d+)')


class Write(NamedTuple):
    file: str
    data: bytes | None  # None: the file ends here
    offset: int


class Moment(NamedTuple):
    """`writes` have begun, of which the first ones were flushed, for each file so many."""

    seconds: float
    writes: int
    flushed: dict[str, int]


def read_trace(text: str) -> tuple[list[Write], list[Moment]]:
    """All writes, and a moment after each of the calls."""
    writes, moments = list[Write](), list[Moment]()
    flushed, flushing = dict[str, int](), dict[str, tuple[str, int]]()
    for process, seconds, call, rest in LINE.findall(text):
        resumed = process in flushing and call in ("fsync", "fdatasync") and "<" not in rest
        file = "" if resumed else re.findall('[<"](.*?)[>"]', rest)[:1]
        if call == "pwrite64" and (found := WRITE.match(rest)):
            data = found[2].encode().decode("unicode_escape").encode("latin-1")
            writes.append(Write(found[1], data, int(found[3])))
        elif call == "ftruncate" and file:
            writes.append(Write(file[0], None, int(rest.split(", ")[1].split(")")[0].split()[0])))
        elif call == "unlink" and file:
            writes.append(Write(file[0], None, 0))
        elif call in ("fsync", "fdatasync"):
            if not resumed and file:
                flushing[process] = file[0], len(writes)
            if "unfinished" not in rest and process in flushing:
                name, count = flushing.pop(process)
                flushed = flushed | {name: count}
        moments.append(Moment(float(seconds), len(writes), flushed))
    return writes, moments


def image(writes: list[Write], moment: Moment, chance: random.Random) -> dict[str, bytearray]:
    """The files that a disk may hold: of what was not flushed a random part, from none to all."""
    kept, files = chance.choice([0, 0.2, 0.5, 0.8, 1]), defaultdict[str, bytearray](bytearray)
    for number, (name, data, offset) in enumerate(writes[: moment.writes]):
        if data is None:
            del files[name][offset:]
            continue
        if number >= moment.flushed.get(name, 0):
            if chance.random() > kept:
                continue
            if chance.random() < 0.1:  # torn between two sectors
                data = data[: chance.randrange(0, len(data) + 1, 512)]
        files[name].extend(bytes(max(0, offset - len(files[name]))))
        files[name][offset : offset + len(data)] = data
    return files


@pytest.mark.ci
def test_after_a_power_failure_the_file_is_whole_and_lacks_ten_seconds_at_most(
    start_server: StartServer, tmp_path: Path
) -> None:
    if not shutil.which("strace"):
        pytest.skip("there is no strace")
    trace, home = tmp_path / "trace", tmp_path / "images"
    home.mkdir()
    options = ["-D", "-f", "-y", "-ttt", "-s8192", f"-etrace={CALLS}", f"-o{trace}"]
    server = start_server("strace", *options, sys.executable, "app.py")
    key, started = re.findall(r"sk_live_\w+", server.log())[0], time.time()
    users = [started]  # when they were made; the first one is `demo`
    clock = time.time() - time.monotonic()
    with Load(server.port, key, connections=1, rest=0.05) as load:
        while time.time() < started + 30:
            fields = {"username": f"user{len(users)}", "password": "long enough"}
            form = form_bytes("/sign-up", email=f"user{len(users)}@example.com", **fields)
            assert server.send(form).status == 303
            users.append(time.time())
            time.sleep(1.5)
        replies = load.stop()
    server.stop()
    counts = [clock + reply.started + reply.seconds for reply in accepted(replies)]
    eventually(lambda: "exited with 0" in trace.read_text())

    writes, moments = read_trace(trace.read_text())
    moments = [moment for moment in moments if moment.seconds > started + LOST_SECONDS + 2]
    chance, images, most_lost = random.Random(), 0, 0.0
    while time.time() < started + 55:
        moment = chance.choice(moments)
        for name, data in image(writes, moment, chance).items():
            (home / Path(name).name).write_bytes(data)
        with contextlib.closing(sqlite3.connect(home / server.database.name)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            (found,) = database.execute(FIND)
            for stored, made in zip(found, (users, counts), strict=True):
                missing = [when for when in made[stored:] if when < moment.seconds]
                most_lost = max(most_lost, moment.seconds - min(missing, default=moment.seconds))
        for file in home.iterdir():
            file.unlink()
        images += 1
    print(f"{images} images of {len(writes)} writes; {most_lost:.1f} s are lost at most")
    assert images > 100
    assert most_lost < patience(LOST_SECONDS)
