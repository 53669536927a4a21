"""The beat of the time sockets: an update to every channel, every second."""

import time

import gevent

import clock
from channel import Channel, frame

TICKS = 50  # a second
QUIET = 5  # ticks on either side of the turn of a second without any update
REACH = 10  # ticks until the first update, at most


class Metronome:
    """Tells the time to many channels, each once a second and at its own phase of the second.

    One greenlet serves them all: a timer and a switch for each would cost more than the sending.
    No phase is near the turn of the second, so that being a little late neither skips nor repeats
    a displayed second.
    """

    def __init__(self) -> None:
        self._audiences: list[set[Channel]] = [set() for _ in range(TICKS)]
        self._running = False

    def join(self, channel: Channel) -> set[Channel]:
        """Start the updates, within 0.2 s; removed from the returned set, the channel gets none."""
        if not self._running:
            self._running = True
            gevent.spawn(self._run)
        tick = int(time.time() * TICKS)
        phases = [coming % TICKS for coming in range(tick + 1, tick + REACH + 1)]
        loud = [phase for phase in phases if QUIET <= phase <= TICKS - QUIET]
        audience = min((self._audiences[phase] for phase in loud), key=len)
        audience.add(channel)
        return audience

    def _run(self) -> None:
        tick = int(time.time() * TICKS)
        while True:
            tick += 1
            while 0 < (ahead := tick / TICKS - time.time()) < 1:
                gevent.sleep(ahead)
            if abs(ahead) >= 1:  # the clock was set, or the process stood still
                tick = int(time.time() * TICKS)
            audience = self._audiences[tick % TICKS]
            if audience:
                now = time.time()
                moment = {"formatted": clock.display(now), "timestamp": clock.timestamp(now)}
                data = frame(type="time_update", **moment)
                for channel in audience:  # push never yields, so nobody leaves meanwhile
                    channel.push(data)
