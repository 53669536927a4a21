"""What the worker leans on inside gunicorn and gevent, where no wire test would notice a change."""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import gevent
import pytest
from gevent import socket as gsocket
from gevent.event import Event
from gevent.pool import Pool
from gunicorn import util
from gunicorn.config import Config
from gunicorn.http import wsgi

from helpers.clock import Clock
from server import gunicorn_patches
from server.log import RedactingLogger
from server.worker import Worker
from service.connections import TURN_SECONDS

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker whose application answers `Hello`, as it is before it is run."""
    monkeypatch.setattr(util, "http_date", util.http_date)  # it may be patched only once
    cfg = Config()
    worker = Worker(1, os.getpid(), [], None, 30, cfg, RedactingLogger(cfg))
    worker.connections = Pool(100)
    worker.wsgi, worker.script_name = hello, ""
    yield worker
    worker.tmp.close()


def hello(environ: dict[str, Any], start_response: Any, body: bytes = b"Hello") -> list[bytes]:
    start_response("200 OK", [("content-length", str(len(body)))])  # in any case
    return [body]


@contextlib.contextmanager
def connected(worker: Worker, type: int = socket.SOCK_DGRAM) -> Iterator[Any]:
    """A connection that the worker serves; by default, each `recv` takes what was sent at once."""
    here, there = gsocket.socketpair(type=type)
    here.settimeout(10)
    closed = gsocket.socket()  # the listener, as a stop leaves it
    closed.close()
    with here:
        serving = worker.connections.spawn(worker.handle, closed, there, ("127.0.0.1", 1))
        yield here
        serving.kill()


def test_patches_spare_gunicorn_work(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "http_date", lambda now: f"second {now:d}")
    monkeypatch.setattr(gunicorn_patches, "time", clock := Clock())
    monkeypatch.setattr(wsgi, "WSGIErrorsWrapper", lambda cfg: object())
    gunicorn_patches.patch_gunicorn(worker.cfg)
    monkeypatch.delattr(Config, "__getattr__")  # plain attributes are left
    first, second = (wsgi.base_environ(worker.cfg)["wsgi.errors"] for _ in range(2))
    assert first is second, "the wrapper of errors is made for each request: see patch_gunicorn"
    for clock.now, date in ((5.9, b"\r\nDate: second 5\r\n"), (7.1, b"\r\nDate: second 7\r\n")):
        with connected(worker) as client:
            client.sendall(GET)
            assert date in client.recv(4096), "Date stands still: http_date has to read the clock"


def test_later_parts_of_a_request_wait_longer_but_later_requests_do_not(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small parts become larger ones meanwhile; none is so large that others wait for it."""
    gunicorn_patches.patch_gunicorn(worker.cfg)
    waits: list[float] = []
    monkeypatch.setattr("gevent.sleep", waits.append)
    with connected(worker, socket.SOCK_STREAM) as client:
        for _ in range(3):
            client.sendall(GET.replace(b"Host", b"X: %s\r\nY: %s\r\nHost" % ((b"x" * 5000,) * 2)))
            client.recv(4096)
    assert waits == [0.0001, 0.0002, TURN_SECONDS] * 3, (
        "Unreader.chunk reads 4,000 bytes, then waits; set `parts` to 0 before each request"
    )


def test_complete_body_comes_in_one_packet_with_the_header(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that reads a large one slowly gets all of it."""
    monkeypatch.setattr("server.worker.SEND_SECONDS", 0.5)
    gunicorn_patches.patch_gunicorn(worker.cfg)
    with connected(worker) as client:
        client.sendall(GET)
        assert client.recv(4096).endswith(b"\r\n\r\nHello"), (
            "the body comes in a packet of its own: see Response.write in gunicorn_patches.py"
        )
    body = b"x" * 3_000_000  # more than the kernel takes at once
    worker.wsgi = lambda environ, start_response: hello(environ, start_response, body)
    with connected(worker, socket.SOCK_STREAM) as client:
        client.sendall(GET.replace(b"Host", b"Connection: close\r\nHost"))
        received = b""
        while part := client.recv(65_536):
            received += part
            gevent.sleep(0.02)  # in all, longer than SEND_SECONDS
        assert received.endswith(b"\r\n\r\n" + body), "see Response.write"


def test_view_may_pass_on_the_headers_of_another_server(worker: Worker) -> None:
    gunicorn_patches.patch_gunicorn(worker.cfg)
    others = [("Server", "x"), ("Transfer-Encoding", "chunked"), ("Keep-Alive", "timeout=5")]
    worker.wsgi = lambda environ, start_response: hello(
        environ, lambda status, headers: start_response(status, [*headers, *others])
    )
    with connected(worker) as client:
        client.sendall(GET)
        head = client.recv(4096).lower()
    assert (head.count(b"\nserver:"), b"chunked" in head, b"timeout" in head) == (
        (1, False, False)
    ), "gunicorn drops those of its connection: see process_headers"


def test_each_part_of_a_stream_is_sent_as_soon_as_it_exists(worker: Worker) -> None:
    may_go_on = Event()

    def stream(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Length", "6")])
        yield b"one"
        may_go_on.wait()
        yield b"two"

    worker.wsgi = stream
    with connected(worker, socket.SOCK_STREAM) as client:
        client.sendall(GET)
        assert client.recv(4096).endswith(b"\r\n\r\none"), "a part of a stream waits for the next"
        may_go_on.set()
        assert client.recv(4096) == b"two"


def test_bug_that_flask_does_not_see_is_logged_without_the_query(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a header that cannot be encoded, or the first part of a stream."""
    gunicorn_patches.patch_gunicorn(worker.cfg)
    log: list[str] = []
    monkeypatch.setattr(worker.log, "exception", lambda text, *values: log.append(text % values))
    worker.wsgi = lambda environ, start_response: hello(
        environ, lambda status, headers: start_response(status, [*headers, ("X-Name", "\u20ac")])
    )
    with connected(worker) as client:
        client.sendall(GET.replace(b"/ ", b"/path?token=secret "))
        assert client.recv(4096).startswith(b"HTTP/1.1 500 ")
    assert log == ["Error handling request GET /path"]
