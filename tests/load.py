"""Load for tests: many connections that ask one after another, and what each was answered."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from email.parser import Parser
from typing import NamedTuple

TEST = "/api/v1/protected/test"
ANSWER_SECONDS = 20  # after which a request counts as not answered
LOAD_SECONDS = 120  # after which the load ends by itself


class Reply(NamedTuple):
    key: str
    status: int  # 0: the connection ended without an answer
    remaining: int  # -1: the answer does not say
    reset: int
    started: float
    seconds: float


class Load:
    """Asks for TEST over many connections in a thread, with the keys in turn, up to a number.

    A connection that is refused waits for some seconds, `rest`, before it asks again.
    """

    def __init__(
        self, port: int, *keys: str, connections: int = 16, requests: int = 10**9, rest: float = 0
    ) -> None:
        self.replies: list[Reply] = []
        self._port, self._keys, self._connections = port, keys, connections
        self._left, self._rest = requests, rest
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> list[Reply]:
        """Let requests under way finish; returns all replies."""
        self._left = 0
        return self.join()

    def join(self) -> list[Reply]:
        self._thread.join()
        return self.replies

    def statuses(self, since: float = 0) -> set[int]:
        return {reply.status for reply in self.replies if reply.started >= since}

    async def _run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self._connections)))

    async def _client(self, turn: int) -> None:
        end = time.monotonic() + LOAD_SECONDS
        while self._left > 0 and time.monotonic() < end:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                with contextlib.closing(writer):
                    while self._left > 0:
                        self._left -= 1
                        turn += 1
                        reply = await ask(reader, writer, self._keys[turn % len(self._keys)])
                        self.replies.append(reply)
                        if not reply.status:
                            break
                        if reply.status != 200:
                            await asyncio.sleep(self._rest)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> Reply:
    """One request on a connection that is kept open."""
    started = time.monotonic()
    status, remaining, reset = 0, -1, 0
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
        writer.write(f"GET {TEST} HTTP/1.1\r\nHost: a\r\nX-API-Key: {key}\r\n\r\n".encode())
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), ANSWER_SECONDS)).decode()
        headers = Parser().parsestr(head.partition("\r\n")[2], headersonly=True)
        await reader.readexactly(int(headers["Content-Length"]))
        status = int(head.split(" ", 2)[1])
        remaining = int(headers.get("X-RateLimit-Remaining", -1))
        reset = int(headers.get("X-RateLimit-Reset", 0))
    return Reply(key, status, remaining, reset, started, time.monotonic() - started)


def accepted(replies: list[Reply], key: str | None = None) -> Iterator[Reply]:
    return (reply for reply in replies if reply.status == 200 and key in (None, reply.key))
