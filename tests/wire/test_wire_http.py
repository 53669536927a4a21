"""What arrives over a connection that is no right request: it is refused, and no bug."""

import socket
import struct
import time
from contextlib import nullcontext
from datetime import datetime

import pytest

from conftest import StartServer
from helpers.paths import ECHO, ME, STATUS, TEST, TIME
from helpers.rawsocket import (
    TEXT,
    UPGRADE,
    RawSocket,
    form_bytes,
    frame,
    handshake_bytes,
    request_bytes,
)
from helpers.server import Server


def large_headers(number: int) -> bytes:
    """So many times 8,000 bytes."""
    return request_bytes(STATUS, {"Host": "a"} | {f"X-{n}": "y" * 8000 for n in range(number)})


POST = b"POST /api/v1/status HTTP/1.1\r\nHost: a\r\n"
FORM = b"POST /log-in HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
HALF = b"x" * 8192  # of the largest form
FRAMED = FORM + b"2000;a=%s\r\n" + HALF + b"\r\n2000\r\n" + HALF + b"\r\n0\r\n\r\n"
GET = b"GET /api/v1/status HTTP/1.1\r\nHost: a\r\n"
EMPTY_PATH = b"GET http://x HTTP/1.1\r\nUpgrade: x\r\nHost: "  # the first page
ODD = {  # with the status of the answer
    "bad chunk that nobody reads": (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", 405),
    "bad chunk for a page without a form": (FORM.replace(b"/log-in", b"/") + b"zz\r\n\r\n", 405),
    "bad chunk of a form": (FORM + b"zz\r\n\r\n", 400),
    "bad end of a chunk of a form": (FORM + b"1\r\nxyz\r\n0\r\n\r\n", 400),
    "large form in chunks": (FORM + b"4e20\r\n" + b"x" * 20_000 + b"\r\n0\r\n\r\n", 413),
    "form in small chunks": (FORM + b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n", 413),
    "form with a long line before a chunk": (FORM + b"1;x=" + b"x" * 20_000, 413),
    "form with long trailers": (FORM + b"0\r\n" + b"X: y\r\n" * 700, 413),
    "largest form whose framing takes 4 KiB": (FRAMED % (b"x" * 4072), 422),
    "largest form whose framing takes more": (FRAMED % (b"x" * 4073), 413),
    "form in chunks": (FORM + b"b\r\nusername=ab\r\n0\r\n\r\n", 422),
    "GET with empty chunks": (GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 200),
    "bytes that are no UTF-8": (b"GET /api/v1/%ff%fe HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    "line break in the path": (b"GET /api/v1/%0d%0aX:y HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    "Latin-1 host": (request_bytes(STATUS, {"Host": "\xe9"}), 200),
    "Latin-1 key": (request_bytes(ME, {"Host": "a", "X-API-Key": "\xff"}), 401),
    "key of a socket that is no UTF-8": (handshake_bytes(f"{TIME}?api_key=%ff%fe"), 401),
    "empty key of a socket": (handshake_bytes(f"{TIME}?api_key="), 401),
    "empty path": (EMPTY_PATH + b"a\r\n\r\n", 200),
    "empty path, odd host": (EMPTY_PATH + b"[\r\n\r\n", 200),
    "header SCRIPT_NAME": (request_bytes(STATUS, {"Host": "a", "SCRIPT_NAME": "/other"}), 200),
    "header PATH_INFO": (request_bytes(STATUS, {"Host": "a", "PATH_INFO": "/other"}), 200),
    "CONNECT": (request_bytes("a:80", {"Host": "a"}, "CONNECT"), 404),
    **{
        f"form of the type {kind}": (
            request_bytes("/log-out", {"Host": "a", "Content-Type": kind}, "POST"),
            status,
        )
        for kind, status in {
            "multipart/form-data; boundary=a": 415,
            "text/plain": 415,
            "application/json": 415,
            "Application/X-WWW-Form-Urlencoded; charset=UTF-8": 303,
        }.items()
    },
    # To parse thousands of fields would take as long as twenty other requests.
    "form of 51 fields": (form_bytes("/log-out", **dict.fromkeys(map(str, range(51)), "")), 303),
    "form of 52 fields": (form_bytes("/log-out", **dict.fromkeys(map(str, range(52)), "")), 413),
    **{
        f"host of {size} characters, {path}": (request_bytes(path, {"Host": "a" * size}), status)
        for size, status in ((255, 200), (256, 400))
        for path in ("/", STATUS)
    },
    "folder of the static files": (request_bytes("/static/", {"Host": "a"}), 404),
    "file outside": (request_bytes("/static/../app.py", {"Host": "a"}), 404),
    "escaped file outside": (request_bytes("/static/%2e%2e/app.py", {"Host": "a"}), 404),
    "headers of 32 KiB": (large_headers(4), 200),
    "larger headers": (large_headers(5), 431),
    "upgrade of another path": (handshake_bytes(STATUS), 200),
    "pre-flight of a socket": (request_bytes(TIME, {"Host": "a"}, "OPTIONS"), 200),
    "handshake with HEAD": (request_bytes(ECHO, UPGRADE, "HEAD"), 400),
    "handshake of HTTP/1.0": (request_bytes(ECHO, UPGRADE, version="HTTP/1.0"), 400),
    "upgrade, not connected": (handshake_bytes(STATUS, {"Connection": None}), 200),
}
CORS = "Access-Control-Allow-Origin"


@pytest.mark.parametrize(
    "path",
    ["/static/app.css", "/static/app.js", "/static/icon.svg", "/openapi.json", "/asyncapi.json"],
)
def test_file_that_a_client_has_is_not_sent_again(server: Server, path: str) -> None:
    with RawSocket(server.port) as client:
        first = client.request(path)
        known, changed = f'W/"x", W/{first.headers["ETag"]}', '"x"'
        again = client.request(path, If_None_Match=known)
        assert (again.status, "Content-Type" in again.headers) == (304, False), (
            f"{path} is sent again although the client has it: see its ETag"
        )
        late = "Mon, 01 Jan 2125 00:00:00 GMT"
        whole = client.request(
            path, If_Modified_Since=late, If_Match=changed, If_Range=late, Range="bytes=0-1"
        )
        assert (whole.status, whole.body) == (200, first.body), (
            "dates, If-Match and ranges are ignored: see check_host_and_size in application.py"
        )
        assert not {"Last-Modified", "Accept-Ranges"} & first.headers.keys()
        assert client.request(path, If_None_Match=changed).body == first.body
        assert client.request(path, "HEAD").headers.keys() == first.headers.keys()
    assert first.headers["Cache-Control"] == "no-cache"
    assert first.headers.get(CORS) == again.headers.get(CORS) == ("*" if "json" in path else None)


@pytest.mark.parametrize(("sent", "status"), ODD.values(), ids=ODD)
def test_odd_request_is_answered(server: Server, sent: bytes, status: int) -> None:
    assert server.send(sent).status == status, (
        "a WebSocket: see HANDSHAKE; a form: see BoundedRequest and BoundedChunks; others: "
        "see check_host_and_size, handle_request, and create_url_adapter"
    )


def test_client_may_be_silent_for_longer_than_it_may_leave_a_response_unread(
    start_patched: StartServer,
) -> None:
    server = start_patched("from server import worker; worker.SEND_SECONDS = 0.3")
    with server.connections(2) as (client, echo):
        echo.open(ECHO)
        for _ in range(2):
            assert client.request(STATUS).status == 200
            echo.send(frame(TEXT, b"hi"))
            assert (
                datetime.fromisoformat(echo.frame().json()["timestamp"]).timestamp()
                > time.time() - 1
            ), "the time of an echo"
            time.sleep(1)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_client_that_leaves_in_the_middle_is_no_traceback(server: Server, is_frozen: bool) -> None:
    """Who has left before the server sees the connection is neither served nor counted."""
    form = form_bytes("/log-in", username="ada", password="long enough")
    key = server.new_key()
    asked = request_bytes(TEST, {"Host": "a", "X-API-Key": key})
    with server.frozen() if is_frozen else nullcontext():
        for sent in (form, form[:-5], handshake_bytes(ECHO), request_bytes("/", {"Host": "a"})):
            for part in (sent, sent[: len(sent) // 2], asked) * 2:
                with RawSocket(server.port) as client:
                    # Closing resets the connection at once.
                    client.sock.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    client.send(part)
    assert server.total(key) == 0 or not is_frozen, "see SO_ERROR in server/worker.py"


@pytest.mark.parametrize("headers", [{}, {"Host": ""}, {"Upgrade": "h2c"}])
@pytest.mark.parametrize("path", [STATUS, "/", "/openapi.json"])
def test_a_host_must_be_named(server: Server, path: str, headers: dict[str, str]) -> None:
    answer = server.send(request_bytes(path, headers))
    assert answer.status == 400, "a request without a host is refused: see check_host_and_size"
    assert path != STATUS or answer.json()["code"] == "bad_request"
    assert server.send(request_bytes(path, headers, version="HTTP/1.0")).status == 200


@pytest.mark.parametrize("name", ["length", "chunks"])
def test_a_form_that_ends_early_is_400_and_changes_nothing(server: Server, name: str) -> None:
    form = form_bytes(
        "/sign-up", username=name, email=f"{name}@example.com", password="long enough"
    )
    if name == "chunks":
        head, _, body = form.partition(b"\r\n\r\n")
        head = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
        form = b"%s\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (head, len(body), body)
    for missing in (1, 10, 20):
        with RawSocket(server.port) as client:
            client.send(form[:-missing])
            client.sock.shutdown(socket.SHUT_WR)
            assert client.answer().status == 400, (
                f"a form that lacks its last {missing} bytes is taken, or waits: see BoundedRequest"
            )
    assert server.send(form).status == 303, "the name is still free"
