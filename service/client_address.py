"""Which client sent a request: its address, also behind routers."""

import re
from ipaddress import IPv6Address, ip_address


def trust_routers(environ: dict[str, str], hops: int) -> None:
    """Take the client's address and scheme from what the routers in front have appended.

    The entries are counted from the end, because a client can send anything before them. (The
    ProxyFix of werkzeug would parse all of them, and none if a quote is not closed.)
    """
    entries = environ.get("HTTP_X_FORWARDED_FOR", "").rsplit(",", hops)[-hops:]
    if len(entries) == hops and (address := entries[0].strip()):
        environ["REMOTE_ADDR"] = address
    scheme = environ.get("HTTP_X_FORWARDED_PROTO", "").rpartition(",")[2].strip().lower()
    if scheme in ("http", "https"):
        environ["wsgi.url_scheme"] = scheme


def client_network(address: str | None) -> str:
    """The address; for IPv6 its /64 network, because a single customer usually has all of it.

    All clients without a valid address count as one: clients of a Unix socket have none, and a
    client might send another text in a header with each request.
    """
    without_port = re.sub(r"^\[(.*)\](?::\d+)?$|^([^:]*):\d+$", r"\1\2", address or "")
    try:
        found = ip_address(without_port)
    except ValueError:
        return ""
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64)
    return str(found)
