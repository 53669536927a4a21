"""`python app.py` is the demo: it makes a user and a key, and prints what to do with them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import in_ci
from helpers.paths import SECURITY, TEST
from helpers.rawsocket import RawSocket, form_bytes
from helpers.server import Server, eventually, start_refusal

KEY = re.compile(r"sk_live_\w+")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """What `python app.py` starts, on a new database; it does not run yet."""
    with Server(tmp_path, sys.executable, "app.py", SECRET_KEY="", WEB_CONCURRENCY="") as demo:
        yield demo


def test_first_start_prints_what_works_and_the_second_no_secret(server: Server) -> None:
    server.start()
    (key,) = set(KEY.findall(server.log()))
    assert server.ask(TEST, X_API_Key=key).json()["api_key_name"] == "demo"
    pasted = re.findall(r"(?m)^ *((?:export|curl) .*)", server.log())
    assert len(pasted) == 6
    typed = "\n".join(pasted).replace("curl ", "curl -sSf ")
    done = subprocess.run(["sh", "-ec", typed], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.count("{")) == (0, "", 5)
    (socket,) = re.findall(rf'"ws://127.0.0.1:{server.port}(.*)"', server.log())
    with RawSocket(server.port) as client:
        client.open(socket.replace("$KEY", key))

    password = re.findall(r"website as the user demo with the password (\S{16})\n", server.log())[0]
    answer = server.send(form_bytes("/log-in", username="demo", password=password))
    assert (answer.status, answer.headers["Location"]) == (303, SECURITY)
    assert f"Listening at: {server.url} " in server.log(), "for this machine only"
    server.stop()

    first = server.log()
    second = server.start().log().removeprefix(first)
    assert "sk_live_" not in second
    assert second.count("flask user password demo, flask key create demo NAME") == 1


@pytest.mark.parametrize("output", [in_ci(">&-"), ">/dev/full"])
def test_secret_that_cannot_be_printed_makes_no_user(server: Server, output: str) -> None:
    server.command = ["sh", "-c", f'exec "$@" {output}', "sh", *server.command]
    server.start()
    assert server.log_lines("skipped the demo user: ")
    assert "sk_live_" not in server.log()
    server.stop()
    assert server.execute("SELECT username FROM user") == []


@pytest.mark.parametrize(
    ("number", "moment"), [in_ci(signal.SIGINT, "Listening at"), (signal.SIGTERM, "sk_live_")]
)
def test_signal_during_the_start_stops_the_demo_in_order(
    server: Server, number: signal.Signals, moment: str
) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(server.start)
        eventually(lambda: server.log_lines(moment), 30)
        os.kill(server.pid, number)
        signalled = time.monotonic()
    assert server.wait() == 0
    # A worker is killed that has only just been forked, and hears no signal, or that takes 5 s.
    is_killed = moment == "Listening at" or time.monotonic() - signalled > 5
    assert is_killed or server.stored == {"service.db"}


def test_taken_port_is_one_line_and_spends_no_secret(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = start_refusal("app.py", tmp_path, PORT=str(port))
    assert message == (
        f"PORT: {port} on 127.0.0.1: Address already in use; "
        f"is the service running already? If not, try PORT={port + 1}"
    )
    assert not (tmp_path / "demo.db").exists()
