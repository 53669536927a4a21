"""Who counts as one caller, where callers are told apart by their address."""

from ipaddress import IPv6Address, ip_address


def caller(address: str | None) -> str:
    """The address; for IPv6 its /64 network, because a single customer usually has all of it."""
    try:
        found = ip_address(address or "")
    except ValueError:  # a Unix socket has none
        return address or ""
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64)
    return str(found)
