"""What the worker leans on inside gunicorn and gevent, where no wire test would notice a change."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from gevent import socket as gsocket
from gevent.pool import Pool
from gunicorn import util
from gunicorn.config import Config
from gunicorn.http import wsgi
from gunicorn.workers.ggevent import GeventWorker

from protocol.websocket import Close, Closed
from server.log import Log
from server.worker import Worker, speed_up

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker whose application answers `Hello`, as it is before it is run."""
    cfg = Config()
    worker = Worker(1, os.getpid(), [], None, 30, cfg, Log(cfg))
    worker.pool, worker.idle = Pool(100), set()
    worker.wsgi = hello
    yield worker
    worker.tmp.close()


def hello(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Length", "5")])
    return [b"Hello"]


@contextlib.contextmanager
def connected(worker: Worker) -> Iterator[Any]:
    """A connection that the worker serves; each `recv` takes what was sent at once."""
    here, there = gsocket.socketpair(type=socket.SOCK_DGRAM)
    here.settimeout(10)
    with here:
        serving = worker.pool.spawn(worker.handle, there, there, ("127.0.0.1", 1))
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


def test_speed_up_spares_gunicorn_work(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr(util, "http_date", lambda now: f"second {now:d}")
    monkeypatch.setattr(wsgi, "WSGIErrorsWrapper", lambda cfg: object())
    speed_up(worker.cfg)
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


def test_late_interrupt_is_not_logged(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """One that comes when the socket has just been closed."""
    worker.wsgi = Mock(side_effect=Closed(Close.GOING_AWAY))
    with connected(worker) as client:
        client.sendall(GET)
        assert worker.pool.join(timeout=10)
    assert not caplog.records
