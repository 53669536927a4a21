"""Proxies in front of the service: whose address is believed, and who is one caller."""

import dataclasses

import pytest
from flask import request

import app as service
from helpers.server import Server
from service.client_address import client_network
from settings import Settings, load

FORWARDED = {
    "X-Forwarded-Proto": "http, HTTPS",
    "X-Forwarded-Host": "mallory.example",
    "X-Forwarded-Prefix": "/mallory",
    "Forwarded": "for=203.0.113.9;host=mallory.example",
}
CLIENT = "203.0.113.7"
CHAINS = {  # X-Forwarded-For as each platform sends it; the first is the client
    "": ["127.0.0.1"],  # nobody is in front, so the address is that of the connection
    "DYNO": [CLIENT],
    "FLY_APP_NAME": [CLIENT, "66.241.124.5"],
    "RENDER": [CLIENT, "172.68.1.9", "10.214.3.4"],
    "RAILWAY_ENVIRONMENT": [CLIENT, "152.233.1.9"],
    "RAILWAY_ENVIRONMENT_NAME": [CLIENT, "152.233.1.9"],
}


def seen(config: Settings, hops: int, headers: dict[str, str]) -> str:
    """What a service behind so many routers takes for the caller's address and for its own."""
    app = service.create_app(dataclasses.replace(config, proxy_hops=hops))
    app.add_url_rule("/seen", "seen", lambda: f"{request.remote_addr} {request.root_url}")
    return app.test_client().get("/seen", headers=headers).text


@pytest.mark.parametrize("spoofed", [[], ["198.51.100.1", "10.0.0.1", "unknown", ""], ['"'], [","]])
@pytest.mark.parametrize("platform", CHAINS)
def test_platform_gives_the_address(config: Settings, platform: str, spoofed: list[str]) -> None:
    headers = FORWARDED | {"X-Forwarded-For": ", ".join(spoofed + CHAINS[platform])}
    assert seen(config, load({platform: "anything"}).proxy_hops, headers) == (
        f"{CHAINS[platform][0]} {'https' if platform else 'http'}://localhost/"
    )


@pytest.mark.parametrize("entries", ["", CLIENT])
def test_address_stays_if_a_router_is_missing(config: Settings, entries: str) -> None:
    headers = {"X-Forwarded-For": entries, "X-Forwarded-Proto": "https, gopher"}
    assert seen(config, 2, headers) == "127.0.0.1 http://localhost/"


def test_gunicorn_believes_no_header_about_the_scheme(server: Server) -> None:
    """It would by default, because it takes every address for a proxy's."""
    answer = server.ask("/log-in", X_Forwarded_Proto="https", X_Forwarded_Ssl="on")
    assert "Strict-Transport-Security" not in answer.headers


@pytest.mark.parametrize(
    ("address", "who"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:3:8004:5:6:7", "2001:db8:1:3::"),
        ("::ffff:203.0.113.7", "203.0.113.7"),  # IPv4, as a socket for both shows it
        ("fe80::1%eth0", "fe80::"),
        ("203.0.113.7:40000", "203.0.113.7"),  # as Azure's gateways write it
        ("[2001:db8::1]:443", "2001:db8::"),
        ("[2001:db8::1]", "2001:db8::"),
        ("2001:db8::1:443", "2001:db8::"),
        ("203.0.113.7:x", ""),
        ("unknown", ""),
        ("_made-up", ""),
        (None, ""),  # a Unix socket
    ],
)
def test_one_caller_is_an_address_or_a_64_of_ipv6(address: str | None, who: str) -> None:
    assert client_network(address) == who
