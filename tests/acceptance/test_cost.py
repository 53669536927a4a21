"""What one request may cost beyond an ordinary one, whatever its headers, path and form contain.

It is measured on the processor, in the thread that serves all connections.
"""

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.paths import KEYS, SOCKETS, STATUS
from helpers.rawsocket import UPGRADE, RawSocket, request_bytes
from helpers.server import Server
from web.forms import FORM_TYPE

MORE_SECONDS = 0.02  # than an ordinary request
TRIES = 10  # of which the cheapest counts: now and then, the server has other things to do
HEADER, LINE, FORM = 30_000, 4000, 16_000  # nearly the greatest sizes
HEADERS = (
    *("Accept", "Accept-Encoding", "Accept-Language", "Authorization", "Cache-Control", "Cookie"),
    *("Forwarded", "If-Match", "If-Modified-Since", "If-None-Match", "If-Range", "Range", "Origin"),
    *("Referer", "Sec-Fetch-Site", "User-Agent", "X-API-Key", "X-Forwarded-For", "TE", "Upgrade"),
    *("X-Forwarded-Proto", "Connection", "Sec-WebSocket-Key", "Sec-WebSocket-Protocol"),
    *("Sec-WebSocket-Version", "Access-Control-Request-Method", "Host", "Content-Type"),
)
REPEATED = (
    *("a", ",", ";", "=", '"', "a,", "a=b; ", 'W/"a",', "0-1,", "[", "/", "\xe9", "("),
    *("demo_service=", "; demo_service=a.", "a;q=0.5,", "x*=''%41;"),
)
SHAPES = (  # the part in the middle is repeated
    *[("", part, "") for part in REPEATED],
    *[("a=", " ", '"x;'), ("a=", "\t", '"x;'), ('a="', "\\", ""), ("x", " ", "x"), (";", " ", "x")],
    *[("demo_service=.", "a", ".aaaa.b"), ("bytes=", "0-1,", ""), ("Mon, ", "9", "")],
    *[('"', "a", ""), ("multipart/form-data; boundary=", "a", "")],
)
PAGES = ("/", "/static/app.css", STATUS)
LETTERS = ("\u0344", "\u0f73", "\u0301", "\ufdfa", "\u3000", "\xe9", "\0", "<", "%26", "%ff", "@")
FORMS = {  # the fields of each
    "/log-in": {"username": "ada", "password": "wrong password"},
    "/sign-up": {"username": "a", "email": "a@b.example", "password": "long enough"},  # too short
    KEYS: {"name": "a", "type": "unknown"},
}
BY_LENGTH = {"Host": "a", "Content-Length": "16384"}
SMALL_PACKETS = {
    "header": request_bytes(STATUS, {"Host": "a", "X": "x" * 16_384}),
    "form": request_bytes("/log-out", BY_LENGTH, "POST") + b"x" * 16_384,
    "body that nobody reads": request_bytes(STATUS, BY_LENGTH, "POST") + b"x" * 16_384,
}

Request = Callable[[], bytes]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of a server behind a proxy, so that each request may come from another caller."""
    with Server(tmp_path_factory.mktemp("cost"), PROXY_HOPS="1") as server:
        yield server.start()


@pytest.fixture(scope="module")
def session(proxied: Server) -> str:
    """The cookie of somebody who is logged in."""
    return proxied.sign_up("ada").headers["Set-Cookie"].partition(";")[0]


def least(server: Server, request: Request, limit: float = 0) -> float:
    """The seconds of the cheapest of some tries, or of the first that is below the limit."""
    spent: list[float] = []
    while len(spent) < TRIES and not (spent and spent[-1] < limit):
        started = processor_seconds(server)
        answer = server.send(request())
        assert answer.status != 500, answer
        spent.append(processor_seconds(server) - started)
    return min(spent)


def processor_seconds(server: Server) -> float:
    """How long the thread that serves all connections has been on the processor."""
    return int(Path(f"/proc/{server.worker_pid}/schedstat").read_text().split()[0]) / 1e9


def assert_costs_little(server: Server, ordinary: Request, others: dict[str, Request]) -> None:
    limit = least(server, ordinary) + MORE_SECONDS
    for name, request in others.items():
        seconds = least(server, request, limit)
        assert seconds < limit, f"{name!r}: {1000 * seconds:.0f} ms, not {1000 * limit:.0f}"


def long(first: str, part: str, last: str, size: int) -> str:
    return first + part * ((size - len(first + last)) // len(part)) + last


def get(target: str, name: str = "Accept", value: str = "a") -> Request:
    """A request with this header."""
    named = UPGRADE if target in SOCKETS else {"Host": "a"}
    others = [f"{other}: {text}" for other, text in named.items() if other != name]
    lines = [f"GET {target} HTTP/1.1", *others, f"{name}: {value}"]
    return lambda: "\r\n".join([*lines, "", ""]).encode("latin-1")


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("target", [*PAGES, *SOCKETS])
def test_header(proxied: Server, target: str, name: str) -> None:
    assert_costs_little(
        proxied,
        get(target),
        {"".join(shape): get(target, name, long(*shape, HEADER)) for shape in SHAPES},
    )


@pytest.mark.parametrize("separator", ["?", "/"])
@pytest.mark.parametrize("target", [*PAGES, *SOCKETS])
def test_path_and_query(proxied: Server, target: str, separator: str) -> None:
    parts = ("a", "a/", "/", "../", "%2f", "%00", "a=b&", "&", "=", "%", "+", "next=/&", "api_key=")
    assert_costs_little(
        proxied,
        get(target),
        {part: get(target + separator + part * (LINE // len(part))) for part in parts},
    )


def post(path: str, session: str, kind: str = FORM_TYPE, **fields: str) -> Request:
    """A form that changes nothing, from a caller of its own."""

    def request() -> bytes:
        values = FORMS[path] | {"username": f"ada{random.random()}"} | fields
        body = "&".join(f"{name}={text}" for name, text in values.items()).encode()
        caller = f"10.{random.randrange(256)}.{random.randrange(256)}.{random.randrange(256)}"
        headers = {
            **{"Host": "a", "X-Forwarded-For": caller, "Cookie": session},
            # Different each time, because the `re` module keeps patterns that were made of it.
            "Content-Type": kind.format(random.random()),
            "Content-Length": str(len(body)),
        }
        return request_bytes(path, headers, "POST") + body

    return request


@pytest.mark.parametrize("path", FORMS)
def test_form(proxied: Server, session: str, path: str) -> None:
    others: dict[str, Request] = {}
    for letter in LETTERS:
        text = letter * (FORM // len(letter.encode()) - 100)
        others |= {f"{name} {letter}": post(path, session, **{name: text}) for name in FORMS[path]}
    for part in ("%&", "a=b&"):  # thousands of fields
        others[part] = post(path, session, more=part * (FORM // len(part) - 100))
    for kind in (FORM_TYPE + "; a={}", "multipart/form-data; boundary={}"):
        for part in ("a=b;", "aaaa"):
            others[kind + part] = post(path, session, kind + part * (HEADER // 4))
    assert_costs_little(proxied, post(path, session), others)


def test_chunks_of_a_form(proxied: Server) -> None:
    """Many, or with much besides their data."""
    header = request_bytes("/log-out", {"Host": "a", "Transfer-Encoding": "chunked"}, "POST")

    def form(part: bytes) -> Request:
        return lambda: header + part * (1 + 3_000_000 // len(part))

    others = {  # what it may consist of, without end
        "smallest": form(b"1\r\nx\r\n"),
        "with the longest extensions": form(b"1;x=" + b"x" * HEADER + b"\r\nx\r\n"),
        "with leading zeros": form(b"1".zfill(HEADER) + b"\r\nx\r\n"),
        "no chunks, but trailers": form(b"0\r\n" + b"X: y\r\n" * FORM),
    }
    assert_costs_little(proxied, form(b"0\r\n\r\n"), others)


@pytest.mark.parametrize("name", SMALL_PACKETS)
def test_small_packets(proxied: Server, name: str) -> None:
    """Of one byte, as fast as they are taken, until the server ends the connection."""

    def send() -> float:
        before = processor_seconds(proxied)
        with suppress(ConnectionError), RawSocket(proxied.port) as client:
            client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in SMALL_PACKETS[name]:
                client.send(bytes([byte]))
            assert client.answer().status < 500
        return processor_seconds(proxied) - before

    assert min(send() for _ in range(TRIES // 2)) < MORE_SECONDS
