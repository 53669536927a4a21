"""Floods by strangers: what each can do without a good key, and how long owners of one wait."""

import subprocess
import sys

import pytest

from conftest import StartServer
from helpers.load import waits
from helpers.server import REPOSITORY, Server

SHORT_SECONDS = 0.3  # which says enough; who waits for the end of a flood waits for ten
TIMES = 30  # as long as beside two busy programs
ATTACKERS = [sys.executable, str(REPOSITORY / "benchmarks" / "attacks.py")]
BUSY = [sys.executable, "-c", "import os; os.nice(10)\nwhile True: pass"]


def wait_beside(server: Server, key: str, *command: str) -> float:
    """How long an owner waits while two such programs run, but for the longest waits."""
    programs = [subprocess.Popen(command) for _ in range(2)]
    try:
        waits(server.port, key, 100)  # in which a flood rises
        longest = waits(server.port, key, 200)[-3]
        assert {program.poll() for program in programs} == {None}
        return longest
    finally:
        for program in programs:
            program.kill()
            program.wait()


@pytest.mark.parametrize(
    "attack",
    [  # of ATTACKS; benchmarks/hostile.py makes all of them
        *("endless_bodies", "large_headers", "hostile_values", "half_forms", "garbage", "sign_ups"),
        *(
            "pipelined_pages",
            "own_pages",
            "many_fields",
            "long_queries",
            "left_pages",
            "unknown_keys",
            "unknown_keys_of_sockets",
            "unread_echoes",
        ),
    ],
)
def test_flood_does_not_keep_owners_of_keys_waiting(start_server: StartServer, attack: str) -> None:
    """On a server of its own: the attackers use up what this address may try."""
    server = start_server()
    key = server.new_key(tier="pro")
    for _ in range(3):  # while the machine has other things to do
        during = wait_beside(server, key, *ATTACKERS, str(server.port), attack)
        print(f"{attack}: {1000 * during:.1f} ms")
        if during < SHORT_SECONDS or during < TIMES * wait_beside(server, key, *BUSY):
            return
    pytest.fail("owners of keys waited in three rounds")
