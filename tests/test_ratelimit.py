"""The limiter alone, with a clock of the test: windows, counts, saving and memory."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ratelimit import SWEEP_SIZE, Limiter, Quota, Usage, parse_quotas

NOON = 1_795_262_400  # a Saturday in November 2026, 12:00:00 UTC
FIVE = Quota("five", 5, 60)
FREE = Quota("free", 1000, 3600)
PRO = Quota("pro", 10_000, 3600)


class Clock:
    """A clock that stands still until a test sets it."""

    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> Limiter:
    """Keeps a count until its window ends."""
    return Limiter(clock=clock)


@pytest.fixture
def saving(clock: Clock) -> Limiter:
    """Keeps a count until it is saved."""
    return Limiter(saves=True, clock=clock)


def use_up(limiter: Limiter, quota: Quota, key: str = "ada") -> None:
    for _ in range(quota.limit):
        assert limiter.hit(key, quota).accepted


# Windows


def test_first_request_leaves_the_rest(limiter: Limiter) -> None:
    allowance = limiter.hit("ada", FIVE)
    assert allowance == (FIVE, True, 4, NOON + 60, 60, 1)


def test_each_request_leaves_one_less(limiter: Limiter) -> None:
    assert [limiter.hit("ada", FIVE).remaining for _ in range(5)] == [4, 3, 2, 1, 0]


def test_used_up_is_refused(limiter: Limiter) -> None:
    use_up(limiter, FIVE)
    assert limiter.hit("ada", FIVE) == (FIVE, False, 0, NOON + 60, 60, 5)


def test_refused_requests_never_count(limiter: Limiter, clock: Clock) -> None:
    use_up(limiter, FIVE)
    for _ in range(100):
        limiter.hit("ada", FIVE)
    clock.now += 60
    assert limiter.hit("ada", FIVE)[1:3] == (True, 4)


def test_refused_requests_are_not_in_the_total(saving: Limiter, clock: Clock) -> None:
    use_up(saving, FIVE)
    assert saving.hit("ada", FIVE).total == 5
    clock.now += 60
    assert saving.hit("ada", FIVE).total == 6


def test_keys_do_not_share(limiter: Limiter) -> None:
    use_up(limiter, FIVE, "ada")
    assert limiter.hit("bob", FIVE).remaining == 4


@pytest.mark.parametrize(
    ("seconds", "into", "reset", "left"),
    [
        (1, 0, 1, 1),
        (1, 0.999, 1, 1),
        (60, 0, 60, 60),
        (60, 0.001, 60, 60),
        (60, 59, 60, 1),
        (60, 59.999, 60, 1),
        (60, 60, 120, 60),
        (3600, 1800.5, 3600, 1800),
        (86_400, 0, 43_200, 43_200),  # noon is half a day into the day's window
    ],
)
def test_windows_end_on_utc_boundaries(
    limiter: Limiter, clock: Clock, seconds: int, into: float, reset: int, left: int
) -> None:
    clock.now += into
    allowance = limiter.hit("ada", Quota("tier", 5, seconds))
    assert (allowance.reset, allowance.seconds_left) == (NOON + reset, left)


def test_window_stays_used_up_until_its_end(limiter: Limiter, clock: Clock) -> None:
    use_up(limiter, FIVE)
    clock.now += 59.999
    assert not limiter.hit("ada", FIVE).accepted


def test_new_window_has_the_whole_allowance(limiter: Limiter, clock: Clock) -> None:
    use_up(limiter, FIVE)
    clock.now += 60
    assert limiter.hit("ada", FIVE)[1:4] == (True, 4, NOON + 120)


def test_a_window_starts_at_its_boundary_not_at_the_first_request(
    limiter: Limiter, clock: Clock
) -> None:
    clock.now += 59
    use_up(limiter, FIVE)
    clock.now += 1
    assert limiter.hit("ada", FIVE).remaining == 4


@pytest.mark.parametrize("back", [1, 60, 86_400])
def test_window_does_not_open_again_when_the_clock_is_set_back(
    limiter: Limiter, clock: Clock, back: int
) -> None:
    use_up(limiter, FIVE)
    clock.now -= back
    assert limiter.hit("ada", FIVE)[1:4] == (False, 0, NOON + 60)


def test_window_of_a_clock_set_back_ends_at_its_time(limiter: Limiter, clock: Clock) -> None:
    use_up(limiter, FIVE)
    clock.now -= 60
    assert limiter.hit("ada", FIVE).seconds_left == 120


# Asking without counting


def test_a_cost_of_zero_counts_nothing(limiter: Limiter) -> None:
    limiter.hit("ada", FIVE)
    for _ in range(2):
        assert limiter.hit("ada", FIVE, cost=0) == (FIVE, True, 4, NOON + 60, 60, 1)


def test_asking_for_a_used_up_key_says_so(limiter: Limiter) -> None:
    use_up(limiter, FIVE)
    assert not limiter.hit("ada", FIVE, cost=0).accepted


def test_asking_in_a_new_window_shows_the_whole_allowance(limiter: Limiter, clock: Clock) -> None:
    use_up(limiter, FIVE)
    clock.now += 60
    assert limiter.hit("ada", FIVE, cost=0).remaining == 5


def test_asking_leaves_nothing_to_save(saving: Limiter) -> None:
    saving.hit("ada", FIVE, cost=0)
    assert saving.unsaved() == {}


# Another tier


def test_a_tier_with_the_same_window_keeps_what_was_used(limiter: Limiter) -> None:
    limiter.hit("ada", FREE)
    assert limiter.hit("ada", PRO).remaining == 9998


def test_a_tier_smaller_than_was_used_leaves_zero(limiter: Limiter) -> None:
    for _ in range(7):
        limiter.hit("ada", FREE)
    small = Quota("small", 5, 3600)
    assert limiter.hit("ada", small)[1:3] == (False, 0)


def test_a_tier_with_another_window_starts_at_zero(limiter: Limiter) -> None:
    limiter.hit("ada", FREE)
    assert limiter.hit("ada", FIVE).remaining == 4


def test_a_tier_change_keeps_the_total(limiter: Limiter) -> None:
    limiter.hit("ada", FREE)
    assert limiter.hit("ada", FIVE).total == 2


# Stored counts


def test_stored_counts_go_on(saving: Limiter) -> None:
    stored = Usage(total=40, reset=NOON + 60, used=3)
    assert saving.hit("ada", FIVE, stored)[1:] == (True, 1, NOON + 60, 60, 41)


def test_stored_counts_of_a_past_window_only_add_to_the_total(saving: Limiter) -> None:
    stored = Usage(total=40, reset=NOON, used=5)
    assert saving.hit("ada", FIVE, stored)[1:] == (True, 4, NOON + 60, 60, 41)


def test_stored_counts_are_ignored_while_there_are_unsaved_ones(saving: Limiter) -> None:
    saving.hit("ada", FIVE)
    stored = Usage(total=40, reset=NOON + 60, used=5)
    assert saving.hit("ada", FIVE, stored)[1:] == (True, 3, NOON + 60, 60, 2)


# Saving


def test_unsaved_are_the_requests_alone(saving: Limiter) -> None:
    stored = Usage(total=40, reset=NOON + 60, used=1)
    saving.hit("ada", FIVE, stored)
    saving.hit("ada", FIVE, stored)
    assert saving.unsaved() == {"ada": Usage(2, NOON + 60, 2)}


def test_unsaved_requests_of_a_past_window_only_add_to_the_total(
    saving: Limiter, clock: Clock
) -> None:
    saving.hit("ada", FIVE)
    assert saving.unsaved() == {"ada": Usage(1, NOON + 60, 1)}
    saving.hit("ada", FIVE)
    clock.now += 60
    saving.hit("ada", FIVE)
    assert saving.unsaved() == {"ada": Usage(3, NOON + 120, 1)}


def test_counts_are_unsaved_until_they_are_saved(saving: Limiter) -> None:
    saving.hit("ada", FIVE)
    for _ in range(2):
        assert saving.unsaved() == {"ada": Usage(1, NOON + 60, 1)}
    saving.saved()
    assert saving.unsaved() == {}


def test_requests_counted_during_a_save_are_unsaved(saving: Limiter) -> None:
    saving.hit("ada", FIVE)
    saving.unsaved()
    saving.hit("ada", FIVE)
    saving.hit("bob", FIVE)
    saving.saved()
    assert saving.unsaved() == dict.fromkeys(["ada", "bob"], Usage(1, NOON + 60, 1))


def test_saved_counts_go_on(saving: Limiter) -> None:
    saving.hit("ada", FIVE)
    saving.unsaved()
    saving.saved()
    assert saving.hit("ada", FIVE).remaining == 3
    assert saving.unsaved() == {"ada": Usage(1, NOON + 60, 1)}


def test_counts_that_are_forgotten_go_on_with_what_is_stored(saving: Limiter) -> None:
    saving.hit("ada", FIVE)
    saving.unsaved()
    saving.saved()
    saving.forget()
    assert saving.hit("ada", FIVE, Usage(total=40, reset=NOON + 60, used=3)).remaining == 1
    assert saving.unsaved() == {"ada": Usage(1, NOON + 60, 1)}


@pytest.mark.parametrize("committed", [True, False])
def test_requests_that_are_being_saved_count_once(saving: Limiter, committed: bool) -> None:
    saving.hit("ada", FIVE)
    saving.unsaved()
    saving.hit("ada", FIVE)
    saving.forget()
    stored = Usage(total=committed, reset=NOON + 60, used=committed)
    assert saving.hit("ada", FIVE, stored)[1:] == (True, 2, NOON + 60, 60, 3)


def test_requests_that_are_saved_after_they_were_forgotten_still_limit(saving: Limiter) -> None:
    saving.hit("ada", FIVE)
    saving.forget()
    saving.unsaved()
    stored = Usage(total=3, reset=NOON + 60, used=3)
    assert saving.hit("ada", FIVE, stored).remaining == 0


def test_requests_counted_during_a_save_still_limit(saving: Limiter) -> None:
    saving.hit("ada", FIVE)
    saving.unsaved()
    saving.hit("ada", FIVE)
    saving.saved()
    saving.forget()
    stored = Usage(total=3, reset=NOON + 60, used=3)
    assert saving.hit("ada", FIVE, stored).remaining == 0


def test_refused_requests_leave_nothing_to_save(saving: Limiter) -> None:
    saving.hit("ada", FIVE, Usage(total=5, reset=NOON + 60, used=5))
    assert saving.unsaved() == {}


def test_limiter_that_does_not_save_has_nothing_to_save(limiter: Limiter) -> None:
    limiter.hit("ada", FIVE)
    assert limiter.unsaved() == {}


# Memory


def counters(limiter: Limiter) -> int:
    return len(limiter._usage)


def visit(limiter: Limiter, clock: Clock, keys: int) -> int:
    """One request of each key, a second apart; returns the most counters there were."""
    most = 0
    for number in range(keys):
        clock.now += 1
        limiter.hit(f"visitor {number}", FIVE)
        most = max(most, counters(limiter))
    return most


def test_past_windows_are_dropped(limiter: Limiter, clock: Clock) -> None:
    assert visit(limiter, clock, 10 * SWEEP_SIZE) <= SWEEP_SIZE


def test_present_windows_are_never_dropped(limiter: Limiter) -> None:
    use_up(limiter, FIVE)
    for number in range(3 * SWEEP_SIZE):
        limiter.hit(f"visitor {number}", FIVE)
    assert not limiter.hit("ada", FIVE).accepted


def test_unsaved_counts_are_never_dropped(saving: Limiter, clock: Clock) -> None:
    visit(saving, clock, 3 * SWEEP_SIZE)
    assert len(saving.unsaved()) == 3 * SWEEP_SIZE


def test_unsaved_counts_add_to_what_is_stored_when_the_rest_is_forgotten(saving: Limiter) -> None:
    saving.hit("ada", FIVE)
    saving.unsaved()
    saving.saved()
    saving.hit("ada", FIVE)
    saving.forget()
    assert counters(saving) == 0
    stored = Usage(total=40, reset=NOON + 60, used=2)
    assert saving.hit("ada", FIVE, stored)[1:] == (True, 1, NOON + 60, 60, 42)


# Threads


class Yielding(str):
    """A key whose hash lets another thread run."""

    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()


@pytest.fixture
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching_often")
def test_threads_together_get_no_more_than_the_allowance(saving: Limiter) -> None:
    quota = Quota("shared", 1000, 3600)
    with ThreadPoolExecutor(8) as threads:
        hits = list(threads.map(lambda _: saving.hit(Yielding("ada"), quota), range(1200)))
    left = sorted(hit.remaining for hit in hits if hit.accepted)
    assert left == list(range(1000))


def take(limiter: Limiter) -> int:
    """Saves, and returns how many requests there were."""
    total = sum(requests.total for requests in limiter.unsaved().values())
    limiter.saved()
    return total


@pytest.mark.usefixtures("switching_often")
def test_threads_lose_no_count_during_saves(saving: Limiter) -> None:
    taken = 0
    with ThreadPoolExecutor(8) as threads:
        for _ in range(800):
            threads.submit(saving.hit, Yielding("ada"), FREE)
            taken += take(saving)
    taken += take(saving)
    assert taken == 800


# Reading RATE_LIMITS


@pytest.mark.parametrize(
    ("text", "quotas"),
    [
        ("free=1/second", [Quota("free", 1, 1)]),
        ("free=60/minute", [Quota("free", 60, 60)]),
        ("free=1000/hour", [Quota("free", 1000, 3600)]),
        ("free=999999999999/day", [Quota("free", 999_999_999_999, 86_400)]),
        ("free=1000/hour,pro=10000/hour", [FREE, PRO]),
        (" free=1000/hour , pro=10000/hour ", [FREE, PRO]),
        ("pro=10000/hour,free=1000/hour", [PRO, FREE]),
        ("free=1/day,a-b_2=2/day", [Quota("free", 1, 86_400), Quota("a-b_2", 2, 86_400)]),
    ],
)
def test_quotas_are_read_as_written(text: str, quotas: list[Quota]) -> None:
    assert list(parse_quotas(text).items()) == [(quota.tier, quota) for quota in quotas]


@pytest.mark.parametrize(
    "part",
    [
        "",
        "free",
        "free=",
        "free=1000",
        "free=1000/",
        "free=/hour",
        "free=0/hour",
        "free=-1/hour",
        "free=+1/hour",
        "free=1.5/hour",
        "free=1e3/hour",
        "free=1_000/hour",
        "free=01/hour",
        "free=1234567890123/hour",
        "free=\u0661/hour",  # an Arabic digit
        "free=1000/week",
        "free=1000/hours",
        "free=1000/Hour",
        "free=1000/ hour",
        "free=1000 per hour",
        "free:1000/hour",
        "free=1000/hour;pro=1/hour",
        "=1000/hour",
        "Free=1000/hour",
        "2nd=1000/hour",
        'fr"ee=1000/hour',
        "fr ee=1000/hour",
        f"{'f' * 33}=1000/hour",
    ],
)
def test_a_mistake_is_quoted_with_an_example(part: str) -> None:
    with pytest.raises(ValueError, match="is not like free=1000/hour") as mistake:
        parse_quotas(f"free=1000/hour,{part}" if part else part)
    assert str(mistake.value).startswith(repr(part))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("free=1/hour,", "'' is not like free=1000/hour"),
        ("free=1/hour,,pro=1/hour", "'' is not like free=1000/hour"),
        ("free=1/hour,free=2/hour", "tier 'free' is given twice"),
        ("pro=1/hour", "tier 'free' is missing"),
    ],
)
def test_a_mistake_in_the_list_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        parse_quotas(text)
