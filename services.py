"""What an app consists of besides its routes, in one typed object."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flask import current_app

from ratelimit import Limiter
from settings import Settings
from storage import Store

if TYPE_CHECKING:  # these modules import this one
    from auth import Guard
    from sockets import OpenSockets, Ticker


@dataclass
class Services:
    """Made by create_app, and kept in `app.extensions["services"]`."""

    settings: Settings
    store: Store
    guard: "Guard"
    sockets: "OpenSockets"
    ticker: "Ticker"
    throttles: Limiter = field(default_factory=Limiter)  # attempts to log in and sign up


def services() -> Services:
    """Those of the current app."""
    return current_app.extensions["services"]
