"""Who counts as one caller, where callers are told apart by their address."""

import re
from ipaddress import IPv6Address, ip_address

WITH_PORT = re.compile(r"^\[(.*)\](?::\d+)?$|^([^:]*):\d+$")  # some proxies append it


def caller(address: str | None) -> str:
    """The address; for IPv6 its /64 network, because a single customer usually has all of it.

    Everything that is no address is one caller: a Unix socket has none, and a client might write
    another text for each request into a header.
    """
    try:
        found = ip_address(WITH_PORT.sub(r"\1\2", address or ""))
    except ValueError:
        return ""
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64)
    return str(found)
