"""asyncapi.json against live sockets: messages, close codes and refusals."""

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from rawsocket import BINARY, CLOSE, TEXT, Answer, RawSocket, close_frame, frame
from serving import REPOSITORY, Server

ASYNCAPI = REPOSITORY / "asyncapi.json"
DOCUMENT = json.loads(ASYNCAPI.read_text())
CHANNELS = DOCUMENT["channels"]
ECHO, TIME = (CHANNELS[name]["address"] for name in ("echo", "time"))
CLIENTS = Path(__file__).parent / "clients"
MAX_BYTES = 65_536
BUG = 1011  # not provoked
NOT_PROVOKED = {(500, "internal_error"), (503, "unavailable")}  # a bug, a lost database
PER_CALLER = 2
FEW_SOCKETS = {"MAX_SOCKETS": "3", "MAX_SOCKETS_PER_CALLER": str(PER_CALLER)}
FEW_SOCKETS["RATE_LIMITS"] = "free=1000/hour,one=1/day"

Key = tuple[int, str]


def address(channel: str, key: str) -> str:
    return f"{TIME}?api_key={key}" if channel == "time" else ECHO


def check(payload: Any, message: str) -> None:
    """Fails unless the payload is as the document says."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = DOCUMENT["components"]["messages"][message]["payload"]
    jsonschema.Draft7Validator(schema).validate(payload)


@pytest.mark.parametrize("name", list(DOCUMENT["components"]["messages"]))
def test_an_example_matches_its_payload(name: str) -> None:
    for example in DOCUMENT["components"]["messages"][name]["examples"]:
        check(example["payload"], name)


def test_echo_sends_what_is_described(server: Server) -> None:
    with RawSocket(server.port) as client:
        client.open(ECHO).send(frame(TEXT, b"hello"))

        check(client.frame().json(), "echo")


def test_time_sends_what_is_described(server: Server, server_key: str) -> None:
    with RawSocket(server.port) as client:
        client.open(address("time", server_key))

        check(client.frame().json(), "auth_success")
        check(client.frame().json(), "time_update")


@pytest.mark.parametrize("message", ["echo", "auth_success", "time_update"])
def test_a_message_is_described_under_its_type(message: str) -> None:
    schema = DOCUMENT["components"]["messages"][message]["payload"]

    assert schema["properties"]["type"]["const"] == message


def close_codes(server: Server, path: str) -> set[int]:
    """The codes that answer a right close and each kind of wrong frame."""
    wrong = [
        close_frame(1000),
        frame(TEXT, b"hi", masked=False),
        frame(BINARY, b"hi"),
        frame(TEXT, b"\xff"),
        frame(TEXT, b"x" * (MAX_BYTES + 1)),
    ]
    codes = set()
    for sent in wrong:
        with RawSocket(server.port) as client:
            client.open(path).send(sent)
            codes.add(last_code(client))
    return codes


def last_code(client: RawSocket) -> int:
    """The code with which the server closes, after whatever else it sends."""
    while (found := client.frame()).opcode != CLOSE:
        pass
    return found.close_code


def code_after_revoking(server: Server) -> int:
    key = server.new_key()
    with RawSocket(server.port) as client:
        client.open(address("time", key))
        server.flask("key", "revoke", key[8:16])
        return last_code(client)


@pytest.mark.parametrize("channel", list(CHANNELS))
def test_the_close_codes_are_those_described(start_server: StartServer, channel: str) -> None:
    described = {entry["code"] for entry in CHANNELS[channel]["x-close-codes"]}
    server = start_server()
    key = server.new_key()

    seen = close_codes(server, address(channel, key))
    if channel == "time":
        seen.add(code_after_revoking(server))
    with RawSocket(server.port) as client:
        client.open(address(channel, key))
        with ThreadPoolExecutor(1) as stopping:
            stopping.submit(server.stop)
            seen.add(last_code(client))

    assert seen == described - {BUG}


def refusals(server: Server, channel: str) -> dict[Key, Answer]:
    """Each refusal that can be provoked, by its status and code."""
    key, spent_key = server.new_key(), server.new_key(tier="one")
    path = address(channel, key)
    other = {"echo": address("time", key), "time": ECHO}[channel]

    def ask(path: str, **changes: str) -> Answer:
        headers: dict[str, str | None] = {
            name.replace("_", "-"): text for name, text in changes.items()
        }
        with RawSocket(server.port) as client:
            return client.handshake(path, headers)

    answers = [ask(path, Sec_WebSocket_Key="short"), ask(path, Sec_WebSocket_Version="8")]
    if channel == "time":
        with RawSocket(server.port) as client:
            client.request("/api/v1/protected/test", X_API_Key=spent_key)
        answers += [ask(TIME), ask(address("time", "nonsense")), ask(address("time", spent_key))]
    with ExitStack() as sockets:
        for _ in range(PER_CALLER):
            sockets.enter_context(RawSocket(server.port)).open(path)
        answers.append(ask(path))
        sockets.enter_context(RawSocket(server.port)).open(other)
        answers.append(ask(path))
    return {(answer.status, answer.json()["code"]): answer for answer in answers}


@pytest.mark.parametrize("channel", list(CHANNELS))
def test_the_refusals_are_those_described(start_server: StartServer, channel: str) -> None:
    entries = CHANNELS[channel]["x-refusals"]
    described = {(entry["status"], entry["code"]): entry.get("headers", []) for entry in entries}

    seen = refusals(start_server(**FEW_SOCKETS), channel)

    assert seen.keys() == described.keys() - NOT_PROVOKED
    assert {key: set(described[key]) - seen[key].headers.keys() for key in seen} == {
        key: set() for key in seen
    }


def test_asyncapi_validate_finds_nothing() -> None:
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    if not (CLIENTS / "node_modules/@asyncapi/parser").is_dir():
        pytest.skip("the npm package @asyncapi/parser is not installed in tests/clients")
    command = ["node", "validate_asyncapi.mjs", str(ASYNCAPI)]

    found = subprocess.run(command, cwd=CLIENTS, capture_output=True, text=True)

    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
