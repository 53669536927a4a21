"""The ticker alone, with a clock that moves only when the ticker sleeps."""

from collections.abc import Callable
from itertools import chain
from unittest import mock

import gevent
import pytest
from flask import Flask
from gevent.event import Event

from helpers.clock import NOON, Clock
from ws import ticker
from ws.connection import WebSocket


class Sleeper(Clock):
    """Stands in for `gevent`, too: a sleeper wakes in time, or later if `late` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0.0
        self.late: Callable[[float], float] = lambda now: now
        self.make_frame = mock.Mock(return_value=b"")
        self.ticker = ticker.Ticker(self.make_frame)
        self.spawn = mock.Mock()

    def sleep(self, seconds: float) -> None:
        self.left -= seconds
        if self.left < 0:
            raise StopIteration
        self.now = self.late(self.now + seconds)

    def join(self) -> list[float]:
        """Serve a socket; in the list will be when something was sent to it."""
        moments: list[float] = []
        ws = mock.Mock(
            WebSocket,
            send_now=lambda data: moments.append(self.now),
            messages=lambda: [Event().wait()],
        )

        def serve() -> None:
            with Flask("test").app_context():
                self.ticker.stream(ws)

        gevent.spawn(serve)
        gevent.idle()
        return moments

    def run(self, seconds: float) -> None:
        self.left = seconds
        assert self.spawn.call_count == 1, "one greenlet serves all sockets: see Ticker.stream"
        run, *values = self.spawn.call_args.args
        with pytest.raises(StopIteration):
            run(*values)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Sleeper:
    clock = Sleeper()
    monkeypatch.setattr(ticker, "time", clock)
    monkeypatch.setattr(ticker, "gevent", clock)
    return clock


@pytest.mark.parametrize("tenth", range(10))
@pytest.mark.parametrize("offset", [0.001, 0.05, 0.0999])
def test_first_update_comes_within_200_ms(clock: Sleeper, tenth: int, offset: float) -> None:
    clock.now += tenth / 10 + offset
    joined = clock.now
    listeners = [clock.join() for _ in range(3)]
    clock.now += 0.0002  # the next tenth may begin meanwhile
    clock.run(1)
    assert all(0 < moments[0] - joined <= 0.2 for moments in listeners), (
        f"the first update comes later than 0.2 s after {joined}: {listeners}: see Ticker"
    )
    assert all(0.099 < moments[0] % 1 < 0.901 for moments in listeners), (
        f"an update comes within 0.1 s of the turn of a second: {listeners}: see Ticker"
    )
    assert len({round(moments[0] % 1, 1) for moments in listeners}) == (
        1 if tenth in (8, 9) else 2
    ), "those that join together tick apart"
    assert clock.make_frame.call_count == len({*chain(*listeners)}), (
        "a frame is made once for all sockets of a tick, and only then: see Ticker._tick"
    )


def test_lateness_up_to_the_turn_skips_and_repeats_no_second(clock: Sleeper) -> None:
    listeners = [clock.join() for _ in range(4)]
    lateness = iter([0.0, 0.09, 0.02, 0.05] * 10_000)
    clock.late = lambda now: now + next(lateness)
    clock.run(30)
    for moments in listeners:
        seconds = [int(moment) for moment in moments]
        assert seconds == list(range(seconds[0], seconds[0] + len(seconds))), (
            "a second is skipped or repeated when a tick is late: see Ticker"
        )
        assert len(seconds) > 30, f"only {len(seconds)} updates in 31 s: the Ticker drifts"


@pytest.mark.parametrize("jump", [-86_400, -5, 5, 86_400])
def test_clock_that_is_set_makes_no_burst_and_no_silence(clock: Sleeper, jump: int) -> None:
    moments = clock.join()
    jumps = iter([jump])
    clock.late = lambda now: now + next(jumps, 0) if abs(now - NOON - 3) < 0.1 else now
    clock.run(12)
    assert next(jumps, None) is None, "it was set"
    assert 11 <= len(moments) <= 13, (
        f"{len(moments)} updates in 12 s, in which the clock was set by {jump} s: use monotonic"
    )
