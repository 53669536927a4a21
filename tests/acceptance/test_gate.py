"""The gate in front of another API: what reaches that API, and what its clients get."""

import contextlib
import socketserver
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar

import pytest

from helpers.paths import TEST, TIME
from helpers.rawsocket import (
    TEXT,
    UPGRADE,
    Answer,
    form_bytes,
    frame,
    handshake_bytes,
    request_bytes,
)
from helpers.server import Server, eventually, free_port, random_key
from test_deploy import UPSTREAM, caddy, nginx, running, tls

API = "127.0.0.1:9000"  # where both proxies expect it
TIERS = "free=1000/day,once=1/day"
CALLER = ("X-Auth-Key-Id", "X-Auth-User-Id", "X-Auth-Key-Type", "X-Auth-Tier")


TcpServer = TypeVar("TcpServer", bound=socketserver.TCPServer)


FORWARDED = {"Host": "localhost", "X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https"}


class Received(NamedTuple):
    line: str
    headers: list[tuple[str, str]]
    body: bytes

    def values(self, name: str) -> list[str]:
        """Of this header, also where it has underscores."""
        return [
            value for key, value in self.headers if key.lower().replace("_", "-") == name.lower()
        ]


class Handler(BaseHTTPRequestHandler):
    """Records every request, and answers with the status that its query names."""

    protocol_version = "HTTP/1.1"
    server: "Api"

    def handle_one_request(self) -> None:
        self.close_connection = True
        self.raw_requestline = self.rfile.readline()
        if self.raw_requestline and self.parse_request():
            self.respond()

    def respond(self) -> None:
        self.server.begun.append(self.requestline)
        body = b"".join(self.parts())
        self.server.received.append(Received(self.requestline, self.headers.items(), body))
        if "websocket" in self.headers.values():
            self.open_websocket()
        elif self.path == "/stream":
            self.stream()
        else:
            self.answer(self.requestline.partition("status=")[2][:3] or "200")

    def open_websocket(self) -> None:
        assert self.headers["Connection"].lower() == "upgrade"
        self.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\n")
        self.wfile.write(b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        self.wfile.write(frame(TEXT, b"hello", masked=False))
        self.rfile.readline()

    def stream(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 Fine\r\nConnection: close\r\n\r\n\1")
        self.server.goes_on.wait(10)
        self.wfile.write(b"\2")

    def answer(self, status: str) -> None:
        own = "RateLimit: its own\r\nRateLimit-Policy: its own\r\n"
        self.wfile.write(f"HTTP/1.1 {status} Fine\r\n{own}Content-Length: 3\r\n".encode())
        self.wfile.write(b"Connection: close\r\n\r\n")
        self.wfile.write(b"API" if self.command != "HEAD" else b"")

    def parts(self) -> Iterator[bytes]:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                yield self.part(size)
                self.rfile.readline()
            self.rfile.readline()
        left = int(self.headers.get("Content-Length", 0))
        while left:
            yield self.part(min(left, 1 << 16))
            left -= min(left, 1 << 16)

    def part(self, size: int) -> bytes:
        data = self.rfile.read(size)
        self.server.bytes_read += len(data)
        return data


class Api(socketserver.ThreadingTCPServer):
    """An API that checks nothing."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", free_port()), Handler)
        self.begun: list[str] = []
        self.received: list[Received] = []
        self.bytes_read = 0
        self.goes_on = Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A proxy may end a connection at any time."""

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


def files(proxy: Any, folder: Path, service: int, api: int) -> tuple[list[str], int]:
    """The command that starts the proxy with its file in deploy/, and its port."""
    folder.mkdir()
    port = free_port()
    ours = {UPSTREAM: f"127.0.0.1:{service}", API: f"127.0.0.1:{api}"}
    if proxy is nginx:
        ours["keys.example.com"] = "keys.localhost"
        return nginx(folder, port, ours, "gate.nginx.conf"), port
    ours["keys.example.com"] = f"https://keys.localhost:{port}"
    return caddy(folder, port, ours, "gate.Caddyfile"), port


@contextlib.contextmanager
def serving(server: TcpServer) -> Iterator[TcpServer]:
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module", params=[nginx, caddy])
def running_gate(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    tmp_path = tmp_path_factory.mktemp("gate")
    service = Server(tmp_path, PROXY_HOPS="1", RATE_LIMITS=TIERS)
    with contextlib.closing(service), serving(Api()) as api:
        command, port = files(
            request.param, tmp_path / "proxy", service.port, api.server_address[1]
        )
        service.new_key()
        service.start()
        with running(command, tmp_path / "proxy", port):
            yield Gate(port, service, api)


@pytest.fixture
def gate(running_gate: Gate) -> Gate:
    running_gate.api.received.clear()
    running_gate.api.begun.clear()
    return running_gate


@pytest.fixture
def key(gate: Gate) -> str:
    return gate.service.new_key()


def identity(received: Received) -> list[list[str]]:
    return [received.values(name) for name in CALLER]


def test_request_with_a_key_reaches_the_api_whole(gate: Gate, key: str) -> None:
    path = "/a//b/../c%2F%41/./d;e=1?q=%zz&a=1;b=2&&c=%2e#?"
    gate.ask(
        path,
        "PROPFIND",
        X_API_Key=key,
        Cookie="a=b",
        Range="bytes=0-1",
        If_None_Match="*",
        X_Forwarded_For="198.51.100.7",
        X_Forwarded_Proto="http",
    )
    received = gate.api.only()
    assert received.line == f"PROPFIND {path} HTTP/1.1"
    sent = {"Cookie": "a=b", "Range": "bytes=0-1", "If-None-Match": "*"} | FORWARDED
    assert {name: received.values(name) for name in sent} == {k: [v] for k, v in sent.items()}


@pytest.mark.parametrize("path", [TEST, f"{TEST}?", "/", "/_gate", "/x?api_key=a"])
def test_no_path_is_special(gate: Gate, key: str, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "DELETE"):
        with tls(gate.port) as client:
            headers = {"Host": "localhost", "X-API-Key": key, "X-HTTP-Method-Override": "OPTIONS"}
            client.send(request_bytes(path, headers, method))
            answer = client.answer(has_body=method != "HEAD")
            assert (answer.status, answer.body) == (200, b"" if method == "HEAD" else b"API")
    assert [received.line for received in gate.api.received] == [
        f"{method} {path} HTTP/1.1" for method in ("GET", "HEAD", "POST", "DELETE")
    ]


@pytest.mark.parametrize("size", [0, 5, 20_000, 5_000_000])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_body_of_any_size_reaches_the_api(gate: Gate, key: str, method: str, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    headers = {"Host": "localhost", "X-API-Key": key, "Content-Length": str(size)}
    gate.send(request_bytes("/upload", headers, method) + body)
    assert gate.api.only().body == body


def test_response_streams(gate: Gate, key: str) -> None:
    """Its first part reaches the client before the API sends the second one."""
    with tls(gate.port) as client:
        client.send(request_bytes("/stream", {"Host": "localhost", "X-API-Key": key}))
        while client.read(1) != b"\1":
            pass
        gate.api.goes_on.set()
        while client.read(1) != b"\2":
            pass


def test_body_streams(gate: Gate, key: str) -> None:
    """Its first part reaches the API before the client sends the second one."""
    headers = {"Host": "localhost", "X-API-Key": key, "Transfer-Encoding": "chunked"}
    gate.api.bytes_read = 0
    with tls(gate.port) as client:
        client.send(request_bytes("/", headers, "POST") + b"5\r\nfirst\r\n")
        eventually(lambda: gate.api.bytes_read == 5)
        client.send(b"6\r\nsecond\r\n0\r\n\r\n")
        assert client.answer().status == 200
    assert gate.api.only().body == b"firstsecond"


def test_client_that_waits_for_100_sends_its_body(gate: Gate, key: str) -> None:
    headers = {
        "Host": "localhost",
        "X-API-Key": key,
        "Content-Length": "4",
        "Expect": "100-continue",
    }
    with tls(gate.port) as client:
        client.send(request_bytes("/", headers, "PUT"))
        assert client.answer().status == 100
        client.send(b"body")
        eventually(lambda: client.answer().status == 200)  # the API may send a 100, too
    assert gate.api.only().body == b"body"


def test_websocket_opens_through_the_gate(gate: Gate, key: str) -> None:
    with tls(gate.port) as client:
        assert client.handshake("/socket", {"X-API-Key": key}).status == 101
        assert client.frame().payload == b"hello"
    received = gate.api.only()
    assert received.line == "GET /socket HTTP/1.1"
    assert received.values("X-Auth-Tier") == ["free"]
    assert gate.service.total(key) == 1


@pytest.mark.parametrize("protocol", ["h2c", "websocket, h2c", "TLS/1.0"])
def test_no_other_protocol_opens_through_the_gate(gate: Gate, key: str, protocol: str) -> None:
    """It could carry more requests, which nobody would check."""
    gate.send(handshake_bytes("/", {"X-API-Key": key, "Upgrade": protocol}))
    assert not gate.api.only().values("Upgrade")


SPELLINGS = (
    "X-Auth-User-Id",
    "x-auth-user-id",
    "X_Auth_User_Id",
    "X-Auth_User-Id",
    "X_AUTH-USER_ID",
)


def with_spoofed_headers(method: str, key: str, more: str = "") -> bytes:
    names = [name for one in CALLER for name in (one, one.lower(), one.replace("-", "_"))]
    spoofed = "".join(f"{name}: spoofed\r\n" for name in (*names, *SPELLINGS))
    keys = f"X-API-Key: {key}\r\nX_API_Key: {key}\r\nX-API_Key: {key}\r\n"
    return f"{method} / HTTP/1.1\r\nHost: localhost\r\n{spoofed}{keys}{more}\r\n".encode()


DROP = f"Connection: close, {', '.join(CALLER)}\r\n"  # proxies don't pass on what this names


@pytest.mark.parametrize("more", ["", DROP])
def test_api_learns_from_the_service_who_calls(gate: Gate, key: str, more: str) -> None:
    assert gate.send(with_spoofed_headers("GET", key, more)).status == 200
    (user,) = gate.service.execute("SELECT user_id FROM api_key WHERE id = ?", key[8:16])[0]
    assert identity(gate.api.only()) == [[key[8:16]], [str(user)], ["production"], ["free"]]


def test_key_does_not_reach_the_api(gate: Gate, key: str) -> None:
    gate.send(with_spoofed_headers("GET", key))
    assert key not in str(gate.api.only())


@pytest.mark.parametrize("status", [200, 301, 401, 404, 429, 500, 503])
def test_response_of_the_api_has_the_headers_of_the_limit(
    gate: Gate, key: str, status: int
) -> None:
    answer = gate.ask(f"/?status={status}", X_API_Key=key)
    assert (answer.status, answer.headers.get("Retry-After")) == (status, None)
    headers = {name.lower(): value for name, value in answer.headers.items()}
    assert headers["ratelimit"].startswith('"free";r=999;t=')
    assert headers["ratelimit-policy"] == '"free";q=1000;w=86400'
    assert len(gate.api.received) == gate.service.total(key) == 1


def used_up(gate: Gate) -> str:
    key = gate.service.new_key(tier="once")
    assert gate.service.ask(TEST, X_API_Key=key).status == 200
    return key


REFUSED = {"missing_api_key": 401, "invalid_api_key": 401, "rate_limited": 429}


@pytest.mark.parametrize("code", REFUSED)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "TRACE"])
def test_refused_request_gets_the_answer_of_the_service(gate: Gate, code: str, method: str) -> None:
    keys = {"missing_api_key": "", "invalid_api_key": random_key(), "rate_limited": used_up(gate)}
    headers = {"Host": "localhost", "X-API-Key": keys[code]}
    expected = gate.service.ask(TEST, X_API_Key=keys[code])
    with tls(gate.port) as client:
        client.send(request_bytes("/", headers, method))
        answer = client.answer(has_body=method != "HEAD")
    assert not gate.api.begun
    if method == "TRACE" and answer.status == 405:
        return  # nginx refuses these itself
    assert answer.status == expected.status == REFUSED[code]
    assert answer.body == (expected.body if method != "HEAD" else b"")
    given = {name.lower(): value for name, value in answer.headers.items()}
    for name in ("Content-Type", "WWW-Authenticate", "Access-Control-Allow-Origin"):
        assert given.get(name.lower()) == expected.headers.get(name)
    assert (
        ("Retry-After" in expected.headers) == ("retry-after" in given) == (code == "rate_limited")
    )


@pytest.mark.parametrize("expect", [{}, {"Expect": "100-continue"}])
def test_refusal_does_not_wait_for_a_large_body(gate: Gate, expect: dict[str, str]) -> None:
    headers = {"Host": "localhost", "Content-Length": "1000000", **expect}
    assert gate.send(request_bytes("/", headers, "POST") + b"begun").status == 401
    assert not gate.api.begun


def test_preflight_needs_no_key(gate: Gate, key: str) -> None:
    asks = "Origin: https://a\r\nAccess-Control-Request-Method: PUT\r\n"
    assert gate.send(with_spoofed_headers("OPTIONS", key, asks)).body == b"API"
    received = gate.api.only()
    assert received.line == "OPTIONS / HTTP/1.1"
    assert received.values("Access-Control-Request-Method") == ["PUT"]
    assert {name: received.values(name) for name in FORWARDED} == {
        name: [value] for name, value in FORWARDED.items()
    }
    assert identity(received) == [[], [], [], []]
    assert key not in str(received)
    assert gate.service.total(key) == 0


def test_preflight_opens_no_websocket(gate: Gate) -> None:
    asks = {"Origin": "https://a", "Access-Control-Request-Method": "GET"}
    assert gate.send(request_bytes("/", UPGRADE | asks, "OPTIONS")).status == 200
    assert not gate.api.only().values("Upgrade")


@pytest.mark.parametrize(
    ("length", "body"),
    [
        ("Content-Length: 1", "x"),
        ("Content-Length: 4", "body"),
        ("Content-Length: 1000000", "begun"),
        ("Transfer-Encoding: chunked", "4\r\nbody\r\n0\r\n\r\n"),
    ],
)
def test_preflight_brings_no_body_to_the_api(gate: Gate, length: str, body: str) -> None:
    """Caddy can't remove it, and refuses the request."""
    asks = f"Origin: https://a\r\nAccess-Control-Request-Method: PUT\r\n{length}\r\n"
    answer = gate.send(f"OPTIONS / HTTP/1.1\r\nHost: localhost\r\n{asks}\r\n{body}".encode())
    assert (answer.status, len(gate.api.received)) in [(200, 1), (413, 0)]
    for received in gate.api.received:
        assert (received.line, received.body) == ("OPTIONS / HTTP/1.1", b"")
        assert not {*received.values("Content-Length")} - {"0"}


@pytest.mark.parametrize("name", ["Origin", "Access-Control-Request-Method"])
def test_options_that_are_no_preflight_need_a_key(gate: Gate, name: str) -> None:
    headers = {"Host": "localhost", name: "GET /"}
    assert gate.send(request_bytes("/", headers, "OPTIONS")).status == 401
    assert not gate.api.begun


@pytest.mark.parametrize("name", ["key", "refused", "later", "preflight"])
def test_paths_of_nginx_lead_neither_to_the_service_nor_past_the_gate(
    gate: Gate, key: str, name: str
) -> None:
    with tls(gate.port, "127.0.0.2") as client:
        assert client.request(f"/_gate/{name}").status in (401, 403, 404)
        assert not gate.api.begun
        answer = client.request(f"/_gate/{name}", X_API_Key=key)
        assert answer.body == b"API" or answer.status in (403, 404)


def test_each_request_that_passes_is_counted_once(gate: Gate, key: str) -> None:
    with tls(gate.port) as client:
        for _ in range(5):
            client.send(request_bytes("/", {"Host": "localhost", "X-API-Key": key}))
            assert client.answer().status == 200
    assert gate.service.total(key) == len(gate.api.received) == 5
    over = used_up(gate)
    assert [gate.ask("/", X_API_Key=over).status for _ in range(3)] == [429] * 3
    assert gate.service.total(over) == 0  # besides the one that used it up


def test_pages_and_sockets_of_the_service_have_a_name_of_their_own(gate: Gate, key: str) -> None:
    host = f"keys.localhost:{gate.port}"
    with tls(gate.port, name="keys.localhost") as client:
        fields = {"username": "ada", "email": "ada@example.com", "password": "long enough"}
        ours = f"Host: {host}\r\nOrigin: https://{host}".encode()
        client.send(form_bytes("/sign-up", **fields).replace(b"Host: a", ours))
        assert client.answer().status == 303
    with tls(gate.port, name="keys.localhost") as client:
        client.send(handshake_bytes(f"{TIME}?api_key={key}", {"Host": host}))
        assert client.answer().status == 101
        assert client.frame().json()["type"] == "auth_success"


class Scripted(socketserver.ThreadingTCPServer):
    """In place of the service: gives these answers, one after the other, and ends connections."""

    daemon_threads = True

    def __init__(self, *answers: str) -> None:
        script = iter(answers)

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while self.rfile.readline().strip():
                    pass
                self.wfile.write(next(script, "").encode())

        super().__init__(("127.0.0.1", free_port()), Handler)


def response(status: str, more: str = "") -> str:
    return f"HTTP/1.1 {status}\r\n{more}Connection: close\r\nContent-Length: 2\r\n\r\n{{}}"


LAST_SECOND = [response("429 Too Many Requests", "Retry-After: 1\r\n"), response("200 OK")]


@pytest.mark.parametrize("proxy", [nginx, caddy])
@pytest.mark.parametrize(
    ("answers", "of_caddy"),
    [([], 502), (["HTTP/1.1 2"], 502), (LAST_SECOND, 429)],
    ids=["no answer", "half an answer", "a window that begins after the refusal"],
)
def test_nothing_passes_without_the_consent_of_the_service(
    tmp_path: Path, proxy: Any, answers: list[str], of_caddy: int
) -> None:
    folder = tmp_path / "proxy"
    with serving(Api()) as api, serving(Scripted(*answers)) as service:
        command, port = files(proxy, folder, service.server_address[1], api.server_address[1])
        with running(command, folder, port), tls(port) as client:
            answer = client.request("/", X_API_Key="some key")
            assert answer.status == (503 if proxy is nginx else of_caddy)
            assert answer.status == 502 or answer.headers["Retry-After"] == "1"
    assert not api.begun


@pytest.mark.parametrize("proxy", [nginx, caddy])
def test_no_key_is_in_the_log_of_a_request_that_fails(tmp_path: Path, proxy: Any) -> None:
    """Here nothing runs behind the proxy."""
    folder, key = tmp_path / "proxy", random_key()
    command, port = files(proxy, folder, free_port(), free_port())
    with running(command, folder, port):
        for method in ("GET", "OPTIONS"):
            with tls(port) as client:
                asks = "Origin: a\r\nAccess-Control-Request-Method: GET\r\n"
                request = with_spoofed_headers(method, key, f"Referer: {key}\r\n{asks}")
                client.send(request.replace(b" / ", f" /{method}?api_key={key} ".encode()))
                assert client.answer().status in (502, 503)
        with tls(port, name="keys.localhost") as client:
            host = {"Host": f"keys.localhost:{port}"}
            client.send(request_bytes(f"{TIME}?api_key={key}", host))
            assert client.answer().status == 502
        paths = ("/GET", "/OPTIONS", TIME)
        eventually(lambda: all(path in log_text(folder) for path in paths))
        assert key not in log_text(folder)


def log_text(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.log"))
