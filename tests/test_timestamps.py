"""The three forms in which a time is written: always in UTC, cut off and not rounded up."""

import time
from collections.abc import Iterator

import pytest

from protocol.timestamps import date_time, display, timestamp, utc

LAST = 1_795_305_599  # the last second of 2026-11-21, UTC


@pytest.fixture(autouse=True)
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The time zone of this process is nine hours ahead of UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (LAST, "2026-11-21T23:59:59.000Z"),
        (LAST + 0.042, "2026-11-21T23:59:59.042Z"),
        (LAST + 0.9999, "2026-11-21T23:59:59.999Z"),
        (1_709_164_800, "2024-02-29T00:00:00.000Z"),
    ],
)
def test_timestamp_has_milliseconds(seconds: float, text: str) -> None:
    assert timestamp(seconds) == text


@pytest.mark.parametrize("seconds", [LAST, LAST + 0.042, LAST + 0.9999])
def test_other_forms_have_whole_seconds(seconds: float) -> None:
    assert date_time(seconds) == "2026-11-21T23:59:59Z"
    assert display(seconds) == "2026-11-21 23:59:59 UTC"


def test_year_is_that_of_utc() -> None:
    """In Tokyo the next one has begun."""
    assert utc(1_798_761_599).year == 2026
