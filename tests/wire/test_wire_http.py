"""What arrives over a connection that is no right request: it is refused, and no bug."""

import socket
import struct

import pytest

from conftest import StartServer
from helpers.paths import ECHO, ME, STATUS, TEST
from helpers.rawsocket import RawSocket, form_bytes, handshake_bytes, request_bytes
from helpers.server import Server, eventually

POST = b"POST /api/v1/status HTTP/1.1\r\nHost: a\r\n"
FORM = b"POST /log-in HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG_FORM = b"POST /log-in HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n"
EMPTY_CHUNKS = request_bytes(STATUS, {"Host": "a", "Transfer-Encoding": "chunked"}) + b"0\r\n\r\n"
GARBAGE = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "long path": b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "no method": b"\xe9 / HTTP/1.1\r\nHost: a\r\n\r\n",
}
SMALL_CHUNKS = b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n"  # 1,000 bytes, and 5,005 of framing
EMPTY_PATH = b"GET http://x HTTP/1.1\r\nUpgrade: x\r\nHost: "  # the first page
ODD = {  # with the status of the answer
    "bad chunk that nobody reads": (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", 405),
    "bad chunk of a form": (FORM + b"zz\r\n\r\n", 400),
    "bad end of a chunk of a form": (FORM + b"1\r\nxyz\r\n0\r\n\r\n", 400),
    "large form in chunks": (FORM + b"4e20\r\n" + b"x" * 20_000 + b"\r\n0\r\n\r\n", 413),
    "form in small chunks": (FORM + SMALL_CHUNKS, 413),
    "form with a long line before a chunk": (FORM + b"1;x=" + b"x" * 20_000, 413),
    "form with long trailers": (FORM + b"0\r\n" + b"X: y\r\n" * 700, 413),
    "form in chunks": (FORM + b"b\r\nusername=ab\r\n0\r\n\r\n", 422),
    "GET with empty chunks": (EMPTY_CHUNKS, 200),
    "bytes that are no UTF-8": (b"GET /api/v1/%ff%fe HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    "line break in the path": (b"GET /api/v1/%0d%0aX:y HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    "Latin-1 host": (request_bytes(STATUS, {"Host": "\xe9"}), 200),
    "Latin-1 key": (request_bytes(ME, {"Host": "a", "X-API-Key": "\xff"}), 401),
    "empty path": (EMPTY_PATH + b"a\r\n\r\n", 200),
    "empty path, odd host": (EMPTY_PATH + b"[\r\n\r\n", 200),
    "header SCRIPT_NAME": (request_bytes(STATUS, {"Host": "a", "SCRIPT_NAME": "/other"}), 200),
    "header PATH_INFO": (request_bytes(STATUS, {"Host": "a", "PATH_INFO": "/other"}), 200),
    "CONNECT": (request_bytes("a:80", {"Host": "a"}, "CONNECT"), 404),
    "upgrade of another path": (handshake_bytes(STATUS), 200),
    "upgrade, not connected": (handshake_bytes(STATUS, {"Connection": None}), 200),
}
RESET = struct.pack("ii", 1, 0)  # closing resets the connection at once
ADA = {"username": "ada", "email": "ada@example.com", "password": "long enough"}
CORS = "Access-Control-Allow-Origin"
REFUSED = {*range(400, 500), 501, 505}


FILES = ["/static/app.css", "/static/app.js", "/static/icon.svg", "/openapi.json", "/asyncapi.json"]


@pytest.mark.parametrize("path", FILES)
def test_file_that_a_client_has_is_not_sent_again(server: Server, path: str) -> None:
    with RawSocket(server.port) as client:
        first = client.request(path)
        known, changed = f'W/"x", W/{first.headers["ETag"]}', '"x"'
        again = client.request(path, If_None_Match=known)
        assert (again.status, "Content-Type" in again.headers) == (304, False)
        late = "Mon, 01 Jan 2125 00:00:00 GMT"
        ignored = {"If_Modified_Since": late, "Range": "bytes=0-1", "If_Range": late}
        assert client.request(path, **ignored).body == first.body
        assert not {"Last-Modified", "Accept-Ranges"} & first.headers.keys()
        assert client.request(path, If_None_Match=changed).body == first.body
        assert client.request(path, "HEAD").headers.keys() == first.headers.keys()
    assert first.headers["Cache-Control"] == "no-cache"
    assert first.headers.get(CORS) == again.headers.get(CORS) == ("*" if "json" in path else None)


@pytest.mark.parametrize("path", ["/static/", "/static/../app.py", "/static/%2e%2e/app.py"])
def test_other_files_are_not_served(server: Server, path: str) -> None:
    assert server.ask(path).status == 404


class TestGarbage:
    @pytest.mark.parametrize("name", GARBAGE)
    def test_no_request_is_a_bug(self, server: Server, name: str) -> None:
        """gunicorn refuses it itself."""
        logged = len(server.log())
        answer = server.send(GARBAGE[name])
        assert answer.status in REFUSED
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert (answer.headers["Cache-Control"], answer.headers[CORS]) == ("no-store", "*")
        problem = answer.json()
        assert list(problem) == ["type", "title", "status", "detail", "code"]
        assert problem["status"] == answer.status
        assert problem["code"] == problem["title"].lower().replace(" ", "_")
        assert "Traceback" not in server.log()[logged:]

    @pytest.mark.parametrize("name", ODD)
    def test_odd_request_is_answered(self, server: Server, name: str) -> None:
        logged = len(server.log())
        request, status = ODD[name]
        assert server.send(request).status == status
        assert "Traceback" not in server.log()[logged:]

    @pytest.mark.parametrize("form", [FORM + b"64\r\n", LONG_FORM], ids=["chunks", "length"])
    def test_form_that_ends_early_is_400(self, server: Server, form: bytes) -> None:
        logged = len(server.log())
        with RawSocket(server.port) as client:
            client.send(form + b"username=ada")
            client.sock.shutdown(socket.SHUT_WR)
            assert client.answer().status == 400
        assert "Traceback" not in server.log()[logged:]

    @pytest.mark.parametrize(("more", "status"), [(0, 422), (1, 413)])
    def test_framing_of_a_form_may_take_4_kib(self, server: Server, more: int, status: int) -> None:
        """Besides the largest body."""
        body = b"username=".ljust(16_384, b"x")
        framing = b"2000;a=", b"\r\n", b"\r\n2000\r\n", b"\r\n0\r\n\r\n"
        extension = b"x" * (4096 + more - sum(map(len, framing)))
        start, line_end, between, end = framing
        chunks = start + extension + line_end + body[:8192] + between + body[8192:] + end
        assert server.send(FORM + chunks).status == status

    def test_client_that_leaves_in_the_middle_is_no_traceback(self, server: Server) -> None:
        logged = len(server.log())
        form = form_bytes("/log-in", username="ada", password="long enough")
        for sent in (form, form[:-5], handshake_bytes(ECHO), request_bytes("/", {"Host": "a"})):
            for part in (sent, sent[: len(sent) // 2]) * 2:
                with RawSocket(server.port) as client:
                    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    client.send(part)
        eventually(lambda: server.ask("/log-in").status == 200)
        assert "Traceback" not in server.log()[logged:]

    @pytest.mark.parametrize("headers", [{}, {"Host": ""}, {"Upgrade": "h2c"}])
    @pytest.mark.parametrize("path", [STATUS, "/", "/openapi.json"])
    def test_a_host_must_be_named(self, server: Server, path: str, headers: dict[str, str]) -> None:
        answer = server.send(request_bytes(path, headers))
        assert answer.status == 400
        assert path != STATUS or answer.json()["code"] == "bad_request"
        with RawSocket(server.port) as client:
            client.send(request_bytes(path, headers, version="HTTP/1.2"))
            assert client.read(12) == b"HTTP/1.2 400"
        assert server.send(request_bytes(path, headers, version="HTTP/1.0")).status == 200

    def test_half_a_form_changes_nothing(self, server: Server) -> None:
        fields = {"username": "half", "email": "half@example.com", "password": "long enough word"}
        form = form_bytes("/sign-up", **fields)
        with RawSocket(server.port) as broken:
            broken.send(form[:-4])
            broken.sock.shutdown(socket.SHUT_WR)
            assert broken.answer().status == 400
        assert server.send(form).status == 303, "the name is still free"


def test_everything_has_the_path_prefix(start_server: StartServer) -> None:
    server = start_server(SCRIPT_NAME="/demo")
    key = server.new_key()
    assert server.ask(f"/demo{TEST}", X_API_Key=key).status == 200
    for outside in (TEST, "/", "/demonstration/"):
        assert server.ask(outside).status == 404, outside
    answer = server.send(form_bytes("/demo/sign-up", **ADA))
    assert answer.headers["Location"] == "/demo/settings/security"
    assert "; Path=/demo" in answer.headers["Set-Cookie"]
    assert server.ask("/demo/settings/profile").headers["Location"] == "/demo/log-in"
