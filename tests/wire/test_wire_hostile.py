"""Clients that hold up, hang on or flood: others are served meanwhile, and nothing stays behind."""

import contextlib
import os
import signal
import time

import pytest

from conftest import StartServer
from helpers.load import waits
from helpers.paths import ECHO, STATUS, YEAR
from helpers.rawsocket import TEXT, RawSocket, form_bytes, frame, request_bytes
from helpers.server import Server, eventually, patience, within


@pytest.mark.parametrize(
    ("framing", "part"),
    [
        ({"Transfer-Encoding": "chunked"}, b"1\r\nx\r\n" * 20_000),
        ({"Content-Length": "10000000000"}, bytes(100_000)),
    ],
    ids=["chunks", "10 GB"],
)
@pytest.mark.parametrize(
    ("method", "path", "ignored"),
    [("POST", STATUS, 405), ("GET", ECHO, 426), ("POST", "/log-in", 413), ("GET", "/", 200)],
)
def test_body_without_end_is_not_read(
    server: Server, method: str, path: str, ignored: int, framing: dict[str, str], part: bytes
) -> None:
    """One whose length is not announced is ignored, unless a form is expected."""
    with RawSocket(server.port) as client:
        client.send(request_bytes(path, {"Host": "a"} | framing, method) + part)
        assert client.answer().status == (413 if "Content-Length" in framing else ignored)
        with pytest.raises(ConnectionError):  # in time, whatever is still sent
            assert not client.fill(part, seconds=5, limit=100_000_000), (
                "the server reads whatever a client sends: see half_close in "
                "service/connections.py, which sleeps after each part"
            )


def test_page_does_not_wait_for_another_whose_form_is_late(server: Server) -> None:
    with RawSocket(server.port) as late:
        late.send(form_bytes("/log-in", username="ada")[:-1])
        assert [server.ask("/log-in").status for _ in range(5)] == [200] * 5
        late.sock.setblocking(False)
        with pytest.raises(BlockingIOError):  # its time has not ended
            late.sock.recv(1)


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"Connection": "close"}, 200),
        ({"Connection": "keep-alive"}, 200),
        ({"X": "y" * 33_000}, 431),
    ],
    ids=["close", "keep-alive", "too large for gunicorn"],
)
def test_response_before_unread_input_is_not_lost(
    server: Server, more: dict[str, str], status: int
) -> None:
    """Nor is a body taken for the next request."""
    headers = {"Host": "a", "Content-Length": "16384"} | more
    with RawSocket(server.port) as client:
        client.send(request_bytes(STATUS, headers) + bytes(16_384))
        answer = client.answer()
        assert (answer.status, answer.headers["Connection"]) == (status, "close")
        assert client.ended(), "a reset would end it with an error: see half_close"


def test_new_connections_are_answered_soon_beside_32_busy_ones(start_patched: StartServer) -> None:
    """They wait for a few rounds of the busy ones. In a single round, an attack could take long.

    That also holds for two workers; one of them is frozen here.
    """
    server = start_patched("workers = 2")
    worker, other = eventually(lambda: len(pids := server.worker_pids) == 2 and pids)
    os.kill(other, signal.SIGSTOP)
    asked = request_bytes(YEAR, {"Host": "a"})
    with server.connections(32) as busy:
        assert {client.request(STATUS).status for client in busy} == {200}
        os.kill(worker, signal.SIGSTOP)
        for client in busy:
            client.send(asked * 100)
        with server.connections(96) as new:
            for client in new:
                client.send(asked)
            os.kill(worker, signal.SIGCONT)
            last = max(client.answer().json()["timestamp"] for client in new)
        times = [client.answer().json()["timestamp"] for client in busy for _ in range(100)]
    assert 4 < sum(moment < last for moment in times) / len(busy) <= 13, (
        "rounds of the busy ones: see max_accept, and workers=1, in lifecycle.serving"
    )


# Connections that do nothing are not kept for ever, nor at the cost of others


@pytest.fixture
def impatient(start_patched: StartServer) -> Server:
    return start_patched(
        "from service import application; from server import worker; keepalive = 1\n"
        "application.BODY_SECONDS, worker.SEND_SECONDS = 1, 0.5"
    )


def test_responses_that_are_not_read_end_the_connection(impatient: Server) -> None:
    """A client that reads slowly gets them all."""
    requests = request_bytes("/openapi.json", {"Host": "a"}) * 1000
    with impatient.connections(20, receive_buffer=4096) as clients:
        for client in clients:
            client.fill(requests, limit=len(requests))
        assert waits(impatient.port, impatient.new_key(), 20)[10] < patience(0.1)
        with RawSocket(impatient.port, receive_buffer=4096) as slow:
            slow.send(requests[: len(requests) // 1000 * 30])
            for _ in range(30):
                time.sleep(0.04)
                assert slow.answer().status == 200
        assert max(client.rest() for client in clients) < 1_000_000


@pytest.mark.parametrize(
    ("framing", "part"),
    [({"Content-Length": "1000"}, b"name"), ({"Transfer-Encoding": "chunked"}, b"999\r\nname")],
    ids=["length", "chunks"],
)
def test_slowloris_ends_the_connection_and_a_slow_form_is_408(
    impatient: Server, framing: dict[str, str], part: bytes
) -> None:
    """A header that drips, also in a later request; a form that drips, and one that halts."""
    slow = request_bytes(STATUS, {"Host": "a" * 300})
    with within(4), impatient.connections(4) as clients:
        first, later, dripping, halted = clients
        assert later.request(STATUS).status == 200
        for form in (dripping, halted):
            form.send(request_bytes("/log-in", {"Host": "a"} | framing, "POST") + part)
        with contextlib.suppress(ConnectionError):
            for number in range(len(slow)):
                for client in (first, later, dripping):
                    client.send(slow[number : number + 1])
                time.sleep(0.02)
        assert [form.answer().status for form in (dripping, halted)] == [408, 408]
        for client in clients:
            client.rest()
    assert "bug" not in impatient.log()


def test_idle_connections_keep_nobody_out(start_patched: StartServer) -> None:
    server = start_patched("worker_connections = 40; keepalive = 1")
    with RawSocket(server.port).open(ECHO) as echo, server.connections(80):
        assert waits(server.port, server.new_key(), 20)[-1] < patience(2.5)
        echo.send(frame(TEXT, b"still here"))
        assert echo.frame().json()["message"] == "still here"
