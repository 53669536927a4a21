"""What an app consists of besides its routes, in one typed object."""

from dataclasses import dataclass, field

from flask import current_app

from protocol.open_sockets import OpenSockets, Ticker
from ratelimit import Limiter
from settings import Settings
from storage import Store
from storage.outage import Outage


@dataclass
class Services:
    """Made by create_app, and kept in `app.extensions["services"]`."""

    settings: Settings
    store: Store
    sockets: OpenSockets
    ticker: Ticker = field(default_factory=Ticker)
    outage: Outage = field(default_factory=Outage)
    throttles: Limiter = field(default_factory=Limiter)  # attempts to log in and sign up
    attempts: list[str] = field(default_factory=list)  # the callers of those in progress


def services() -> Services:
    """Those of the current app."""
    return current_app.extensions["services"]
