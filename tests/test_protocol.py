"""How times are written, who is one caller, and how input is discarded at a close."""

import time
from collections.abc import Iterator

import pytest

from protocol.addresses import caller
from protocol.timestamps import date_time, display, timestamp, utc

LAST = 1_798_761_599  # the last second of 2026, UTC


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The time zone of this process is nine hours ahead of UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("tokyo")
@pytest.mark.parametrize(
    ("fraction", "milliseconds"), [(0, "000"), (0.042, "042"), (0.9999, "999")]
)
def test_time_has_three_forms(fraction: float, milliseconds: str) -> None:
    assert timestamp(LAST + fraction) == f"2026-12-31T23:59:59.{milliseconds}Z"
    assert date_time(LAST + fraction) == "2026-12-31T23:59:59Z"
    assert display(LAST + fraction) == "2026-12-31 23:59:59 UTC"
    assert utc(LAST + fraction).year == 2026, "in Tokyo the next one has begun"


@pytest.mark.parametrize(
    ("address", "who"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:3::6", "2001:db8:1:3::"),
        ("::ffff:203.0.113.7", "203.0.113.7"),  # IPv4, as a socket for both shows it
        ("fe80::1%eth0", "fe80::"),
        ("unknown", "unknown"),
        (None, ""),  # a Unix socket
    ],
)
def test_ipv6_address_is_one_caller_with_its_64(address: str | None, who: str) -> None:
    assert caller(address) == who
