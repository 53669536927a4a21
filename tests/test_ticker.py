"""The beat alone: time stands still, or passes as fast as the metronome sleeps."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import metronome
import pytest
from metronome import QUIET, REACH, TICKS, Metronome

NOON = 1_795_262_400  # 2026-11-21T12:00:00Z
TICK = 1 / TICKS


class Ending(Exception):
    """The time of the test is over."""


class World:
    """Time, and what is to run in it: a sleeper wakes at its moment, or later if told so."""

    def __init__(self) -> None:
        self.now, self.end = float(NOON), float(NOON)
        self.spawned: list[Callable[[], None]] = []
        self.late: Callable[[float], float] = lambda now: now

    def spawn(self, function: Callable[[], None]) -> None:
        self.spawned.append(function)

    def sleep(self, seconds: float) -> None:
        self.now = self.late(self.now + seconds)
        if self.now > self.end:
            raise Ending

    def run(self, seconds: float) -> None:
        self.end = self.now + seconds
        with pytest.raises(Ending):
            self.spawned[0]()


class Listener:
    """Stands for a channel; keeps what it was told, and when."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.heard: list[tuple[float, dict[str, str]]] = []

    def push(self, data: bytes) -> None:
        self.heard.append((self._world.now, json.loads(data[data.index(b"{") :])))

    @property
    def moments(self) -> list[float]:
        return [moment for moment, _ in self.heard]

    @property
    def displayed(self) -> list[str]:
        return [update["formatted"] for _, update in self.heard]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(metronome, "time", SimpleNamespace(time=lambda: world.now))
    monkeypatch.setattr(metronome, "gevent", world)
    return world


@pytest.fixture
def beat(world: World) -> Metronome:
    return Metronome()


def join(beat: Metronome, world: World) -> Listener:
    listener: Any = Listener(world)
    beat.join(listener)
    found: Listener = listener
    return found


def phase(listener: Listener) -> float:
    """When in a second it is told the time."""
    return listener.moments[0] % 1


# Joining


def test_first_to_join_starts_the_beat_once(beat: Metronome, world: World) -> None:
    assert not world.spawned
    for _ in range(3):
        join(beat, world)
    assert len(world.spawned) == 1


@pytest.mark.parametrize("tick", range(TICKS))
def test_first_update_comes_soon_and_away_from_the_turn(
    beat: Metronome, world: World, tick: int
) -> None:
    world.now += (tick + 0.5) * TICK
    joined = world.now
    listeners = [join(beat, world) for _ in range(2 * REACH)]
    world.run(1)
    assert all(0 < listener.moments[0] - joined <= 0.2 for listener in listeners)
    assert all(0.099 < phase(listener) < 0.901 for listener in listeners)


def test_who_joins_together_is_spread_over_all_phases_in_reach(
    beat: Metronome, world: World
) -> None:
    world.now += 0.5
    listeners = [join(beat, world) for _ in range(3 * REACH)]
    world.run(1)
    phases = [round(phase(listener) * TICKS) for listener in listeners]
    assert {phases.count(tick) for tick in phases} == {3}
    assert len(set(phases)) == REACH


def test_emptiest_phase_is_chosen(beat: Metronome, world: World) -> None:
    world.now += 0.5
    audiences = [beat.join(Listener(world)) for _ in range(REACH)]  # type: ignore[arg-type]
    audiences[3].clear()
    assert beat.join(Listener(world)) is audiences[3]  # type: ignore[arg-type]


def test_no_phase_in_reach_is_ever_missing() -> None:
    assert REACH > 2 * QUIET - 1, "or nothing would be left for who joins at the turn"


# The beat


def test_sixty_seconds_are_sixty_updates(beat: Metronome, world: World) -> None:
    world.now += 0.31
    listeners = [join(beat, world) for _ in range(REACH)]
    world.run(60)
    assert {len(listener.heard) for listener in listeners} == {60}


def test_updates_do_not_drift(beat: Metronome, world: World) -> None:
    listener = join(beat, world)
    world.late = lambda now: now + 0.003  # as every real sleep is
    world.run(600)
    first, *later = listener.moments
    assert all(abs(moment - first - second) < 0.01 for second, moment in enumerate(later, start=1))


def test_lateness_up_to_the_turn_skips_and_repeats_nothing(beat: Metronome, world: World) -> None:
    listeners = [join(beat, world) for _ in range(REACH)]
    lateness = iter([0.0, 0.09, 0.02, 0.05] * 10_000)
    world.late = lambda now: now + next(lateness)
    world.run(30)
    for listener in listeners:
        seconds = [int(moment) for moment in listener.moments]
        assert seconds == list(range(seconds[0], seconds[0] + len(seconds)))


def test_update_tells_the_time_in_both_forms(beat: Metronome, world: World) -> None:
    world.now += 0.5 + TICK / 2
    listener = join(beat, world)
    world.run(1)
    assert listener.heard[0][1] == {
        "type": "time_update",
        "formatted": "2026-11-21 12:00:00 UTC",
        "timestamp": "2026-11-21T12:00:00.520Z",
    }


def test_who_left_is_told_nothing_more(beat: Metronome, world: World) -> None:
    listener: Any = Listener(world)
    audience = beat.join(listener)
    world.run(2)
    told = len(listener.heard)
    audience.remove(listener)
    world.run(2)
    assert told == len(listener.heard) > 0


@pytest.mark.parametrize("jump", [-86_400, -5, 5, 86_400])
def test_after_the_clock_is_set_the_beat_goes_on(beat: Metronome, world: World, jump: int) -> None:
    listener = join(beat, world)
    world.run(2.5)
    told = len(listener.heard)
    world.now += jump
    world.run(3)
    assert 2 <= len(listener.heard) - told <= 4


def test_clock_set_during_the_beat_sends_no_burst_and_no_silence(
    beat: Metronome, world: World
) -> None:
    listener = join(beat, world)
    jumps = {NOON + 3: 3600.0, NOON + 3605: -3600.0}

    def set_clock(now: float) -> float:
        moment = next((moment for moment in jumps if abs(now - moment) < TICK), None)
        return now + jumps.pop(moment) if moment else now

    world.late = set_clock
    world.end = NOON + 4000
    with pytest.raises(Ending):
        sleep_until(world, 12)
    assert 10 <= len(listener.heard) <= 14


def sleep_until(world: World, seconds: float) -> None:
    """Run for so many seconds of sleeping, whatever the clock says."""
    slept, sleep = 0.0, world.sleep

    def counted(duration: float) -> None:
        nonlocal slept
        slept += duration
        if slept > seconds:
            raise Ending
        sleep(duration)

    world.sleep = counted  # type: ignore[assignment, method-assign]
    world.spawned[0]()
