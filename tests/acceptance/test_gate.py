"""The gate in front of another API: what reaches that API, and what its clients get."""

import re
import socket
import socketserver
import subprocess
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event
from typing import ClassVar, NamedTuple

import pytest

from helpers.paths import GATE
from helpers.rawsocket import TEXT, UPGRADE, Answer, Named, frame, request_bytes
from helpers.server import (
    Server,
    eventually,
    find_program,
    random_key,
    serving,
)
from test_deploy import KEYS_HOST, logged, proxy, tls

SECOND = {  # what is a comment in these files as long as there is only one instance
    "gate.nginx.conf": {"# server 127.0.0.1:8001": "server 127.0.0.1:8001"},
    "gate.Caddyfile": {
        "# to 127.0.0.1:8001": "to 127.0.0.1:8001",
        "# lb_": "lb_",
        "# fail": "fail",
    },
}
GATES = [*SECOND]
TIERS = "free=1000/day,once=1/day"
CALLER = ("X-Auth-Key-Id", "X-Auth-User-Id", "X-Auth-Key-Type", "X-Auth-Tier")
FORWARDED = {"Host": "localhost", "X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https"}
LARGE = "x" * 60_000
PREFLIGHT = {"Origin": "https://a", "Access-Control-Request-Method": "PUT"}


class Received(NamedTuple):
    line: str
    headers: list[tuple[str, str]]
    body: bytearray

    def values(self, name: str) -> list[str]:
        """Of this header, also where it has underscores."""
        return [
            value for key, value in self.headers if key.lower().replace("_", "-") == name.lower()
        ]


class Handler(BaseHTTPRequestHandler):
    """Records every request, and answers in two parts with the status that its query names."""

    server: "Api"

    def respond(self) -> None:
        body = bytearray()
        self.server.received.append(Received(self.requestline, self.headers.items(), body))
        body += self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            for size in iter(lambda: int(self.rfile.readline(), 16), 0):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if "websocket" in self.headers.values():
            head = "101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket"
            parts = [frame(TEXT, b"hello", masked=False), b""]
        else:
            _, named, status = self.path.partition("status=")
            large = f"X-Large: {LARGE}\r\n" if named else ""
            length = "" if self.path == "/stream" else "Content-Length: 5\r\n"
            head = (
                f"{status or 200} Fine\r\nRateLimit: its own\r\nRateLimit-Policy: its own\r\n"
                "X-Accel-Redirect: /elsewhere\r\nX-Accel-Limit-Rate: 1\r\n"
                "X-Accel-Buffering: yes\r\nX-Session: its secret\r\n"
                f"{large}{length}Content-Type: text/html\r\nConnection: close"
            )
            parts = [b"", b""] if self.command == "HEAD" else [b"<", b"API>"]
        self.wfile.write(f"HTTP/1.1 {head}\r\n\r\n".encode() + parts[0])
        if self.server.goes_on.wait(5):
            self.wfile.write(parts[1])

    do_CONNECT = do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PROPFIND = (
        respond
    )


class Api(socketserver.ThreadingTCPServer):
    """An API that checks nothing."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[Received] = []
        self.goes_on = Event()
        self.goes_on.set()

    def only(self) -> Received:
        (received,) = self.received
        return received


class Gate(NamedTuple):
    port: int
    service: Server
    api: Api
    name: str
    folder: Path

    def send(self, data: bytes, name: str = "localhost") -> Answer:
        with tls(self.port, name=name) as client:
            client.send(data)
            return client.answer()


@pytest.fixture(scope="module", params=GATES)
def running_gate(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gate]:
    folder = tmp_path_factory.mktemp("gate")
    with (
        Server(folder, PROXY_HOPS="1", RATE_LIMITS=TIERS).start() as service,
        serving(Api()) as api,
        proxy(request.param, folder, service.port, api.server_address[1]) as port,
    ):
        yield Gate(port, service, api, request.param, folder)


@pytest.fixture
def gate(running_gate: Gate) -> Gate:
    running_gate.api.received.clear()
    return running_gate


@pytest.fixture
def key(gate: Gate) -> str:
    return gate.service.new_key()


Ask = Callable[..., Answer]


@pytest.fixture(params=["HTTP/1.1", "HTTP/2"])
def ask(request: pytest.FixtureRequest, gate: Gate) -> Ask:
    """Sends a request over this version of HTTP, with TLS."""

    def send(path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
        how = ["--head"] if method == "HEAD" else ["-X", method]
        for name, value in {"Expect": "", **headers}.items():
            how += ["-H", f"{name.replace('_', '-')}: {value}"]
        how += ["--data-binary", "@-"] if body else []
        command = [
            *(find_program("curl"), "-sik", "--path-as-is", f"--http{request.param[5:]}", *how),
            f"https://localhost:{gate.port}{path}",
        ]
        output = subprocess.run(command, input=body, capture_output=True, timeout=20).stdout
        head, _, rest = output.partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        assert line.startswith(request.param), f"edit deploy/{gate.name}: {request.param}: {line}"
        return Answer(int(line.split()[1]), Named(each.split(": ", 1) for each in lines), rest)

    return send


def lower(answer: Answer) -> dict[str, str]:
    """Its headers; the two proxies spell them differently."""
    return {name.lower(): value for name, value in answer.headers.items()}


def answer_headers(answer: Answer) -> dict[str, str]:
    """Those that a refusal has, but for the seconds; a proxy may leave out what says the same."""
    return {
        name: re.sub(r"(t=|^)\d+$", "", value)
        for name, value in lower(answer).items()
        if not re.match("content-length|date|server|connection|via|x-(?!gate)", name)
    }


@pytest.mark.parametrize(
    ("method", "path", "size"),
    [
        ("PROPFIND", "/a//b/../c%2F%41/./d;e=1?q=%zz&a=1;b=2&&c=%2e", 0),
        ("GET", GATE, 5),
        ("HEAD", f"{GATE}?", 0),
        ("POST", "/x?api_key=a", 0),
        ("POST", GATE, 5_000_000),
        ("DELETE", "/question", 0),
    ],
)
def test_request_with_a_key_reaches_the_api_as_it_is(
    gate: Gate, ask: Ask, key: str, method: str, path: str, size: int
) -> None:
    """Its large cookies and tokens, too; the service would not take them. So does its body."""
    kept = {
        "Cookie": LARGE[:36_000],
        "Authorization": LARGE[::5],
        "X-Auth-Token": LARGE[:9_000],
        "Range": "bytes=0-1",
        "If-None-Match": "*",
    }
    changed = {
        "X-API-Key": key,
        "X-HTTP-Method-Override": "OPTIONS",
        "X-Forwarded-For": "198.51.100.7",
        "X-Forwarded-Proto": "http",
    }
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    answer = ask(path, method, body, **kept, **changed)
    assert (answer.status, answer.body) == (200, b"" if method == "HEAD" else b"<API>")
    received = gate.api.only()
    assert received.line == f"{method} {path} HTTP/1.1"
    assert received.body == body
    expected = kept | FORWARDED | {"Host": f"localhost:{gate.port}"}
    assert {name: ", ".join(received.values(name)) for name in expected} == expected
    assert not received.values("Accept-Encoding")
    line = {
        "gate.nginx.conf": r'127.0.0.1 \[.+\] "[A-Z]+ /\S*" 200 \d+ key="{}" '
        r"gate 204 127.0.0.1:{} api 200 127.0.0.1:{}\n",
        "gate.Caddyfile": r'"user_id": "{}".*"status": 200',
    }[gate.name].format(key[8:16], gate.service.port, gate.api.server_address[1])
    eventually(
        lambda: re.search(line, logged(gate.folder)), what=f"edit deploy/{gate.name}: the log"
    )
    assert "its secret" not in logged(gate.folder), f"edit {gate.name}: no headers in the log"


@pytest.mark.parametrize("path", ["/stream", "/slow"])  # without a length, and with one
def test_response_streams(gate: Gate, key: str, path: str) -> None:
    """Its first part reaches the client, as it is, before the API sends the second one."""
    gate.api.goes_on.clear()
    with tls(gate.port) as client:
        client.send(
            request_bytes(path, {"Host": "localhost", "X-API-Key": key, "Accept-Encoding": "gzip"})
        )
        assert b"<" in iter(lambda: client.read(1), b"")
        gate.api.goes_on.set()
        assert b">" in iter(lambda: client.read(1), b"")


def test_body_streams(gate: Gate, key: str) -> None:
    """Its first part reaches the API before the client sends the second one."""
    headers = {
        "Host": "localhost",
        "X-API-Key": key,
        "Transfer-Encoding": "chunked",
        "Expect": "100-continue",
    }
    with tls(gate.port) as client:
        client.send(request_bytes("/", headers, "POST"))
        assert client.answer().status == 100
        client.send(b"5\r\nfirst\r\n")
        eventually(lambda: gate.api.received and gate.api.only().body == b"first")
        client.send(b"6\r\nsecond\r\n0\r\n\r\n")
        eventually(lambda: client.answer().status == 200)  # the API may send a 100, too
    assert gate.api.only().body == b"firstsecond"


@pytest.mark.parametrize("upgrade", ["websocket", "WebSocket"])
def test_websocket_opens_through_the_gate(gate: Gate, key: str, upgrade: str) -> None:
    with tls(gate.port) as client:
        assert client.handshake("/socket", {"X-API-Key": key, "Upgrade": upgrade}).status == 101
        assert client.frame().payload == b"hello"
    received = gate.api.only()
    assert received.line == "GET /socket HTTP/1.1"
    assert received.values("Connection")[0].lower() == "upgrade"
    assert received.values("X-Auth-Tier") == ["free"]
    assert gate.service.total(key) == 1


@pytest.mark.parametrize(
    ("method", "protocols", "passed"),
    [
        ("GET", ["h2c"], [[]]),
        ("GET", ["websocket, h2c"], [[]]),
        ("GET", ["h2c, websocket"], [[]]),
        ("OPTIONS", ["websocket"], [[]]),
        ("GET", ["h2c", "websocket"], [[], ["websocket"]]),
        ("GET", ["websocket", "h2c"], [[], ["websocket"]]),
    ],
)
def test_nothing_else_opens_through_the_gate(
    gate: Gate, key: str, method: str, protocols: list[str], passed: list[list[str]]
) -> None:
    """It could carry more requests, which nobody would check."""
    upgrades = dict(zip(("Upgrade", "upgrade"), protocols, strict=False))
    gate.send(request_bytes("/", UPGRADE | PREFLIGHT | {"X-API-Key": key} | upgrades, method))
    assert gate.api.only().values("Upgrade") in passed


def test_path_without_a_key_is_open_and_says_nothing_of_the_caller(gate: Gate, key: str) -> None:
    for path, status in {
        **dict.fromkeys(("/health", "/a/../%68ealth"), 200),
        **dict.fromkeys(("/health/", "/other"), 401),
    }.items():
        headers = {"Host": "localhost", "X-API-Key": "a"} | dict.fromkeys(CALLER, "forged")
        assert gate.send(request_bytes(path, headers)).status == status, path
    assert [
        (each.line, [name for name in ("X-API-Key", *CALLER) if each.values(name)])
        for each in gate.api.received
    ] == [("GET /health HTTP/1.1", [])] * 2, f"edit deploy/{gate.name}: the block for /health"


@pytest.mark.parametrize("host", ["localhost", KEYS_HOST])
def test_connect_is_refused(gate: Gate, key: str, host: str) -> None:
    """Over HTTP/2, its body could hide further requests; the service has an `Allow`."""
    answer = gate.send(request_bytes("/", {"Host": host, "X-API-Key": key}, "CONNECT"), host)
    assert (answer.status in (400, 405), "Allow" in answer.headers) == (True, False)
    assert not gate.api.received


SPELLINGS = [
    *("X-Auth_User-Id", "X_AUTH-USER_ID"),
    *(f"X{mark}Auth{mark}User{mark}Id" for mark in "!#$%&'*+.^`|~"),
]


# Proxies don't pass on what `Connection` names.
@pytest.mark.parametrize("more", [{}, {"Connection": f"close, {', '.join(CALLER)}"}])
def test_api_learns_from_the_service_who_calls_but_not_the_key(
    gate: Gate, key: str, more: dict[str, str]
) -> None:
    names = [name for one in CALLER for name in (one, one.lower(), one.replace("-", "_"))]
    spoofed = dict.fromkeys((*SPELLINGS, *names), "spoofed")
    keys = dict.fromkeys(("X-API-Key", "X_API_Key", "X-API_Key"), key)
    headers = {"Host": "localhost"} | spoofed | keys | more
    assert gate.send(request_bytes("/", headers)).status == 200
    (user,) = gate.service.execute("SELECT user_id FROM api_key WHERE id = ?", key[8:16])[0]
    assert [gate.api.only().values(name) for name in CALLER] == [
        [key[8:16]],
        [str(user)],
        ["production"],
        ["free"],
    ]
    assert not re.search(f"{key}|spoofed", str(gate.api.only()))


@pytest.mark.parametrize("status", [200, 401, 429, 500])
def test_response_of_the_api_is_whole_and_has_the_headers_of_the_limit(
    gate: Gate, ask: Ask, key: str, status: int
) -> None:
    """Its own headers are large, and those that are for nginx have no effect."""
    answer = ask(f"/?status={status}", X_API_Key=key)
    assert (answer.body, lower(answer)["x-large"]) == (b"<API>", LARGE)
    assert answer_headers(answer).keys() - {"content-type"} == {"ratelimit", "ratelimit-policy"}, (
        f"edit deploy/{gate.name}"
    )
    assert (answer.status, answer.headers.get("Retry-After")) == (status, None)
    assert lower(answer)["ratelimit"].startswith('"free";r=999;t=')
    assert lower(answer)["ratelimit-policy"] == '"free";q=1000;w=86400'
    assert len(gate.api.received) == gate.service.total(key) == 1


@pytest.mark.parametrize(
    ("method", "body"),
    [("GET", b""), ("HEAD", b""), ("POST", b"x" * 9), ("POST", b"x" * 3_000_000)],
)
@pytest.mark.parametrize(
    ("code", "status"), [("missing_api_key", 401), ("invalid_api_key", 401), ("rate_limited", 429)]
)
def test_refused_request_gets_the_answer_of_the_service(
    gate: Gate, ask: Ask, code: str, status: int, method: str, body: bytes
) -> None:
    over = gate.service.new_key(tier="once")
    assert gate.service.ask(GATE, X_API_Key=over).status == 204
    keys = {"missing_api_key": "", "invalid_api_key": random_key(), "rate_limited": over}
    expected = gate.service.ask(GATE, X_API_Key=keys[code])
    answer = ask("/", method, body, X_API_Key=keys[code], Prefer="return=minimal")
    assert not gate.api.received
    assert answer.status == expected.status == status
    if len(body) < 1_000_000:  # or else curl may stop to read when it stops to send
        assert answer.body == (b"" if method == "HEAD" else expected.body)
        assert lower(answer).get("connection") != "close", f"edit deploy/{gate.name}"
    assert [*dict(answer_headers(answer).items() ^ answer_headers(expected).items())] == [
        "x-gate-problem"  # which only a proxy gets
    ], f"edit deploy/{gate.name}"
    assert gate.service.total(over) == 0  # besides the one that used it up


@pytest.mark.parametrize(
    ("method", "headers", "begun"),
    [
        ("POST", {"Content-Length": "1000000"}, b"begun"),  # nobody waits for the rest
        ("POST", {"Content-Length": "1000000", "Expect": "100-continue"}, b"begun"),
        ("OPTIONS", {"Origin": "GET /"}, b""),
        ("OPTIONS", {"Access-Control-Request-Method": "GET /"}, b""),
        ("GET", {"X-API-Key": "\x7f"}, b""),  # Caddy itself refuses control characters, with a 400
    ],
)
def test_large_body_and_half_a_preflight_need_a_key(
    gate: Gate, method: str, headers: dict[str, str], begun: bytes
) -> None:
    assert gate.send(
        request_bytes("/", {"Host": "localhost"} | headers, method) + begun
    ).status in (401, 400)
    assert not gate.api.received


@pytest.mark.parametrize("names", [{}, {"Access-Control-Request-Headers": "x-api-key"}])
def test_preflight_needs_no_key_and_brings_nothing_else(
    gate: Gate, ask: Ask, key: str, names: dict[str, str]
) -> None:
    passes = PREFLIGHT | names
    others = {
        **dict.fromkeys(("Cookie", "Authorization", "X-HTTP-Method-Override", *CALLER), "x"),
        **{"X-Forwarded-For": "198.51.100.7", "X-Forwarded-Proto": "http"},
    }
    assert ask("/a?b", "OPTIONS", X_API_Key=key, **others, **passes).body == b"<API>"
    received = gate.api.only()
    assert received.line == "OPTIONS /a?b HTTP/1.1"
    brought = passes | FORWARDED | {"Host": f"localhost:{gate.port}"}
    added = {
        "Connection": "close",
        "X-Forwarded-Host": f"localhost:{gate.port}",
        "Via": ", ".join(received.values("Via")),  # of later versions of Caddy
    }
    assert brought.items() <= dict(received.headers).items() <= (brought | added).items()
    assert gate.service.total(key) == 0


@pytest.mark.parametrize(
    ("length", "body"),
    [
        ({"Content-Length": "1"}, b"x"),
        ({"Content-Length": "1000000"}, b"begun"),
        ({"Transfer-Encoding": "chunked"}, b"4\r\nbody\r\n0\r\n\r\n"),
    ],
)
def test_preflight_brings_no_body_to_the_api(
    gate: Gate, length: dict[str, str], body: bytes
) -> None:
    """Caddy can't remove it, and refuses the request; later versions do so with a 500."""
    answer = gate.send(
        request_bytes("/", {"Host": "localhost"} | PREFLIGHT | length, "OPTIONS") + body
    )
    assert (answer.status, len(gate.api.received)) in [(200, 1), (413, 0), (500, 0)]
    for received in gate.api.received:
        assert (received.line, bytes(received.body)) == ("OPTIONS / HTTP/1.1", b"")
        assert not {*received.values("Content-Length")} - {"0"}


@pytest.mark.parametrize(
    ("name", "request_lines", "refusing"),
    [
        ("localhost", f"GET https://localhost/a HTTP/1.1\r\nHost: {KEYS_HOST}", []),
        ("localhost", "GET /a HTTP/1.0", ["gate.Caddyfile"]),
        # That site may let headers pass that this one drops.
        (KEYS_HOST, "GET / HTTP/1.1\r\nHost: localhost", GATES),
        # nginx takes what follows a bracket for the host, with its colons.
        (KEYS_HOST, f"GET / HTTP/1.1\r\nHost: [a:{KEYS_HOST}:[a", GATES),
        (
            KEYS_HOST,
            "OPTIONS / HTTP/1.1\r\nHost: localhost\r\nOrigin: https://a\r\n"
            "Access-Control-Request-Method: PUT",
            GATES,
        ),
        ("LOCALHOST", "GET / HTTP/1.1\r\nHost: localhost", []),
    ],
    ids=[
        *("an absolute address", "HTTP/1.0 without Host", "another site named in TLS"),
        *("a host that repeats it", "a pre-flight to another site", "a name in capitals"),
    ],
)
def test_api_gets_its_host_or_the_request_is_misdirected(
    gate: Gate, key: str, name: str, request_lines: str, refusing: list[str]
) -> None:
    assert (
        gate.send(f"{request_lines}\r\nX-API-Key: {key}\r\n\r\n".encode(), name).status,
        [each.values("Host") for each in gate.api.received],
    ) in ([(421, []), (400, [])] if gate.name in refusing else [(200, [["localhost"]])]), (
        f"edit deploy/{gate.name}"
    )


class KeptOpen(BaseHTTPRequestHandler):
    """The service or the API: admits the key `good`, and notes what happens to connections."""

    protocol_version = "HTTP/1.1"
    events: ClassVar[list[tuple[str, object]]] = []

    def note(self, event: str) -> None:
        self.events.append((event, self.server.server_address))

    def handle(self) -> None:
        self.note("opened")
        super().handle()
        self.note("ended")

    def do_GET(self) -> None:
        self.note("asked")
        status = {"good": 204, "odd": 200, "over": 429, "late": 503, None: 201}.get(
            self.headers["X-API-Key"], 401
        )
        body = "" if status == 204 or "return=minimal" in self.headers.get("Prefer", "") else "{}"
        headers = (
            f"X-Gate-Problem: {{}}\r\nRetry-After: 7\r\nContent-Length: {len(body)}\r\n"
            if status != 204
            else ""
        )
        self.wfile.write(f"HTTP/1.1 {status} Fine\r\n{headers}\r\n{body}".encode())


@pytest.mark.parametrize("name", GATES)
def test_connections_are_used_again_and_only_a_204_passes(tmp_path: Path, name: str) -> None:
    """The proxy closes those to the API early, or a POST could be sent while the API does it.

    The first instance of the service can't be reached: the kernel answers nothing, because one
    connection waits there already. So the second one is asked, for pages, too.
    """
    KeptOpen.events.clear()
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as first,
        socket.create_connection(first.getsockname()),
        serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), KeptOpen)) as api,
        serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), KeptOpen)) as service,
        proxy(
            *(name, tmp_path, first.getsockname()[1], api.server_address[1]),
            SECOND[name] | {"127.0.0.1:8001": f"127.0.0.1:{service.server_address[1]}"},
        ) as port,
    ):
        with tls(port) as client, tls(port, name=KEYS_HOST) as pages:
            pages.send(request_bytes("/", {"Host": KEYS_HOST, "X-API-Key": "good"}))
            answers = [
                (key, client.request("/", X_API_Key=key))
                for key in ("good", "bad", "odd", "over", "late") * 10
            ]
            assert pages.answer().status == 204
        eventually(lambda: ("ended", api.server_address) in KeptOpen.events)
    seen = {(key, answer.status, answer.body.strip()) for key, answer in answers if key != "odd"}
    statuses = {"good": 201, "bad": 401, "over": 429, "late": 503}
    assert seen == {(key, status, b"{}") for key, status in statuses.items()}, (
        f"edit deploy/{name}: both instances must be asked"
    )
    assert answers[-1][1].headers["Retry-After"] == "7"
    count = KeptOpen.events.count
    assert count(("asked", api.server_address)) == 10, f"edit deploy/{name}: what passes"
    assert max(count(("opened", each.server_address)) for each in (api, service)) <= 2


@pytest.mark.parametrize("name", GATES)
def test_while_both_instances_are_frozen_nothing_passes_and_clients_wait_for_11_seconds(
    tmp_path: Path, name: str
) -> None:
    """Only the kernel takes their connections."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
        serving(Api()) as api,
        proxy(
            *(name, tmp_path, one.getsockname()[1], api.server_address[1]),
            SECOND[name] | {"127.0.0.1:8001": f"127.0.0.1:{other.getsockname()[1]}"},
        ) as port,
        tls(port) as client,
    ):
        sent = time.monotonic()
        assert client.request("/", X_API_Key="a").status in (502, 503, 504)
        assert time.monotonic() - sent < 11, (
            f"{name} also waits for the other instance: see proxy_next_upstream_timeout of nginx, "
            "lb_try_duration of Caddy"
        )
    assert not api.received
