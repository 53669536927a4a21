"""The limiter alone, with a clock of the test; and how RATE_LIMITS is read."""

from types import SimpleNamespace

import pytest

from ratelimit import Limiter, Quota, Usage, parse_quotas

NOON = 1_795_262_400  # a Saturday in November 2026, 12:00:00 UTC
FIVE = Quota("five", 5, 60)


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=NOON)


@pytest.fixture
def limiter(clock: SimpleNamespace) -> Limiter:
    return Limiter(lambda: clock.now)


def use_up(limiter: Limiter, quota: Quota = FIVE) -> None:
    assert all(limiter.hit("ada", quota).accepted for _ in range(quota.limit))


# Windows


def test_each_request_leaves_one_less_until_none_is_accepted(limiter: Limiter) -> None:
    allowances = [limiter.hit("ada", FIVE) for _ in range(6)]
    assert allowances == [
        *((FIVE, True, 5 - total, NOON + 60, 60, total) for total in range(1, 6)),
        (FIVE, False, 0, NOON + 60, 60, 5),
    ]


def test_refused_requests_are_never_counted(limiter: Limiter, clock: SimpleNamespace) -> None:
    use_up(limiter)
    for _ in range(100):
        limiter.hit("ada", FIVE)
    assert limiter.counted == {"ada": Usage(5, NOON + 60, 5)}
    assert limiter.hit("bob", FIVE).remaining == 4, "keys do not share"
    clock.now += 59.999
    assert not limiter.hit("ada", FIVE).accepted
    clock.now = NOON + 60
    assert limiter.hit("ada", FIVE)[1:] == (True, 4, NOON + 120, 60, 6)


@pytest.mark.parametrize(
    ("seconds", "into", "reset", "left"),
    [
        (1, 0.999, 1, 1),
        (60, 0, 60, 60),
        (60, 0.001, 60, 60),
        (60, 59.999, 60, 1),
        (60, 60, 120, 60),
        (3600, 1800.5, 3600, 1800),
        (86_400, 0, 43_200, 43_200),  # noon is half a day into the day's window
    ],
)
def test_windows_end_on_utc_boundaries(
    limiter: Limiter, clock: SimpleNamespace, seconds: int, into: float, reset: int, left: int
) -> None:
    clock.now += into
    allowance = limiter.hit("ada", Quota("tier", 5, seconds))
    assert (allowance.reset, allowance.seconds_left) == (NOON + reset, left)


def test_cost_of_zero_only_asks(limiter: Limiter) -> None:
    assert limiter.hit("ada", FIVE, cost=0).remaining == 5
    assert limiter.counted == {}
    use_up(limiter)
    assert limiter.hit("ada", FIVE, cost=0) == (FIVE, False, 0, NOON + 60, 60, 5)


# A clock that is set


@pytest.mark.parametrize("back", [1, 60])
def test_clock_set_back_by_a_minute_opens_no_window_again(
    limiter: Limiter, clock: SimpleNamespace, back: int
) -> None:
    use_up(limiter)
    clock.now -= back
    assert limiter.hit("ada", FIVE) == (FIVE, False, 0, NOON + 60, 60 + back, 5)


@pytest.mark.parametrize("ahead", [61, 86_400])
def test_clock_that_was_ahead_by_more_is_believed_when_it_is_set_back(
    limiter: Limiter, clock: SimpleNamespace, ahead: int
) -> None:
    clock.now += ahead
    use_up(limiter)
    clock.now -= ahead
    use_up(limiter)
    assert limiter.hit("ada", FIVE) == (FIVE, False, 0, NOON + 60, 60, 10)


# What is stored (test_storage.py shows that the databases follow the same rule)


def test_counted_are_the_requests_since_the_last_forget(
    limiter: Limiter, clock: SimpleNamespace
) -> None:
    stored = Usage(total=40, reset=NOON + 60, used=2)
    assert limiter.hit("ada", FIVE, stored).total == 41
    assert limiter.hit("ada", FIVE, stored).remaining == 1
    assert limiter.counted == {"ada": Usage(2, NOON + 60, 2)}
    clock.now += 60
    limiter.hit("ada", FIVE, stored)
    assert limiter.counted == {"ada": Usage(3, NOON + 120, 1)}

    limiter.forget()
    assert limiter.counted == {}
    saved = Usage(total=43, reset=NOON + 120, used=1)
    assert limiter.hit("ada", FIVE, saved)[1:] == (True, 3, NOON + 120, 60, 44)


# RATE_LIMITS


@pytest.mark.parametrize(
    ("text", "quotas"),
    [
        ("free=1/second", [Quota("free", 1, 1)]),
        ("free=999999999999/day", [Quota("free", 999_999_999_999, 86_400)]),
        (" a-b_2=2/hour , free=1/day ", [Quota("a-b_2", 2, 3600), Quota("free", 1, 86_400)]),
    ],
)
def test_quotas_are_read_as_written(text: str, quotas: list[Quota]) -> None:
    assert list(parse_quotas(text).items()) == [(quota.tier, quota) for quota in quotas]


@pytest.mark.parametrize(
    "part",
    [
        "",
        "free",
        "free=0/hour",
        "free=01/hour",
        "free=1234567890123/hour",
        "free=\u0661/hour",  # an Arabic digit
        "free=1000/fortnight",
        "Free=1000/hour",
        "2nd=1000/hour",
        'fr"ee=1000/hour',
        f"{'f' * 33}=1000/hour",
    ],
)
def test_mistake_is_quoted_with_an_example(part: str) -> None:
    with pytest.raises(ValueError, match=r"like free=1000/hour \(units: second, m") as mistake:
        parse_quotas(f"pro=1000/hour,{part}")
    assert str(mistake.value).startswith(repr(part))


def test_mistake_in_the_list_is_named() -> None:
    with pytest.raises(ValueError, match=r"^tier 'free' is given twice$"):
        parse_quotas("free=1/hour,free=2/hour")
    with pytest.raises(ValueError, match=r"^tier 'free' is missing$"):
        parse_quotas("pro=1/hour")
