"""The three forms in which a time is written: always in UTC, cut off and not rounded up."""

import time
from collections.abc import Iterator

import pytest

from protocol.timestamps import date_time, display, timestamp, utc

LAST_SECOND = 1_795_305_599  # of 2026-11-21, UTC


@pytest.fixture
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
        (LAST_SECOND, "2026-11-21T23:59:59.000Z"),
        (LAST_SECOND + 0.042, "2026-11-21T23:59:59.042Z"),
        (LAST_SECOND + 0.9999, "2026-11-21T23:59:59.999Z"),
        (1_709_164_800, "2024-02-29T00:00:00.000Z"),
    ],
)
def test_timestamp_has_milliseconds(seconds: float, text: str) -> None:
    assert timestamp(seconds) == text


@pytest.mark.parametrize("seconds", [LAST_SECOND, LAST_SECOND + 0.042, LAST_SECOND + 0.9999])
def test_date_time_has_whole_seconds(seconds: float) -> None:
    assert date_time(seconds) == "2026-11-21T23:59:59Z"


@pytest.mark.parametrize("seconds", [LAST_SECOND, LAST_SECOND + 0.042, LAST_SECOND + 0.9999])
def test_display_is_for_people(seconds: float) -> None:
    assert display(seconds) == "2026-11-21 23:59:59 UTC"


@pytest.mark.usefixtures("tokyo")
def test_in_another_time_zone_times_are_still_utc() -> None:
    assert utc(LAST_SECOND).hour == 23
    assert timestamp(LAST_SECOND) == "2026-11-21T23:59:59.000Z"
