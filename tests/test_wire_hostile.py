"""Clients that hold up, hang on or flood: others are served meanwhile, and nothing stays behind."""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from conftest import StartPatched, StartServer
from rawsocket import (
    CONTINUATION,
    PONG,
    RESET,
    TEXT,
    Answer,
    RawSocket,
    close_frame,
    frame,
    request_bytes,
)
from serving import Server, eventually

ECHO, TIME = "/api/v1/ws/echo", "/api/v1/ws/time"
TEST, STATUS = "/api/v1/protected/test", "/api/v1/status"
CHUNKED = {"Host": "a", "Transfer-Encoding": "chunked"}
HUGE = {"Host": "a", "Content-Length": "10000000000"}


@contextlib.contextmanager
def flooding(server: Server, first: bytes, then: bytes) -> Iterator[RawSocket]:
    """Meanwhile a client sends `then` without a pause, until the server ends the connection."""

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                client.sock.sendall(then)

    with RawSocket(server.port) as client:
        client.send(first)
        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield client
        finally:
            with contextlib.suppress(OSError):
                client.sock.shutdown(socket.SHUT_RDWR)
            thread.join()


def latencies(server: Server, count: int = 20) -> list[float]:
    """Of another client's requests, in seconds, in order of size."""
    found = []
    with RawSocket(server.port) as other:
        for _ in range(count):
            started = time.monotonic()
            assert other.request(STATUS).status == 200
            found.append(time.monotonic() - started)
    return sorted(found)


def is_closed(client: RawSocket) -> bool:
    """Whether the server ends the connection, in whatever way."""
    with contextlib.suppress(ConnectionError):
        while client.sock.recv(1 << 20):
            pass
    return True


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


class TestBodies:
    @pytest.mark.parametrize(
        ("headers", "then"),
        [
            pytest.param(CHUNKED, b"1\r\nx\r\n" * 1000, id="endless chunks"),
            pytest.param(HUGE, bytes(100_000), id="10 GB"),
        ],
    )
    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("POST", STATUS, 413),
            ("GET", ECHO, 413),
            ("POST", "/log-in", (411, 413)),
            ("GET", "/", 200),
            ("GET", "/openapi.json", 200),
            ("GET", "/nothing", 404),
        ],
    )
    def test_body_without_end_is_not_read(
        self,
        server: Server,
        method: str,
        path: str,
        status: int | tuple[int, int],
        headers: dict[str, str],
        then: bytes,
    ) -> None:
        with flooding(server, request_bytes(path, headers, method), then) as client:
            answer = client.answer()
            assert latencies(server)[10] < 0.2
            assert is_closed(client)

        expected = status if isinstance(status, int) else status[headers is HUGE]
        assert answer.status == expected
        assert answer.headers["Connection"].lower() == "close"

    @pytest.mark.parametrize("path", ["/log-in", "/sign-up"])
    def test_client_that_resets_in_the_middle_of_a_form_is_no_bug(
        self, start_server: StartServer, path: str
    ) -> None:
        server = start_server()
        for _ in range(20):
            with RawSocket(server.port) as client:
                client.sock.setsockopt(*RESET)
                client.send(request_bytes(path, {"Host": "a", "Content-Length": "8"}, "POST"))
                client.send(b"name")
        assert latencies(server, 3)
        assert "Traceback" not in server.log()

    @pytest.mark.parametrize("headers", [CHUNKED, HUGE], ids=["chunks", "10 GB"])
    def test_stop_during_bodies_without_end_loses_no_count(
        self, start_server: StartServer, headers: dict[str, str]
    ) -> None:
        server = start_server()
        key = server.new_key()
        first = request_bytes(STATUS, headers, "POST")
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(flooding(server, first, b"1\r\nx\r\n" * 1000))
            with RawSocket(server.port) as client:
                counted = [client.request(TEST, X_API_Key=key).status for _ in range(50)]
            status, seconds = server.stop()

        assert counted == [200] * 50
        assert (status, seconds < 5) == (0, True)
        assert total_requests(server.restart(), key) == 50


def total_requests(server: Server, key: str) -> int:
    """What was counted for the key before this question."""
    with RawSocket(server.port) as connection:
        answer = connection.request("/api/v1/usage/stats", X_API_Key=key)
    total: int = answer.json()["total_requests"]
    return total - 1


class TestTurns:
    @pytest.mark.parametrize(
        "sent",
        [
            pytest.param(
                request_bytes(STATUS, {"Host": "a"} | {f"X-{n}": "y" * 8000 for n in range(4)}),
                id="large headers",
            ),
            pytest.param(request_bytes(STATUS, {"Host": "a"}) * 100, id="small requests"),
            pytest.param(request_bytes("/openapi.json", {"Host": "a"}) * 20, id="responses"),
        ],
    )
    def test_pipelined_requests_leave_others_their_turn(self, server: Server, sent: bytes) -> None:
        def read() -> None:
            with contextlib.suppress(OSError):
                while client.sock.recv(1 << 20):
                    pass

        with flooding(server, b"", sent) as client:
            reading = threading.Thread(target=read)
            reading.start()
            assert latencies(server)[10] < 0.2
        reading.join()

    def test_2000_chunks_of_a_byte_leave_others_their_turn(self, server: Server) -> None:
        body = b"1\r\nx\r\n" * 2000 + b"0\r\n\r\n"
        found = []
        for path in ("/", STATUS) * 5:
            with flooding(server, request_bytes(path, CHUNKED), body):
                found += latencies(server, 4)
        assert sorted(found)[20] < 0.2

    @pytest.mark.parametrize(("number", "status"), [(4, 200), (5, 431)])
    def test_header_has_32_kib_at_most(self, server: Server, number: int, status: int) -> None:
        """gunicorn searches all of it again for each part that arrives."""
        headers = {"Host": "a"} | {f"X-{n}": "y" * 8000 for n in range(number)}
        with RawSocket(server.port) as client:
            # No more than is read: what is left unread would reset the connection.
            client.send(request_bytes(STATUS, headers)[:33_000])
            assert client.answer().status == status

    def test_response_before_an_unread_body_is_not_lost(self, server: Server) -> None:
        headers = {"Host": "a", "Connection": "close", "Content-Length": "16384"}
        with RawSocket(server.port) as client:
            client.send(request_bytes(STATUS, headers) + bytes(16_384))
            assert client.answer().status == 200
            assert client.ended(), "a reset would end it with an error"


class TestHolding:
    """Connections that do nothing are not kept for ever, nor at the cost of others."""

    def test_responses_that_are_not_read_end_the_connection(
        self, start_patched: StartPatched
    ) -> None:
        server = start_patched("import server.worker; server.worker.SEND_SECONDS = 0.5")
        requests = request_bytes("/openapi.json", {"Host": "a"}) * 1000
        with ExitStack() as stack:
            clients = [stack.enter_context(RawSocket(server.port, 4096)) for _ in range(20)]
            for client in clients:
                client.sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.sock.send(requests)
            assert latencies(server)[10] < 0.2
            eventually(lambda: open_connections(server) == 0)
            assert all(is_closed(client) for client in unblocked(clients))
        assert "Traceback" not in server.log()

    def test_client_that_reads_slowly_gets_all(self, start_patched: StartPatched) -> None:
        server = start_patched("import server.worker; server.worker.SEND_SECONDS = 0.5")
        with RawSocket(server.port, receive_buffer=4096) as client:
            client.send(request_bytes("/openapi.json", {"Host": "a"}) * 30)
            for _ in range(30):
                time.sleep(0.04)
                assert client.answer().status == 200

    @pytest.mark.parametrize("before", [b"", request_bytes(STATUS, {"Host": "a"})])
    def test_slow_header_ends_the_connection_whatever_keepalive_is(
        self, start_patched: StartPatched, before: bytes
    ) -> None:
        patch = "import server.worker; server.worker.HEADER_SECONDS = 0.5"
        server = start_patched(patch, PROXY_HOPS="1")
        with RawSocket(server.port) as client:
            client.send(before)
            assert not before or client.answer().status == 200
            started = time.monotonic()
            with contextlib.suppress(ConnectionError):
                for byte in request_bytes(STATUS, {"Host": "a" * 300}):
                    client.send(bytes([byte]))
                    time.sleep(0.02)
            assert is_closed(client)
        assert time.monotonic() - started < 4

    def test_idle_connections_give_way_and_busy_ones_do_not(
        self, start_patched: StartPatched
    ) -> None:
        server = start_patched(after="worker_connections = 40", PROXY_HOPS="1")
        with ExitStack() as stack:

            def connect() -> RawSocket:
                return stack.enter_context(RawSocket(server.port))

            echo, form = connect().open(ECHO), connect()
            form.send(b"POST /log-in HTTP/1.1\r\nHost: a\r\nContent-Length: 8\r\n\r\nname")
            used = connect()
            assert used.request(STATUS).status == 200
            idle = [connect() for _ in range(100)]
            assert all(connect().request(STATUS).status == 200 for _ in range(20))
            assert latencies(server)[-1] < 2
            assert used.ended()
            assert idle[0].ended()
            form.send(b"=ada")
            assert form.answer().status == 422
            echo.send(frame(TEXT, b"still here"))
            assert echo.frame().json()["message"] == "still here"

    def test_kernel_keeps_little_of_what_is_not_read(self, server: Server) -> None:
        with RawSocket(server.port, receive_buffer=4096) as client:
            client.open(ECHO)
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client.sock.settimeout(1)
            unsent, sent = b"", 0
            with contextlib.suppress(TimeoutError):
                while sent < 10_000_000:
                    unsent = unsent or frame(TEXT, b"x" * 60_000)
                    size = client.sock.send(unsent)
                    sent, unsent = sent + size, unsent[size:]
        assert sent < 1_000_000


def unblocked(clients: list[RawSocket]) -> list[RawSocket]:
    for client in clients:
        client.sock.settimeout(10)
    return clients


def open_connections(server: Server) -> int:
    """Connections of the worker, without those that wait to be accepted."""
    files = Path(f"/proc/{server.worker_pid}/fd")
    inodes = {str(file.readlink()) for file in files.iterdir() if file.is_symlink()}
    port = f":{server.port:04X}"
    established = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(
        fields[1].endswith(port) and fields[3] != "0A" and f"socket:[{fields[9]}]" in inodes
        for fields in established
    )


class TestSockets:
    @pytest.mark.parametrize(
        ("patch", "left_kib"),
        [
            pytest.param("", 4, id="nothing"),
            # flask-sock makes a class for each socket, which only the garbage collector frees.
            pytest.param("import gc; gc.disable()", 30, id="no message, even without a collector"),
        ],
    )
    def test_of_closed_sockets_stays(
        self, start_patched: StartPatched, patch: str, left_kib: int
    ) -> None:
        server = start_patched(patch)
        unfinished = frame(TEXT, b"x" * 65_000, fin=False)

        def open_and_close(count: int) -> None:
            for number in range(count):
                with RawSocket(server.port) as client:
                    client.open(ECHO).send(unfinished)
                    if number % 2:
                        client.send(close_frame(1000))
                        assert client.frame().close_code == 1000

        open_and_close(50)
        before = resident_kib(server.worker_pid)
        open_and_close(500)
        assert resident_kib(server.worker_pid) - before < 500 * left_kib

    @pytest.mark.parametrize("opcode", [TEXT, PONG])
    def test_100_flooding_sockets_that_are_reset_are_gone_at_once(
        self, server: Server, opcode: int
    ) -> None:
        flood = frame(opcode, b"") * 5000
        with ExitStack() as stack:
            for _ in range(100):
                client = stack.enter_context(RawSocket(server.port)).open(ECHO)
                client.sock.setsockopt(*RESET)
                client.sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        client.sock.send(flood)
        before = processor_seconds(server.worker_pid)
        with ExitStack() as stack:

            def open_100() -> bool:
                clients = [stack.enter_context(RawSocket(server.port)) for _ in range(100)]
                answers = [client.handshake(ECHO).status for client in clients]
                stack.pop_all().close()
                return answers == [101] * 100

            eventually(open_100, 5)
        assert processor_seconds(server.worker_pid) - before < 3

    @pytest.mark.parametrize("opcode", [PONG, CONTINUATION])
    def test_frames_of_a_client_that_left_are_not_all_handled(
        self, start_patched: StartPatched, opcode: int
    ) -> None:
        """Its kernel goes on sending; only what is sent to it shows that nobody is there."""
        server = start_patched("from protocol import websocket; websocket.PING_SECONDS = 0.5")
        flood = frame(opcode, b"", fin=opcode == PONG) * 5000
        with RawSocket(server.port) as client:
            client.open(ECHO).send(frame(TEXT, b"", fin=False))
            client.sock.setblocking(False)
            unsent = memoryview(flood)
            with contextlib.suppress(BlockingIOError):
                while True:
                    unsent = unsent[client.sock.send(unsent) :] or memoryview(flood)
        eventually(lambda: server.log_lines(": 1006"), 10)

    def test_garbage_after_the_handshake_is_no_bug(self, server: Server) -> None:
        logged = len(server.log())
        for _ in range(200):
            with RawSocket(server.port) as client:
                client.open(ECHO).send(random.randbytes(random.randrange(1, 5000)))
                client.sock.shutdown(socket.SHUT_WR)
                assert is_closed(client)
        assert "Traceback" not in server.log()[logged:]
        assert "bug" not in server.log()[logged:]

    def test_endless_fragments_leave_others_their_turn(self, server: Server) -> None:
        with RawSocket(server.port) as client:
            client.open(ECHO)
            over = RawSocket.over(client.sock.dup())
            with over, flooding_over(over, frame(TEXT, b"", fin=False), frame(CONTINUATION) * 2000):
                assert latencies(server)[10] < 0.2


@contextlib.contextmanager
def flooding_over(client: RawSocket, first: bytes, then: bytes) -> Iterator[None]:
    """The same on a connection that is open already."""
    client.send(first)

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                client.sock.sendall(then)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        client.sock.shutdown(socket.SHUT_RDWR)
        thread.join()


class TestHost:
    @pytest.mark.parametrize("host", [{}, {"Host": ""}], ids=["none", "empty"])
    @pytest.mark.parametrize("upgrade", ["h2c", "websocket", "TLS/1.0, HTTP/1.1"])
    @pytest.mark.parametrize("path", [STATUS, "/", "/openapi.json"])
    def test_request_without_host_is_refused_whatever_it_upgrades_to(
        self, server: Server, path: str, upgrade: str, host: dict[str, str]
    ) -> None:
        answer = answered(server, path, {**host, "Connection": "Upgrade", "Upgrade": upgrade})
        assert answer.status == 400

    def test_two_hosts_are_refused(self, server: Server) -> None:
        request = b"GET /api/v1/status HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"
        with RawSocket(server.port) as client:
            client.send(request)
            assert client.answer().status == 400

    def test_http_1_0_needs_no_host(self, server: Server) -> None:
        with RawSocket(server.port) as client:
            client.send(request_bytes(STATUS, {}, version="HTTP/1.0"))
            assert client.answer().status == 200


def answered(server: Server, path: str, headers: dict[str, str]) -> Answer:
    with RawSocket(server.port) as client:
        client.send(request_bytes(path, headers))
        return client.answer()
