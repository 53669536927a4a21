"""asyncapi.json against live sockets: messages, close codes, and refusals."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from rawsocket import TEXT, Answer, RawSocket, frame
from serving import REPOSITORY, Server

pytestmark = pytest.mark.ci

DOCUMENT = json.loads((REPOSITORY / "docs" / "asyncapi.json").read_text())
CHANNELS, MESSAGES = DOCUMENT["channels"], DOCUMENT["components"]["messages"]
ECHO, TIME = (CHANNELS[name]["address"] for name in ("echo", "time"))
NOT_PROVOKED = {(500, "internal_error"), (503, "unavailable")}  # a bug, a lost database
SETTINGS = {"MAX_SOCKETS": "3", "MAX_SOCKETS_PER_CALLER": "2"}
SETTINGS["RATE_LIMITS"] = "free=1000/hour,one=1/day"


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with closing(Server(tmp_path_factory.mktemp("asyncapi"), **SETTINGS)) as server:
        yield server.start()


def address(channel: str, key: str) -> str:
    return f"{TIME}?api_key={key}" if channel == "time" else ECHO


def check(payload: Any, message: str) -> None:
    """Fails unless the payload is as the document says."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.Draft7Validator(MESSAGES[message]["payload"]).validate(payload)


def test_messages_and_examples_are_as_described(described: Server) -> None:
    for name, message in MESSAGES.items():
        for example in message["examples"]:
            check(example["payload"], name)
    with RawSocket(described.port) as client:
        client.open(ECHO).send(frame(TEXT, b"hello"))
        check(client.frame().json(), "echo")
    with RawSocket(described.port) as client:
        client.open(address("time", described.new_key()))
        check(client.frame().json(), "auth_success")
        check(client.frame().json(), "time_update")


def refusals(server: Server, channel: str) -> dict[tuple[int, str], Answer]:
    """Each refusal that can be provoked, by its status and code."""
    key, spent_key = server.new_key(), server.new_key(tier="one")
    path = address(channel, key)

    def ask(path: str, **changes: str) -> Answer:
        with RawSocket(server.port) as client:
            return client.handshake(path, {k.replace("_", "-"): v for k, v in changes.items()})

    answers = [ask(path, Sec_WebSocket_Key="short"), ask(path, Sec_WebSocket_Version="8")]
    if channel == "time":
        with RawSocket(server.port) as client:
            client.request("/api/v1/protected/test", X_API_Key=spent_key)
        answers += [ask(TIME), ask(address("time", "nonsense")), ask(address("time", spent_key))]
    with ExitStack() as sockets:
        for _ in range(int(SETTINGS["MAX_SOCKETS_PER_CALLER"])):
            sockets.enter_context(RawSocket(server.port)).open(path)
        answers.append(ask(path))
        other = ECHO if channel == "time" else address("time", key)
        sockets.enter_context(RawSocket(server.port)).open(other)
        answers.append(ask(path))
    return {(answer.status, answer.json()["code"]): answer for answer in answers}


@pytest.mark.parametrize("channel", list(CHANNELS))
def test_the_refusals_are_those_described(described: Server, channel: str) -> None:
    entries = CHANNELS[channel]["x-refusals"]
    headers = {(entry["status"], entry["code"]): entry.get("headers", []) for entry in entries}
    seen = refusals(described, channel)
    assert seen.keys() == headers.keys() - NOT_PROVOKED
    assert not [case for case in seen if set(headers[case]) - seen[case].headers.keys()]
