"""How moments are written."""

from helpers.clock import NOON
from service.timestamps import display, timestamp


def test_every_millisecond_is_written_as_it_is() -> None:
    """In binary, most of them are a little more or less than what is meant."""
    moments = {f"2026-11-21T12:00:00.{number:03}Z": NOON + number / 1000 for number in range(1000)}
    assert [timestamp(moment) for moment in moments.values()] == [*moments]
    assert timestamp(NOON + 0.9996) == "2026-11-21T12:00:00.999Z"
    assert [*map(display, (NOON + 0.9999998, -(10**13), 10**13))] == [
        *("2026-11-21 12:00:00 UTC", "1970-01-01 00:00:00 UTC", "9999-12-31 23:59:59 UTC")
    ], "a number that was edited by hand is no error: see utc"
