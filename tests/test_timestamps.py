"""A moment in each form of the API: always UTC, and cut off rather than rounded up."""

import time
from collections.abc import Iterator

import pytest

from protocol import timestamps as clock

LAST_SECOND = 1_795_305_599  # of 2026-11-21, UTC


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The server's own time zone is nine hours ahead of UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (LAST_SECOND, "2026-11-21T23:59:59.000Z"),
        (LAST_SECOND + 0.042, "2026-11-21T23:59:59.042Z"),
        (LAST_SECOND + 0.9999, "2026-11-21T23:59:59.999Z"),
        (1_709_164_800, "2024-02-29T00:00:00.000Z"),
    ],
)
def test_timestamp_has_milliseconds(moment: float, text: str) -> None:
    assert clock.timestamp(moment) == text


@pytest.mark.parametrize("moment", [LAST_SECOND, LAST_SECOND + 0.042, LAST_SECOND + 0.9999])
def test_date_time_has_whole_seconds(moment: float) -> None:
    assert clock.date_time(moment) == "2026-11-21T23:59:59Z"


@pytest.mark.parametrize("moment", [LAST_SECOND, LAST_SECOND + 0.042, LAST_SECOND + 0.9999])
def test_display_is_for_people(moment: float) -> None:
    assert clock.display(moment) == "2026-11-21 23:59:59 UTC"


@pytest.mark.usefixtures("elsewhere")
def test_in_another_time_zone_it_is_still_utc() -> None:
    assert clock.utc(LAST_SECOND).hour == 23
    assert clock.timestamp(LAST_SECOND) == "2026-11-21T23:59:59.000Z"
