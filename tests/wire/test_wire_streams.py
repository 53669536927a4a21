"""Responses without an end: they end with their key and at a stop, wherever one is added."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from http.client import HTTPConnection

from conftest import StartServer
from helpers import sample
from helpers.described import OPERATIONS, Operation
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


def read(server: Server, operation: Operation, key: str) -> bytes:
    """The whole response; it is an error if the response is cut off."""
    client = HTTPConnection("127.0.0.1", server.port)
    client.request("GET", operation.url(), headers={"X-API-Key": key, "Connection": "close"})
    return client.getresponse().read()


def test_stream_ends_with_its_key_and_at_a_stop(start_patched: StartServer) -> None:
    server = start_patched(WITH_SAMPLE)
    threads = ThreadPoolExecutor(99)

    def begin(operations: list[Operation]) -> dict[Future[bytes], Operation]:
        return {threads.submit(read, server, each, server.new_key()): each for each in operations}

    first = begin([each for each in (*OPERATIONS, *sample.OPERATIONS) if each.is_safe])
    streams = [first[each] for each in wait(first, MOMENT_SECONDS).not_done]
    assert sample.OPERATIONS[-1] in streams
    server.execute("DELETE FROM api_key")
    late = [first[each] for each in wait(first, patience(2)).not_done if first[each].needs_key]
    assert not late, (
        f"{late} outlive their keys: let their generators ask auth.find_key before each part"
    )
    second = begin(streams)
    assert not wait(second, MOMENT_SECONDS).done, "a stream with a good key ends by itself"
    server.stop()
    late = [second[each] for each in wait(second, 1).not_done]
    assert not late, (
        f"{late} do not end at a stop: "
        "let their generators look at open_sockets_of(current_app).is_stopping"
    )
    assert not [operation for each, operation in (first | second).items() if each.exception()], (
        "these are cut off"
    )
