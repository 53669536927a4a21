"""Who is one caller."""

import pytest

from protocol.addresses import caller


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
