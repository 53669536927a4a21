"""asyncapi.json against live sockets (its refusals and close codes: test_readme.py)."""

import json
from typing import Any

import pytest

from rawsocket import TEXT, RawSocket, frame
from serving import REPOSITORY, Server

pytestmark = pytest.mark.ci

DOCUMENT = json.loads((REPOSITORY / "docs" / "asyncapi.json").read_text())
MESSAGES = DOCUMENT["components"]["messages"]
ECHO, TIME = (DOCUMENT["channels"][name]["address"] for name in ("echo", "time"))


def check(payload: Any, message: str) -> None:
    """Fails unless the payload is as the document says."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.Draft7Validator(MESSAGES[message]["payload"]).validate(payload)


def test_messages_and_examples_are_as_described(server: Server, server_key: str) -> None:
    for name, message in MESSAGES.items():
        for example in message["examples"]:
            check(example["payload"], name)
    with RawSocket(server.port) as client:
        client.open(ECHO).send(frame(TEXT, b"hello"))
        check(client.frame().json(), "echo")
    with RawSocket(server.port) as client:
        client.open(f"{TIME}?api_key={server_key}")
        check(client.frame().json(), "auth_success")
        check(client.frame().json(), "time_update")
