"""What the worker leans on inside gunicorn and gevent, where no wire test would notice a change."""

import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from gevent import socket as gsocket
from gevent.event import Event
from gevent.pool import Pool
from gunicorn import util
from gunicorn.config import Config
from gunicorn.http import wsgi
from gunicorn.workers.ggevent import GeventWorker

from server import repairs
from server.log import Log
from server.worker import Worker

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker whose application answers `Hello`, as it is before it is run."""
    cfg = Config()
    worker = Worker(1, os.getpid(), [], None, 30, cfg, Log(cfg))
    worker.connections = Pool(100)
    worker.wsgi = hello
    yield worker
    worker.tmp.close()


def hello(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Length", "5")])
    return [b"Hello"]


def streaming(parts: Iterable[bytes]) -> Any:
    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return parts

    return application


@contextlib.contextmanager
def connected(worker: Worker, type: int = socket.SOCK_DGRAM) -> Iterator[Any]:
    """A connection that the worker serves; by default, each `recv` takes what was sent at once."""
    here, there = gsocket.socketpair(type=type)
    here.settimeout(10)
    with here:
        serving = worker.connections.spawn(worker.handle, there, there, ("127.0.0.1", 1))
        yield here
        serving.kill()


def test_stop_is_heard_before_the_load(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then a signal would go to the handlers of the master, which the worker has not left."""
    handlers: list[Any] = []
    before = {number: signal.getsignal(number) for number in STOPS}
    load = lambda worker: handlers.extend(map(signal.getsignal, STOPS))  # noqa: E731
    monkeypatch.setattr(GeventWorker, "init_process", load)
    worker.init_process()
    for number, handler in before.items():
        signal.signal(number, handler)
    assert handlers == [worker.handle_exit] * 3


def test_repairs_spare_gunicorn_work(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr(util, "http_date", lambda now: f"second {now:d}")
    monkeypatch.setattr(wsgi, "WSGIErrorsWrapper", lambda cfg: object())
    repairs.apply(worker.cfg)
    monkeypatch.delattr(Config, "__getattr__")  # plain attributes are left
    first, second = (wsgi.base_environ(worker.cfg)["wsgi.errors"] for _ in range(2))
    assert first is second
    with connected(worker) as client:
        client.sendall(GET)
        assert b"\r\nDate: second " in client.recv(4096)


def test_response_is_sent_in_one_piece(worker: Worker) -> None:
    with connected(worker) as client:
        client.sendall(GET)
        assert client.recv(4096).endswith(b"\r\n\r\nHello")


def two_parts(may_go_on: Event) -> Iterator[bytes]:
    yield from (b"", b"first")
    may_go_on.wait()
    yield b"second"


class TestStream:
    """A view that returns a generator."""

    def test_each_part_is_sent_at_once(self, worker: Worker) -> None:
        """The header with the first one that is not empty."""
        next_part = Event()
        worker.wsgi = streaming(two_parts(next_part))
        with connected(worker) as client:
            client.sendall(GET)
            assert client.recv(4096).endswith(b"\r\n\r\n5\r\nfirst\r\n")
            next_part.set()
            assert client.recv(4096) == b"6\r\nsecond\r\n"
            assert client.recv(4096) == b"0\r\n\r\n"

    def test_others_have_their_turn_after_each_part(self, worker: Worker) -> None:
        """Not in the same round of gevent's loop, as with TURN_SECONDS = 0."""
        made = itertools.count()
        worker.wsgi = streaming(b"%d" % number for number in made)
        with connected(worker, socket.SOCK_STREAM) as client:
            client.sendall(GET)
            client.recv(4096)
            assert next(made) < 10
