"""Floods by strangers: what each can do without a good key, and how long owners of one wait."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.attacks import ATTACKS
from conftest import StartServer
from load import waits
from serving import REPOSITORY, Server

TIMES = 30  # as long as without the flood; who waits for its end waits a thousand times as long
LEAST_SECONDS = 0.01  # a shorter wait says nothing on a machine with other things to do


@contextlib.contextmanager
def flooded(server: Server, attack: str) -> Iterator[None]:
    """Meanwhile two programs attack; they have less right to the processor than others."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "attacks.py"), str(server.port)]
    attackers = [subprocess.Popen([*command, attack]) for _ in range(2)]
    try:
        time.sleep(1)  # for the flood to rise
        assert {attacker.poll() for attacker in attackers} == {None}
        yield
    finally:
        for attacker in attackers:
            attacker.kill()
            attacker.wait()


@pytest.mark.parametrize("attack", [attack.__name__ for attack in ATTACKS])
def test_flood_does_not_keep_owners_of_keys_waiting(start_server: StartServer, attack: str) -> None:
    """On a server of its own: the attackers use up what this address may try."""
    server = start_server()
    key = server.new_key(tier="pro")
    usual = max(LEAST_SECONDS, waits(server.port, key, 200)[-3])
    with flooded(server, attack):
        during = waits(server.port, key, 200)[-3]
    print(f"{attack}: {during / usual:.1f} times {1000 * usual:.1f} ms")
    assert during < TIMES * usual
