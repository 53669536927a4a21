"""The inner parts of gunicorn, gevent and simple-websocket that the service leans on.

A test fails here when a new version of theirs changes one of them; what the service does with them
is tested over the wire.
"""

import contextlib
import inspect
import itertools
import logging
import os
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
from gevent import socket as gsocket
from gevent.pool import Pool
from gevent.threadpool import ThreadPool
from gunicorn import util
from gunicorn.config import Config
from gunicorn.errors import AppImportError
from gunicorn.http import get_parser, wsgi
from gunicorn.workers.ggevent import GeventWorker
from simple_websocket import ConnectionClosed
from simple_websocket import Server as WebSocketServer

from protocol.tcp import TURN_SECONDS
from protocol.websocket import SERVER_OPTIONS, Closed
from rawsocket import TEXT, RawSocket, frame
from server.log import Log
from server.worker import (
    HEADER_SECONDS,
    SPARE_CONNECTIONS,
    Listener,
    Worker,
    hang_up,
    limit_kernel_buffers,
    speed_up,
)
from settings import SettingsError

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HELLO = b"HTTP/1.1 200 OK"


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker whose application answers `Hello`, as it is before it is run."""
    cfg = Config()
    worker = Worker(1, os.getpid(), [], None, 30, cfg, Log(cfg))
    worker.pool, worker.idle = Pool(100), OrderedDict()
    worker.wsgi = hello
    yield worker
    worker.tmp.close()


def hello(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Length", "5")])
    return [b"Hello"]


@pytest.fixture
def ends() -> Iterator[tuple[Any, Any]]:
    here, there = gsocket.socketpair()
    with here, there:
        here.settimeout(5)
        yield here, there


Answers = Callable[..., bytes]


@pytest.fixture
def answers(worker: Worker, ends: tuple[Any, Any]) -> Answers:
    """What the worker answers on one connection to the given bytes, and then to their end."""

    def serve(sent: bytes) -> bytes:
        here, there = ends
        serving = worker.pool.spawn(worker.handle, None, there, ("127.0.0.1", 1))
        here.sendall(sent)
        here.shutdown(socket.SHUT_WR)
        received = b""
        while more := here.recv(4096):
            received += more
        serving.get(timeout=5)
        return received

    return serve


def parsed(ends: tuple[Any, Any], sent: bytes) -> Any:
    """The request that gunicorn's parser makes of these bytes."""
    ends[0].sendall(sent)
    return next(get_parser(Config(), ends[1], ("127.0.0.1", 1)))


# gunicorn: the worker


@pytest.mark.parametrize(
    "name",
    ["load_wsgi", "run", "handle", "handle_request", "handle_exit"],
)
def test_method_that_is_replaced_takes_what_gunicorn_gives(name: str) -> None:
    def parameters(owner: type) -> list[str]:
        return list(inspect.signature(getattr(owner, name)).parameters)

    assert parameters(Worker) == parameters(GeventWorker)


def test_both_requests_of_a_connection_are_handled(worker: Worker, answers: Answers) -> None:
    assert answers(GET + GET).count(HELLO) == 2
    assert not worker.idle


def test_connection_without_a_listener_is_served(answers: Answers) -> None:
    """AsyncWorker.handle asks its listener for nothing but getsockname()."""
    assert HELLO in answers(GET)


def test_header_may_take_longer_than_keepalive(worker: Worker, ends: tuple[Any, Any]) -> None:
    """gunicorn would end a connection whose header takes longer; see `timeout_ctx`."""
    worker.cfg.__dict__["keepalive"] = 0.01
    serving = worker.pool.spawn(worker.handle, None, ends[1], ("127.0.0.1", 1))
    for part in (GET[:10], GET[10:]):
        ends[0].sendall(part)
        gevent.sleep(0.02)
    assert HELLO in ends[0].recv(100)
    serving.kill()


@pytest.mark.parametrize(
    ("sent", "answer", "seconds"), [(GET[:10], b"", HEADER_SECONDS), (GET, b"Hello", 77)]
)
def test_connection_ends_when_its_next_request_is_late(
    worker: Worker, ends: tuple[Any, Any], sent: bytes, answer: bytes, seconds: float
) -> None:
    worker.cfg.set("keepalive", 77)
    serving = worker.pool.spawn(worker.handle, None, ends[1], ("127.0.0.1", 1))
    ends[0].sendall(sent)
    gevent.sleep(0.01)
    worker.end_idle(time.monotonic() + seconds - 5)
    gevent.sleep(0.01)
    assert not serving.dead
    worker.end_idle(time.monotonic() + seconds)
    serving.get(timeout=5)
    assert ends[0].recv(1000).endswith(answer)


def test_stop_iteration_ends_the_connection(worker: Worker, answers: Answers) -> None:
    def end(*args: Any) -> Any:
        raise StopIteration

    worker.wsgi = end
    assert answers(GET + GET) == b""


def test_greenlet_exit_in_a_handler_is_no_error(
    worker: Worker, answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    def end(*args: Any) -> Any:
        raise Closed(1000)

    worker.wsgi = end
    answers(GET)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_stop_signals_set_alive_to_false(worker: Worker) -> None:
    for handler in (worker.handle_exit, worker.handle_quit):
        worker.alive = True
        handler(signal.SIGINT, None)
        assert not worker.alive


def test_response_of_a_worker_that_stops_closes_the_connection(
    worker: Worker, answers: Answers
) -> None:
    worker.alive = False
    answered = answers(GET + GET)
    assert b"Connection: close" in answered
    assert answered.count(HELLO) == 1


def test_pipelined_requests_leave_others_their_turn(worker: Worker) -> None:
    """After sleep(0) gevent looks for input of others only every 50 turns."""
    order: list[str] = []

    def note(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        order.append(environ["PATH_INFO"])
        return hello(environ, start_response)

    def ask_one_by_one(client: Any) -> None:
        for _ in range(10):
            client.sendall(b"GET /other HTTP/1.1\r\nHost: a\r\n\r\n")
            client.recv(4096)

    worker.wsgi = note
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(2):
            here, there = gsocket.socketpair()
            clients.append(stack.enter_context(here))
            serving = gevent.spawn(worker.handle, None, there, ("127.0.0.1", 1))
            stack.callback(serving.kill)
        clients[0].sendall(GET * 280)
        gevent.spawn(ask_one_by_one, clients[1]).get(timeout=5)
    assert order.count("/other") == 10
    assert order.count("/") < 100


def test_wrong_setting_while_loading_ends_gunicorn(worker: Worker) -> None:
    def fail() -> None:
        raise SettingsError("DATABASE_URL: no")

    worker.app = type("App", (), {"wsgi": staticmethod(fail)})
    with pytest.raises(AppImportError, match="DATABASE_URL: no"):
        worker.load_wsgi()


def test_settings_in_the_dictionary_win(worker: Worker) -> None:
    worker.cfg.__dict__["keepalive"] = 77
    assert worker.cfg.keepalive == 77
    assert {"keepalive", "is_ssl", "limit_request_fields"} - set(worker.cfg.settings) == {"is_ssl"}


def test_date_and_error_stream_are_not_made_for_each_request(
    worker: Worker, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(util, "http_date", lambda: "Thu, 01 Jan 1970")
    monkeypatch.setattr(wsgi, "WSGIErrorsWrapper", lambda cfg: object())
    monkeypatch.setattr("gc.freeze", lambda: None)
    assert b"\r\nDate: Thu, 01 Jan 1970\r\n" in answers(GET)
    speed_up(worker.cfg)
    first, second = (wsgi.base_environ(worker.cfg)["wsgi.errors"] for _ in range(2))
    assert first is second


# gunicorn: the request


@pytest.mark.parametrize(
    ("headers", "length"),
    [
        (b"", 0),
        (b"Content-Length: 0\r\n", 0),
        (b"Content-Length: 17\r\n", 17),
        (b"Transfer-Encoding: chunked\r\n", None),
    ],
)
def test_reader_of_a_body_knows_its_length_unless_it_is_chunked(
    ends: tuple[Any, Any], headers: bytes, length: int | None
) -> None:
    request = parsed(ends, b"POST / HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n")
    assert getattr(request.body.reader, "length", None) == length


def test_buffered_request_is_known_and_may_be_put_back(
    worker: Worker, ends: tuple[Any, Any]
) -> None:
    request = parsed(ends, GET + GET)
    assert request.unreader.buf.tell() == len(GET)
    taken = request.unreader.take_buffered()
    assert not request.unreader.buf.tell()
    request.unreader.unread(taken)
    assert request.unreader.buf.tell() == len(GET)


def test_forced_close_is_in_the_response(worker: Worker, answers: Answers) -> None:
    chunked = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    answered = answers(chunked + b"0\r\n\r\n" + GET)
    assert b"Connection: close" in answered
    assert answered.count(HELLO) == 1


# gevent


@pytest.fixture
def listening() -> Iterator[Any]:
    with gsocket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(10)
        yield sock


@pytest.mark.parametrize(("size", "accepted"), [(10, 3), (2, 2)])
def test_listener_accepts_what_waits_and_has_room_before_it_closes(
    listening: Any, size: int, accepted: int
) -> None:
    handled: list[tuple[Any, Any]] = []

    def handle(client: Any, addr: Any) -> None:
        handled.append((client, addr))

    listener = Listener(listening, handle, spawn=(pool := Pool(size)))
    listener.init_socket()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(3)]
        for client in clients:
            client.connect(listening.getsockname())
        listener.close()
        assert listener.closed
        assert pool.free_count() == size - accepted
        pool.join(timeout=5)
        names = {client.getsockname() for client in clients}
        assert {addr for _, addr in handled} <= names
        assert len(handled) == accepted


def test_listener_leaves_others_their_turn_after_each_connection(listening: Any) -> None:
    handled: list[Any] = []
    listener = Listener(listening, lambda client, addr: handled.append(client))
    listening.listen(20)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.socket()).connect(listening.getsockname())
        listener.start()
        stack.callback(listener.close)
        before = [0]
        while before[-1] < 20:
            gevent.sleep(TURN_SECONDS)
            before.append(len(handled))
    assert max(after - count for count, after in itertools.pairwise(before)) <= 2


def test_listener_bounds_the_buffers_of_its_connections(listening: Any) -> None:
    limit_kernel_buffers(listening)
    sizes: list[int] = []

    def handle(client: Any, addr: Any) -> None:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sizes.append(client.getsockopt(socket.SOL_SOCKET, option))

    listener = Listener(listening, handle)
    listener.start()
    with gsocket.create_connection(listening.getsockname()):
        gevent.sleep(0.05)
    listener.close()
    assert len(sizes) == 2
    assert max(sizes) <= 131_072


def test_hang_up_ends_a_read_without_an_error(ends: tuple[Any, Any]) -> None:
    reading = gevent.spawn(ends[1].recv, 10)
    gevent.sleep(0)
    hang_up(ends[1])
    assert reading.get(timeout=5) == b""


def test_read_that_was_not_begun_ends_too(ends: tuple[Any, Any]) -> None:
    hang_up(ends[1])
    assert ends[1].recv(10) == b""


def test_connection_without_room_takes_that_of_the_longest_idle(
    worker: Worker,
) -> None:
    worker.pool = Pool(SPARE_CONNECTIONS + 2)
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(3):
            here, there = gsocket.socketpair()
            clients.append(RawSocket.over(stack.enter_context(here)))
            serving = worker.pool.spawn(worker.handle, None, there, ("127.0.0.1", 1))
            stack.callback(serving.kill)
            gevent.sleep(0)
        assert clients[0].ended()
        for client in clients[1:]:
            client.send(GET)
            assert client.answer().body == b"Hello"


def test_thread_pool_raises_before_anything_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    pool = ThreadPool(1)
    with monkeypatch.context() as patch:
        patch.setattr("gevent.threadpool.start_new_thread", fail)
        with pytest.raises(RuntimeError):
            pool.size = 1
    assert not len(pool)
    pool.size = 1
    assert pool.apply(lambda: "done") == "done"
    pool.kill()


# simple-websocket and flask-sock


@pytest.fixture
def accepted(ends: tuple[Any, Any]) -> Callable[..., Any]:
    """The connection that simple-websocket makes of a handshake with these headers."""

    def accept(**headers: str) -> Any:
        environ = {
            "REQUEST_METHOD": "GET",
            "QUERY_STRING": "",
            "PATH_INFO": "/",
            "SCRIPT_NAME": "",
            "gunicorn.socket": ends[1],
            "HTTP_HOST": "localhost",
            "HTTP_CONNECTION": "Upgrade",
            "HTTP_UPGRADE": "websocket",
            "HTTP_SEC_WEBSOCKET_VERSION": "13",
            "HTTP_SEC_WEBSOCKET_KEY": "AAAAAAAAAAAAAAAAAAAAAA==",
        }
        return WebSocketServer(environ | headers, **SERVER_OPTIONS)

    return accept


def test_accepted_connection_has_what_is_used_of_it(
    accepted: Callable[..., Any], ends: tuple[Any, Any]
) -> None:
    server = accepted()
    assert server.sock is ends[1]
    assert server.environ["HTTP_HOST"] == "localhost"
    server.ws.receive_data(frame(TEXT, b"hi"))
    (event,) = server.ws.events()
    assert (event.data, event.message_finished) == ("hi", True)


def test_reader_of_simple_websocket_does_not_read(
    accepted: Callable[..., Any], ends: tuple[Any, Any]
) -> None:
    accepted()
    ends[0].sendall(b"for us")
    gevent.sleep(0.05)
    assert ends[1].recv(100) == b"for us"


@pytest.mark.parametrize(("offered", "chosen"), [("chat", "chat"), ("b, a", "b")])
def test_first_subprotocol_is_accepted(
    accepted: Callable[..., Any], ends: tuple[Any, Any], offered: str, chosen: str
) -> None:
    accepted(HTTP_SEC_WEBSOCKET_PROTOCOL=offered)
    assert f"Sec-WebSocket-Protocol: {chosen}\r\n".encode() in ends[0].recv(1000)


def test_connection_that_is_marked_closed_is_not_closed_again(
    accepted: Callable[..., Any], ends: tuple[Any, Any]
) -> None:
    server = accepted()
    ends[0].recv(1000)
    server.connected = False
    with pytest.raises(ConnectionClosed):
        server.close()
    ends[1].shutdown(socket.SHUT_WR)
    assert ends[0].recv(100) == b""
