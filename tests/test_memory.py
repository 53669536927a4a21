"""What strangers send is not kept, whatever it is, and however often it comes."""

import gc
import itertools
import time
from collections import deque
from functools import lru_cache
from typing import Any

import pytest
from flask.testing import FlaskClient

from helpers.paths import TEST, YEAR
from helpers.server import random_key
from server.log import redact
from service.application import Service
from web import forms
from ws.connection import frame
from ws.open_sockets import open_sockets_of

CACHE: Any = type(lru_cache(len))
FEW = 220  # sqlite3 keeps references to as many cursors


def knock(client: FlaskClient, number: int) -> None:
    """With a key, a path, a name and an address that nobody else has."""
    headers = {"X-API-Key": random_key(), "Host": f"host{number}", "Cookie": f"a{number}=b"}
    address = {"REMOTE_ADDR": f"10.1.{number // 250}.{number % 250}"}
    for path in (TEST, YEAR, "/", f"/api/v1/{number}", f"/{number}?{number}={number}"):
        client.get(path, headers=headers, environ_base=address)
    client.post(
        "/log-in",
        data={"username": f"user{number}", "password": "x" * 300},
        headers=headers,
        environ_base=address,
    )
    sockets = open_sockets_of(client.application)
    sockets.release(sockets.reserve(address["REMOTE_ADDR"]))
    redact(str(frame(message=number)))  # what is logged, and what is sent to a socket


def containers() -> dict[int, tuple[int, Any]]:
    """The number of entries of each list, set, dict and cache."""
    gc.collect()
    kept = gc.get_objects()
    kept += [each for each in gc.get_referents(*kept) if type(each) is dict]  # may be untracked
    return {
        id(each): (each.cache_info().currsize if isinstance(each, CACHE) else len(each), each)
        for each in kept
        if isinstance(each, CACHE | dict | list | set | deque)
    }


def test_nothing_of_strangers_is_kept(app: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "BUCKETS", 50)  # which are soon all in use
    client = FlaskClient(app, use_cookies=False)  # the quickest one
    # Half a second passes between two looks, so that nothing is kept of each second either.
    monkeypatch.setattr(time, "time", itertools.count(time.time(), 0.5).__next__)
    for number in range(100):  # bounded caches fill
        knock(client, number)
    before = containers()
    for number in range(100, 340):  # more than FEW
        knock(client, number)
    for name, (size, each) in containers().items():
        assert size - before.get(name, (size, None))[0] < FEW, (
            f"this grows with strangers: {str(getattr(each, '__wrapped__', each))[:200]}"
        )
