"""What the service prints, whatever happens to its log: no secret, and nobody waits for it."""

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from conftest import StartServer, in_ci
from helpers.paths import ECHO, TEST
from helpers.rawsocket import request_bytes
from helpers.server import StartError, eventually, serve_command

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
BUFFERED = {"PYTHONUNBUFFERED": ""}  # Python then writes the rest at its exit
OUTPUTS = {  # how the log is redirected, and the options that send it there
    "stdout": (">>{}", "--access-logfile -"),
    "stderr": ("2>>{}", "--access-logfile -"),
    "files": ("", "--access-logfile {0} --error-logfile {0}"),
}


def redirected(redirection: str) -> list[str]:
    """The command, with its output redirected as in a shell."""
    return ["bash", "-c", f'exec "$@" {redirection}', "bash", *serve_command()]


@pytest.mark.parametrize("failure", ["full disk", "closed pipe", "encoding"])
@pytest.mark.parametrize("output", ["stdout", in_ci("stderr"), in_ci("files")])
def test_log_that_cannot_be_written_prints_no_secret(
    start_server: StartServer, tmp_path: Path, failure: str, output: str
) -> None:
    """Nothing else prints one, and the service works and ends as usual."""
    path = Path("/dev/full") if failure == "full disk" else tmp_path / "log"
    with contextlib.ExitStack() as reader:
        if failure == "closed pipe":
            os.mkfifo(path)
            reader.callback(os.close, os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        redirection, options = (text.format(path) for text in OUTPUTS[output])
        settings = BUFFERED | (ASCII if failure == "encoding" else {})
        settings["GUNICORN_CMD_ARGS"] = f"{options} --log-level debug"
        server = start_server(*redirected(redirection), **settings)
    words = [server.new_key(), *(secrets.token_hex() for _ in range(3))]
    headers = {"Host": "a", "X-API-Key": words[0], "Cookie": f"s={words[1]}", "X": "\xe9"}
    asked = request_bytes(f"{TEST}?a={words[2]}", headers)
    others = asked.replace(TEST.encode(), b"/%C3%A9"), asked.replace(b"Cookie:", b"Cookie")
    assert [server.send(each).status for each in (asked, *others)] == [200, 404, 400]
    with server.connections(2) as (echo, form):
        echo.open(ECHO).send(b"\xff" * 20)
        assert form.request("/log-in", "POST").status == 422  # without a length
        form.send(f"password={words[3]}".encode())
    server.stop()
    written = server.log() + (path.read_text("latin-1") if path.is_file() else "")
    assert not [word for word in (*words, "Traceback", "Logging error") if word in written], (
        f"a log that meets a {failure} prints a key, a cookie, a query, a form or a traceback: see "
        "Output and protect_output in server/log.py"
    )
    if failure == "encoding" and output != "stderr":
        assert r'"GET /\xc3\xa9" 404' in written


def test_refused_start_has_its_status_on_a_full_disk(start_server: StartServer) -> None:
    with pytest.raises(StartError, match=r"^exit status 1:\n$"):
        start_server(*redirected("2>/dev/full"), SECRET_KEY="", **BUFFERED)


TRACEBACKS = """
import logging

def attempt(step, attempt=lifecycle.attempt):
    attempt(step)
    try:
        raise ValueError("a line of a traceback\\n" * 900)
    except ValueError:
        logging.getLogger(__name__).exception("bug")
    with open({rounds!r}, "a") as rounds:
        rounds.write(".")

lifecycle.attempt, lifecycle.SAVE_SECONDS = attempt, 0.02
"""


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (os.pipe, [">&0 2>&0"]),
        # As under systemd; it cannot be opened again.
        (lambda: [each.detach() for each in socket.socketpair()], [">&0 2>&0"]),
        in_ci(os.pipe, ["", "--error-logfile", "/dev/stdin"]),
    ],
    ids=["pipe", "socket", "file of the log"],
)
def test_reader_that_pauses_holds_up_nobody(
    start_patched: StartServer,
    tmp_path: Path,
    make: Callable[[], Sequence[int]],
    options: list[str],
) -> None:
    """Neither requests, nor the background, nor a stop: the lines are dropped.

    The output is the server's standard input, which the test has open, too.
    """
    rounds = tmp_path / "rounds"
    pair = make()
    with (
        open(pair[0], "rb", buffering=0) as reader,
        open(pair[1], "wb") as writer,
        contextlib.ExitStack() as finish,
    ):
        os.set_blocking(pair[0], False)
        finish.callback(lambda: print("heard at last:", (reader.readall() or b"").decode()))
        server = start_patched(
            TRACEBACKS.format(rounds=str(rounds)),
            *redirected(options[0]),
            *options[1:],
            stdin=writer.fileno(),
        )
        eventually(
            lambda: rounds.exists() and rounds.stat().st_size > 15,
            what="the background goes on while nobody reads its log: see Output in server/log.py",
        )
        heard = reader.readall()
        eventually(lambda: rounds.stat().st_size > 30)
        with server.connections(3) as (first, second, echo):
            assert first.request(TEST, X_API_Key=server.new_key()).status == 200
            echo.open(ECHO)
            first.send(b"no request\r\n\r\n")
            assert first.answer().status == 400
            assert second.request("/").status == 200
            server.stop()
        heard += reader.readall()
        assert os.get_blocking(writer.fileno()), "other programs write there, too"
    assert server.execute("SELECT total FROM api_key") == [(1,)]
    assert b"Booting worker" in heard
    assert heard.count(b"ValueError") > 4, "what there is room for is logged: see Output.write"


ALWAYS = {
    "Content-Type": "application/problem+json",
    "Cache-Control": "no-store",
    "Access-Control-Allow-Origin": "*",
    "Connection": "close",
}
POST = b"POST /log-in HTTP/1.1\r\nHost: a\r\n"
MALFORMED = {  # requests, by the status and the detail of the answer
    (400, "The first line of the request is malformed."): [
        b"password=SECRET",
        b"GET /SECRET",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfcSECRET",  # TLS
    ],
    (414, "The first line of the request is too long."): [
        b"GET /SECRET" + b"x" * 5000 + b" HTTP/1.1"
    ],
    (400, "The method is malformed."): [b"G@SECRET / HTTP/1.1", b"\xe9SECRET / HTTP/1.1"],
    (400, "The version of HTTP is not supported; use HTTP/1.1."): [
        b"GET / SECRET/1.1",
        b"GET / HTTP/7.1\r\nA: SECRET",
    ],
    (400, "A header is malformed."): [
        POST + b"Cookie SECRET",
        POST + b"A: \x01SECRET",
        POST + b"Content-Length: SECRET",
        POST + b"A: SECRET\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
    ],
    (400, "The name of a header is malformed."): [POST + b"(SECRET): x"],
    (400, "A header has several lines."): [POST + b"A: x\r\n SECRET"],
    (431, "The headers are too large."): [POST + b"A: SECRET" + b"x" * 33_000],
    (417, "The only expectation that is supported is 100-continue."): [POST + b"Expect: SECRET"],
    (501, "The only transfer coding that is supported is chunked."): [
        POST + b"Transfer-Encoding: SECRET"
    ],
}


def test_malformed_request_is_answered_and_logged_without_a_quote(
    start_server: StartServer,
) -> None:
    """Not at level DEBUG either, nor if the request is cut off."""
    server = start_server(GUNICORN_CMD_ARGS="--access-logfile - --log-level debug")
    cases = [(*answer, request) for answer, requests in MALFORMED.items() for request in requests]
    for status, detail, request in cases:
        answer = server.send(request + b"\r\n\r\n")
        problem = answer.json()
        assert list(problem) == ["type", "title", "status", "detail", "code"]
        assert (answer.status, problem["status"], problem["detail"]) == (
            status,
            status,
            detail,
        ), request
        assert problem["code"] == problem["title"].lower().replace(" ", "_")
        assert answer.headers["Date"]
        assert answer.headers.items() >= ALWAYS.items()
        assert server.log_lines("Invalid request")[-1].endswith(f"ip=127.0.0.1: {detail}")
    with server.connections(1) as (client,):
        client.send(POST + b"Cookie: SECRET")
    eventually(lambda: server.log_lines("premature client disconnection. The request is incomp"))
    assert "SECRET" not in server.log()
