"""The limiter alone, with a clock of the test; and how RATE_LIMITS is read."""

import re

import pytest

from helpers.clock import NOON, Clock
from ratelimit import Limiter, Quota, Usage, parse_quotas, tiers_for_users

FIVE = Quota("five", 5, 60)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> Limiter:
    return Limiter(clock.time)


def use_up(limiter: Limiter, quota: Quota) -> None:
    assert all(limiter.hit("ada", quota).accepted for _ in range(quota.limit))


@pytest.mark.parametrize("back", [1, 60])
def test_clock_set_back_opens_no_window(limiter: Limiter, clock: Clock, back: int) -> None:
    use_up(limiter, FIVE._replace(limit=4))
    clock.now -= back
    assert [limiter.hit("ada", FIVE) for _ in range(2)] == [
        (FIVE, accepted, 0, NOON + 60, 60 + back, 5) for accepted in (True, False)
    ], "a second window would double the allowance: see Quota.window_ends"


@pytest.mark.parametrize(("window", "ahead"), [(60, 121), (60, 86_400), (1, 3), (1, 60)])
def test_clock_set_far_back_is_right(
    limiter: Limiter, clock: Clock, window: int, ahead: int
) -> None:
    quota = FIVE._replace(seconds=window)
    clock.now += ahead
    use_up(limiter, quota)
    clock.now -= ahead
    use_up(limiter, quota)
    assert limiter.hit("ada", quota) == (quota, False, 0, NOON + window, window, 10), (
        "a window far ahead is another one: see Quota.window_ends and Usage.followed_by"
    )


def test_total_goes_on_when_the_window_turns(limiter: Limiter, clock: Clock) -> None:
    """Of what is stored, and of what is only counted."""
    assert [
        limiter.hit("ada", FIVE, Usage(total=100, reset=NOON + 60, used=3))
        for clock.now in (NOON, NOON + 0.5, NOON + 60)
    ] == [  # the seconds that are left are rounded up
        (FIVE, True, 1, NOON + 60, 60, 101),
        (FIVE, True, 0, NOON + 60, 60, 102),
        (FIVE, True, 4, NOON + 120, 60, 103),
    ]


def test_users_may_choose_tiers_that_allow_no_more_than_free() -> None:
    """Neither at once nor on average, and `free` comes first."""
    assert [
        *tiers_for_users(
            parse_quotas(
                "many=61/day,fast=2/minute,once=1/day,free=60/hour,same=60/hour,steady=1/minute"
            )
        )
    ] == ["free", "once", "same", "steady"], (
        "a user could choose more than free allows: see tiers_for_users, and UNITS"
    )


MALFORMED = [
    *("", "free", "free=0/hour", "free=01/hour", "free=1234567890123/hour", "free=1000/fortnight"),
    *("Free=1000/hour", "2nd=1000/hour", 'fr"ee=1000/hour', f"{'f' * 33}=1000/hour"),
    "free=\u0661/hour",  # an Arabic digit
]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        *((f"pro=1/day,{part}", f"{part!r} is not like free=1000/hour (at") for part in MALFORMED),
        ("free=1/hour,free=2/hour", "tier 'free' is given twice"),
        ("pro=1/hour", "tier 'free' is missing"),
    ],
)
def test_mistake_is_named(text: str, mistake: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(mistake)}"):
        parse_quotas(text)
