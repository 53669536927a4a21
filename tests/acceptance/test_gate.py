"""The gate in front of another API: what reaches that API, and what its clients get."""

import contextlib
import socketserver
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event
from typing import NamedTuple

import pytest

from helpers.paths import TEST
from helpers.rawsocket import TEXT, UPGRADE, Answer, frame, request_bytes
from helpers.server import Server, eventually, random_key, serving
from test_deploy import logged, proxy, tls

GATES = ["gate.nginx.conf", "gate.Caddyfile"]
TIERS = "free=1000/day,once=1/day"
CALLER = ("X-Auth-Key-Id", "X-Auth-User-Id", "X-Auth-Key-Type", "X-Auth-Tier")
FORWARDED = {"Host": "localhost", "X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https"}
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
            limit = "RateLimit: its own\r\nRateLimit-Policy: its own"
            head = self.path.partition("status=")[2][:3] or "200"
            length = "" if self.path == "/stream" else "\r\nContent-Length: 5"
            head = f"{head} Fine\r\n{limit}\r\nConnection: close{length}"
            parts = [b"", b""] if self.command == "HEAD" else [b"<", b"API>"]
        self.wfile.write(f"HTTP/1.1 {head}\r\n\r\n".encode() + parts[0])
        self.server.goes_on.wait(10)
        self.wfile.write(parts[1])

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PROPFIND = respond


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

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        with tls(self.port) as client:
            return client.request(path, method, **headers)

    def send(self, data: bytes) -> Answer:
        with tls(self.port) as client:
            client.send(data)
            return client.answer()


@pytest.fixture(scope="module", params=GATES)
def running_gate(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gate]:
    folder = tmp_path_factory.mktemp("gate")
    service = Server(folder, PROXY_HOPS="1", RATE_LIMITS=TIERS)
    with (
        contextlib.closing(service.start()),
        serving(Api()) as api,
        proxy(request.param, folder, service.port, api.server_address[1]) as port,
    ):
        yield Gate(port, service, api)


@pytest.fixture
def gate(running_gate: Gate) -> Gate:
    running_gate.api.received.clear()
    return running_gate


@pytest.fixture
def key(gate: Gate) -> str:
    return gate.service.new_key()


def identity(received: Received) -> list[list[str]]:
    return [received.values(name) for name in CALLER]


def lower(answer: Answer) -> dict[str, str]:
    """Its headers; the two proxies spell them differently."""
    return {name.lower(): value for name, value in answer.headers.items()}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PROPFIND", "/a//b/../c%2F%41/./d;e=1?q=%zz&a=1;b=2&&c=%2e#?"),
        ("GET", TEST),
        ("HEAD", f"{TEST}?"),
        ("POST", "/x?api_key=a"),
        ("DELETE", "/_gate"),
    ],
)
def test_request_with_a_key_reaches_the_api_as_it_is(
    gate: Gate, key: str, method: str, path: str
) -> None:
    kept = {"Cookie": "a=b", "Range": "bytes=0-1", "If-None-Match": "*"}
    sent = kept | {"X-API-Key": key, "X-HTTP-Method-Override": "OPTIONS"}
    spoofed = {"X-Forwarded-For": "198.51.100.7", "X-Forwarded-Proto": "http"}
    headers = {name.replace("-", "_"): value for name, value in (sent | spoofed).items()}
    answer = gate.ask(path, method, **headers)
    assert (answer.status, answer.body) == (200, b"" if method == "HEAD" else b"<API>")
    received = gate.api.only()
    assert received.line == f"{method} {path} HTTP/1.1"
    for name, value in (kept | FORWARDED).items():
        assert received.values(name) == [value]


@pytest.mark.parametrize(("method", "size"), [("GET", 5), ("POST", 0), ("POST", 5_000_000)])
def test_body_of_any_size_reaches_the_api(gate: Gate, key: str, method: str, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    headers = {"Host": "localhost", "X-API-Key": key, "Content-Length": str(size)}
    gate.send(request_bytes("/upload", headers, method) + body)
    assert gate.api.only().body == body


def test_response_streams(gate: Gate, key: str) -> None:
    """Its first part reaches the client before the API sends the second one."""
    gate.api.goes_on.clear()
    with tls(gate.port) as client:
        client.send(request_bytes("/stream", {"Host": "localhost", "X-API-Key": key}))
        while client.read(1) != b"<":
            pass
        gate.api.goes_on.set()
        while client.read(1) != b">":
            pass


def test_body_streams(gate: Gate, key: str) -> None:
    """Its first part reaches the API before the client sends the second one."""
    headers = {"Host": "localhost", "X-API-Key": key, "Transfer-Encoding": "chunked"}
    with tls(gate.port) as client:
        client.send(request_bytes("/", headers | {"Expect": "100-continue"}, "POST"))
        assert client.answer().status == 100
        client.send(b"5\r\nfirst\r\n")
        eventually(lambda: gate.api.received and gate.api.only().body == b"first")
        client.send(b"6\r\nsecond\r\n0\r\n\r\n")
        eventually(lambda: client.answer().status == 200)  # the API may send a 100, too
    assert gate.api.only().body == b"firstsecond"


def test_websocket_opens_through_the_gate(gate: Gate, key: str) -> None:
    with tls(gate.port) as client:
        assert client.handshake("/socket", {"X-API-Key": key}).status == 101
        assert client.frame().payload == b"hello"
    received = gate.api.only()
    assert received.line == "GET /socket HTTP/1.1"
    assert received.values("Connection")[0].lower() == "upgrade"
    assert received.values("X-Auth-Tier") == ["free"]
    assert gate.service.total(key) == 1


@pytest.mark.parametrize(
    ("method", "protocol"), [("GET", "h2c"), ("GET", "websocket, h2c"), ("OPTIONS", "websocket")]
)
def test_nothing_else_opens_through_the_gate(
    gate: Gate, key: str, method: str, protocol: str
) -> None:
    """It could carry more requests, which nobody would check."""
    headers = UPGRADE | PREFLIGHT | {"X-API-Key": key, "Upgrade": protocol}
    assert gate.send(request_bytes("/", headers, method)).status == 200
    assert not gate.api.only().values("Upgrade")


SPELLINGS = ("X-Auth_User-Id", "X_AUTH-USER_ID")


def with_spoofed_headers(method: str, path: str, key: str, more: str = "") -> bytes:
    names = [name for one in CALLER for name in (one, one.lower(), one.replace("-", "_"))]
    spoofed = "".join(f"{name}: spoofed\r\n" for name in (*names, *SPELLINGS))
    keys = f"X-API-Key: {key}\r\nX_API_Key: {key}\r\nX-API_Key: {key}\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{spoofed}{keys}{more}\r\n".encode()


DROP = f"Connection: close, {', '.join(CALLER)}\r\n"  # proxies don't pass on what this names
ASKS = "".join(f"{name}: {value}\r\n" for name, value in PREFLIGHT.items())


@pytest.mark.parametrize("more", ["", DROP])
def test_api_learns_from_the_service_who_calls_but_not_the_key(
    gate: Gate, key: str, more: str
) -> None:
    assert gate.send(with_spoofed_headers("GET", "/", key, more)).status == 200
    (user,) = gate.service.execute("SELECT user_id FROM api_key WHERE id = ?", key[8:16])[0]
    assert identity(gate.api.only()) == [[key[8:16]], [str(user)], ["production"], ["free"]]
    assert key not in str(gate.api.only())


@pytest.mark.parametrize("status", [200, 401, 429, 500])
def test_response_of_the_api_has_the_headers_of_the_limit(
    gate: Gate, key: str, status: int
) -> None:
    answer = gate.ask(f"/?status={status}", X_API_Key=key)
    assert (answer.status, answer.headers.get("Retry-After")) == (status, None)
    assert lower(answer)["ratelimit"].startswith('"free";r=999;t=')
    assert lower(answer)["ratelimit-policy"] == '"free";q=1000;w=86400'
    assert len(gate.api.received) == gate.service.total(key) == 1


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize(
    ("code", "status"), [("missing_api_key", 401), ("invalid_api_key", 401), ("rate_limited", 429)]
)
def test_refused_request_gets_the_answer_of_the_service(
    gate: Gate, code: str, status: int, method: str
) -> None:
    over = gate.service.new_key(tier="once")
    assert gate.service.ask(TEST, X_API_Key=over).status == 200
    keys = {"missing_api_key": "", "invalid_api_key": random_key(), "rate_limited": over}
    expected = gate.service.ask(TEST, X_API_Key=keys[code])
    answer = gate.ask("/", method, X_API_Key=keys[code])
    assert not gate.api.received
    assert answer.status == expected.status == status
    assert answer.body == (b"" if method == "HEAD" else expected.body)
    for name in ("content-type", "www-authenticate", "access-control-allow-origin"):
        assert lower(answer).get(name) == lower(expected).get(name)
    assert ("retry-after" in lower(answer)) == (code == "rate_limited")
    assert gate.service.total(over) == 0  # besides the one that used it up


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", {"Content-Length": "1000000"}),  # nobody waits for it
        ("POST", {"Content-Length": "1000000", "Expect": "100-continue"}),
        ("OPTIONS", {"Origin": "GET /"}),
        ("OPTIONS", {"Access-Control-Request-Method": "GET /"}),
    ],
)
def test_large_body_and_half_a_preflight_need_a_key(
    gate: Gate, method: str, headers: dict[str, str]
) -> None:
    begun = b"begun" if "Content-Length" in headers else b""
    request = request_bytes("/", {"Host": "localhost"} | headers, method)
    assert gate.send(request + begun).status == 401
    assert not gate.api.received


def test_preflight_needs_no_key(gate: Gate, key: str) -> None:
    assert gate.send(with_spoofed_headers("OPTIONS", "/", key, ASKS)).body == b"<API>"
    received = gate.api.only()
    assert received.line == "OPTIONS / HTTP/1.1"
    for name, value in (PREFLIGHT | FORWARDED).items():
        assert received.values(name) == [value]
    assert identity(received) == [[], [], [], []]
    assert key not in str(received)
    assert gate.service.total(key) == 0


@pytest.mark.parametrize(
    ("length", "body"),
    [
        ("Content-Length: 1", "x"),
        ("Content-Length: 1000000", "begun"),
        ("Transfer-Encoding: chunked", "4\r\nbody\r\n0\r\n\r\n"),
    ],
)
def test_preflight_brings_no_body_to_the_api(gate: Gate, length: str, body: str) -> None:
    """Caddy can't remove it, and refuses the request."""
    head = f"OPTIONS / HTTP/1.1\r\nHost: localhost\r\n{ASKS}{length}\r\n\r\n"
    answer = gate.send(f"{head}{body}".encode())
    assert (answer.status, len(gate.api.received)) in [(200, 1), (413, 0)]
    for received in gate.api.received:
        assert (received.line, bytes(received.body)) == ("OPTIONS / HTTP/1.1", b"")
        assert not {*received.values("Content-Length")} - {"0"}


@pytest.mark.parametrize("name", ["key", "refused", "later", "preflight"])
def test_paths_of_nginx_lead_neither_to_the_service_nor_past_the_gate(
    gate: Gate, key: str, name: str
) -> None:
    with tls(gate.port, "127.0.0.2") as client:
        assert client.request(f"/_gate/{name}").status in (401, 403, 404)
        assert not gate.api.received
        answer = client.request(f"/_gate/{name}", X_API_Key=key)
        assert answer.body == b"<API>" or answer.status in (403, 404)


class LastSecond(socketserver.StreamRequestHandler):
    """Stands in for the service: refuses a request, and accepts the next one."""

    more = "Connection: close\r\nContent-Length: 2\r\n\r\n{}"
    answers = iter([f"429 No\r\nRetry-After: 1\r\n{more}", f"204 OK\r\n{more}"])

    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        self.wfile.write(f"HTTP/1.1 {next(self.answers)}".encode())


def test_nginx_gives_no_204_of_the_service_to_a_client_that_it_refused(tmp_path: Path) -> None:
    """The window turns between its two questions."""
    with (
        serving(Api()) as api,
        serving(socketserver.TCPServer(("127.0.0.1", 0), LastSecond)) as service,
    ):
        ports = service.server_address[1], api.server_address[1]
        with proxy("gate.nginx.conf", tmp_path, *ports) as port, tls(port) as client:
            answer = client.request("/", X_API_Key="some key")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert not api.received


@pytest.mark.parametrize("name", GATES)
def test_while_the_service_is_away_nothing_passes_and_no_key_is_logged(
    tmp_path: Path, name: str
) -> None:
    """A pre-flight fails when the API is away, too."""
    service, api, key = Server(tmp_path), Api(), random_key()
    with proxy(name, tmp_path, service.port, api.server_address[1]) as port:
        gate, more = Gate(port, service, api), f"Referer: {key}\r\n{ASKS}"
        with serving(api):
            request = with_spoofed_headers("GET", f"/first?api_key={key}", key, more)
            assert gate.send(request).status in (502, 503)
        request = with_spoofed_headers("OPTIONS", f"/second?api_key={key}", key, more)
        assert gate.send(request).status in (502, 503)
        eventually(lambda: all(path in logged(tmp_path) for path in ("/first", "/second")))
    assert not api.received
    assert key not in logged(tmp_path)
