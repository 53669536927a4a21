"""A client that says over TCP exactly what a test wants said, right or wrong."""

import contextlib
import json
import re
import socket
import time
from email.parser import Parser
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

from websockets import frames

PATIENT_SECONDS = 40  # ten, on a machine that is four times as busy as it should be
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = frames.Opcode
UPGRADE = {
    "Host": "localhost",
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "+/09AZazAAAAAAAAAAAAAA==",
}


class Named(dict[str, Any]):
    """The headers of a response, or the fields of its body."""

    def __missing__(self, name: str) -> Any:
        raise AssertionError(
            f"the response has no {name} (headers: see API_HEADERS, or write_error in "
            f"server/gunicorn_patches.py), only {dict(self)}"
        )


class Answer(NamedTuple):
    status: int
    headers: Named
    body: bytes

    def json(self) -> Any:
        assert self.body[:1] in (b"{", b"["), (
            f"not JSON: {self}; if the body is missing, was the Problem made only once? A request "
            "may change it, so make it where it is raised"
        )
        return json.loads(self.body, object_hook=Named)


class Frame(NamedTuple):
    opcode: int
    payload: bytes

    def json(self) -> Any:
        assert self.opcode == TEXT, f"a text was expected, and not {self}; 8 closes, with a reason"
        return json.loads(self.payload)


def frame(opcode: int, payload: bytes = b"", fin: bool = True, masked: bool = True) -> bytes:
    """The bytes of a WebSocket frame, allowed or not."""
    return frames.Frame(frames.Opcode(opcode), payload, fin).serialize(mask=masked)


def closing(code: int | None, reason: str = "") -> Frame:
    """The frame with which one side closes; with nothing in it if there is no code."""
    return Frame(CLOSE, b"" if code is None else frames.Close(code, reason).serialize())


class RawSocket(contextlib.AbstractContextManager["RawSocket"]):
    """One connection to the server, a new one or `sock`; its reads fail after PATIENT_SECONDS."""

    def __init__(
        self, port: int = 0, receive_buffer: int = 0, sock: socket.socket | None = None
    ) -> None:
        self.sock = sock or socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(PATIENT_SECONDS)
        self._buffer = b""
        if port and (error := self.sock.connect_ex(("127.0.0.1", port))):
            self.sock.close()
            raise OSError(error, f"no connection to port {port}")

    def __exit__(self, *error: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise type(error)(
                f"{error}: the server does not take {data[:100]!r} of {len(data)} bytes: has it "
                "closed the connection, or does something block the loop?"
            ) from None

    def request(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Ask over this connection; a header name's dashes are written as underscores."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.send(request_bytes(path, {"Host": "localhost"} | named, method))
        return self.answer(has_body=method != "HEAD")

    def answer(self, has_body: bool = True) -> Answer:
        while b"\r\n\r\n" not in self._buffer:
            self._more()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        line, _, rest = head.decode("latin-1").partition("\r\n")
        parsed = Parser().parsestr(rest)
        del parsed["Server"]  # Caddy adds its own
        headers = Named(parsed.items())
        assert len(headers) == len(parsed), f"a header comes twice: {head!r}"
        date = parsedate_to_datetime(headers["Date"]).timestamp() if "Date" in headers else None
        assert date is None or abs(date - time.time()) < 60, f"Date is not now: {head!r}"
        size = int(headers.get("Content-Length", 0)) if has_body else 0
        status = re.match(r"HTTP/1\.[01] (\d{3}) ", line)
        assert status, f"no response: {head!r}"
        return Answer(int(status[1]), headers, self.read(size))

    def open(self, path: str) -> "RawSocket":
        """Upgrade to a WebSocket; fails unless the server agrees."""
        answer = self.handshake(path)
        assert answer.status == 101, f"the WebSocket {path.partition('?')[0]} is refused: {answer}"
        return self

    def handshake(self, path: str, changes: dict[str, str | None] | None = None) -> Answer:
        self.send(handshake_bytes(path, changes))
        return self.answer()

    def frame(self) -> Frame:
        """The next frame from the server, which must be a legal one."""
        first, second = self.read(2)
        assert first & 0x70 == 0, "a reserved bit is set"
        assert second < 128, "a server masks nothing"
        size = second
        if size > 125:
            size = int.from_bytes(self.read(2 if size == 126 else 8), "big")
        return Frame(first & 0x0F, self.read(size))

    def close_code(self) -> int:
        """With which the server closes, after whatever else it still says."""
        while (found := self.frame()).opcode != CLOSE:
            pass
        return int.from_bytes(found.payload[:2], "big")

    def read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._more()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def ended(self) -> bool:
        """Whether the server closes the connection, in good order, saying nothing more."""
        return not self._buffer and self._receive() == b""

    def rest(self) -> int:
        """How many bytes still come before the server ends the connection, in whatever way."""
        size = 0
        with contextlib.suppress(ConnectionError):
            while data := self.sock.recv(1 << 20):
                size += len(data)
        return size

    def fill(self, data: bytes, seconds: float = 0.0, limit: int = 1 << 30) -> int:
        """Send these bytes again and again until the server takes no more for some time.

        Returns how many of them were sent; a message may be cut off.
        """
        sent = 0
        self.sock.settimeout(seconds)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            while sent < limit:
                sent += self.sock.send(data[sent % len(data) :])
        self.sock.settimeout(PATIENT_SECONDS)
        return sent

    def _receive(self) -> bytes:
        try:
            return self.sock.recv(1 << 20)
        except TimeoutError:
            raise TimeoutError(
                "the server neither sends something nor ends the connection: does something block "
                "the loop, has a Ticker ended, does WebSocket.close start no timer, or does "
                "half_close not end its side?"
            ) from None

    def _more(self) -> None:
        data = self._receive()
        if not data:
            raise ConnectionError(
                f"the server ended the connection after {self._buffer!r}, though more has to come: "
                "its log says whether it had a bug; or was the client taken for one that is idle?"
            )
        self._buffer += data


def handshake_bytes(path: str, changes: dict[str, str | None] | None = None) -> bytes:
    """A request for an upgrade; `changes` replace headers, None takes one away."""
    return request_bytes(
        path,
        {name: text for name, text in {**UPGRADE, **(changes or {})}.items() if text is not None},
    )


def request_bytes(
    path: str, headers: dict[str, str], method: str = "GET", version: str = "HTTP/1.1"
) -> bytes:
    lines = [f"{method} {path} {version}", *(f"{name}: {text}" for name, text in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def form_bytes(path: str, **fields: str) -> bytes:
    body = urlencode(fields).encode()
    headers = {
        "Host": "a",
        "Content-Type": "application/x-www-form-urlencoded",
        "Content-Length": str(len(body)),
    }
    return request_bytes(path, headers, "POST") + body
