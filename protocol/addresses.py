"""Who counts as one caller, where callers are told apart by their address."""

from ipaddress import IPv6Address, ip_address


def caller(address: str | None) -> str:
    """The address; of an IPv6 address the /64, because a single customer has all of that."""
    try:
        found = ip_address(address or "")
    except ValueError:  # a Unix socket has none
        return address or ""
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64)
    return str(found)
