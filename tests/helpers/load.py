"""Load for tests: many connections that ask one after another, and what each was answered."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from helpers.paths import TEST
from helpers.rawsocket import RawSocket

LOAD_SECONDS = 120  # after which the load ends by itself
FAILED_SECONDS = 9  # how long a failed request takes in the result of `waits`


class Reply(NamedTuple):
    key: str
    status: int  # 0: the connection ended without an answer
    remaining: int  # -1: the answer does not say
    started: float
    seconds: float


class Load(AbstractContextManager["Load"]):
    """Asks for TEST over many connections, with the keys in turn, up to a number of requests.

    A connection that is refused waits for some seconds, `rest`, before it asks again.
    """

    def __init__(
        self, port: int, *keys: str, connections: int = 16, requests: int = 10**9, rest: float = 0
    ) -> None:
        self.replies: list[Reply] = []
        self._port, self._keys, self._left, self._rest = port, keys, requests, rest
        self._end = time.monotonic() + LOAD_SECONDS
        self._threads = ThreadPoolExecutor(connections)
        self._asking = self._threads.map(self._ask_in_turn, range(connections))

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> list[Reply]:
        """Let requests under way finish; returns all replies."""
        self._left = 0
        return self.join()

    def join(self) -> list[Reply]:
        self._threads.shutdown()
        list(self._asking)  # raises what a thread has raised
        return self.replies

    def statuses(self, since: float = 0) -> set[int]:
        return {reply.status for reply in self.replies if reply.started >= since}

    def _ask_in_turn(self, turn: int) -> None:
        while self._left > 0 and time.monotonic() < self._end:
            with suppress(OSError), RawSocket(self._port) as client:
                reply = None
                while self._left > 0 and (reply is None or reply.status):
                    self._left -= 1
                    turn += 1
                    reply = ask(client, self._keys[turn % len(self._keys)])
                    self.replies.append(reply)
                    time.sleep(0 if reply.status == 200 else self._rest)


def ask(client: RawSocket, key: str) -> Reply:
    started = time.monotonic()
    status, remaining = 0, -1
    with suppress(OSError):
        answer = client.request(TEST, X_API_Key=key)
        status, remaining = answer.status, int(answer.headers.get("X-RateLimit-Remaining", -1))
    return Reply(key, status, remaining, started, time.monotonic() - started)


def accepted(replies: list[Reply]) -> list[Reply]:
    return [reply for reply in replies if reply.status == 200]


def refused(replies: list[Reply]) -> int:
    return sum(reply.status == 503 for reply in replies)


def waits(port: int, key: str, count: int) -> list[float]:
    """The seconds that so many requests of one client take, one after another, in order of size."""
    seconds: list[float] = []
    with RawSocket(port) as client:
        while len(seconds) < count and sum(seconds) < 20:  # which says enough
            reply = ask(client, key)
            seconds.append(reply.seconds if reply.status == 200 else FAILED_SECONDS)
            time.sleep(0.005)
    return sorted(seconds)
