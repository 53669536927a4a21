"""Responses without an end: they end with their key and at a stop, wherever one is added."""

import time
from contextlib import suppress

from conftest import StartServer
from helpers import sample
from helpers.described import OPERATIONS, Operation
from helpers.rawsocket import RawSocket, request_bytes
from helpers.server import REPOSITORY, Server, patience

WITH_SAMPLE = f"""
sys.path += ["{REPOSITORY}/tests", "{REPOSITORY}/docs"]
import app, models
from helpers import sample

def create_app(create=app.create_app):
    made = create()
    made.register_blueprint(sample.bp)
    return made

app.create_app = create_app
models.TABLES.append(sample.SampleNote)
"""
MOMENT_SECONDS = 1


def begin(server: Server, operation: Operation, key: str) -> RawSocket:
    headers = {"Host": "localhost", "Connection": "close", "X-API-Key": key}
    connection = RawSocket(server.port)
    connection.send(request_bytes(operation.url(), headers))
    return connection


def ends_within(connection: RawSocket, seconds: float) -> bool:
    """Whether the response is complete within these seconds."""
    end, received = time.monotonic() + seconds, b""
    while (left := end - time.monotonic()) > 0:
        connection.sock.settimeout(left)
        with suppress(TimeoutError):
            received += (part := connection.sock.recv(65_536))
            if not part:
                return b"\r\nContent-Length: " in received or received.endswith(b"0\r\n\r\n")
    return False


def test_stream_ends_with_its_key_and_at_a_stop(start_patched: StartServer) -> None:
    server, streams = start_patched(WITH_SAMPLE), []
    for operation in [each for each in (*OPERATIONS, *sample.OPERATIONS) if each.is_safe]:
        key = server.new_key()
        with begin(server, operation, key) as connection:
            if ends_within(connection, MOMENT_SECONDS):
                continue
            streams.append(operation)
            if operation.needs_key:
                server.execute("DELETE FROM api_key WHERE id = ?", key[8:16])
                assert ends_within(connection, patience(2)), (
                    f"{operation} outlives its key: let its generator ask auth.find_key "
                    "before each part"
                )
    assert sample.OPERATIONS[-1] in streams
    opened = {operation: begin(server, operation, server.new_key()) for operation in streams}
    assert not [each for each in opened.values() if ends_within(each, MOMENT_SECONDS)]
    server.stop()
    for operation, connection in opened.items():
        with connection:
            assert ends_within(connection, 1), (
                f"{operation} does not end at a stop: "
                "let its generator look at open_sockets_of(current_app).is_stopping"
            )
