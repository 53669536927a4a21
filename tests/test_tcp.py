"""Discarding what a client still sends when its connection is closed."""

import socket

import gevent
import pytest
from gevent import socket as gsocket

from protocol import tcp


class Endless:
    """A client whose input is always there, so that reading it never waits."""

    reads = 0

    def shutdown(self, how: int) -> None:
        assert how == socket.SHUT_WR

    def recv(self, size: int) -> bytes:
        self.reads += 1
        assert self.reads < 1_000_000, "it never ends"
        return bytes(10)


def test_endless_input_is_discarded_for_a_time_and_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp, "DRAIN_SECONDS", 0.05)
    other = gevent.spawn(gevent.sleep, 0.01)
    tcp.drain(Endless())
    assert other.ready()


def test_draining_ends_when_the_client_closes() -> None:
    here, there = gsocket.socketpair()
    with here, there:
        here.sendall(b"late")
        draining = gevent.spawn(tcp.drain, there)
        assert here.recv(10) == b""
        here.close()
        draining.get(timeout=0.5)
