"""What arrives over a connection that is no right request: it is refused, and no bug."""

import socket

import pytest

from paths import STATUS
from rawsocket import RawSocket, form_bytes, request_bytes
from serving import Server

POST = b"POST /api/v1/status HTTP/1.1\r\nHost: a\r\n"
GARBAGE = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "long path": b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "no method": b"\xe9 / HTTP/1.1\r\nHost: a\r\n\r\n",
}
ODD = {
    "bad chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "bytes that are no UTF-8": b"GET /api/v1/%ff%fe HTTP/1.1\r\nHost: a\r\n\r\n",
    "line break in the path": b"GET /api/v1/%0d%0aX:y HTTP/1.1\r\nHost: a\r\n\r\n",
    "Latin-1 host": b"GET /api/v1/status HTTP/1.1\r\nHost: \xe9\r\n\r\n",
    "Latin-1 key": b"GET /api/v1/user/me HTTP/1.1\r\nHost: a\r\nX-API-Key: \xff\r\n\r\n",
}
CORS = "Access-Control-Allow-Origin"
REFUSED = {*range(400, 500), 501, 505}
ANSWERED = {200, 400, 401, 404, 413}


FILES = ["/static/app.css", "/static/app.js", "/static/icon.svg", "/openapi.json", "/asyncapi.json"]


@pytest.mark.parametrize("path", FILES)
def test_file_that_a_client_has_is_not_sent_again(server: Server, path: str) -> None:
    with RawSocket(server.port) as client:
        first = client.request(path)
        known, changed = f'W/"x", W/{first.headers["ETag"]}', '"x"'
        again = client.request(path, If_None_Match=known)
        assert (again.status, "Content-Type" in again.headers) == (304, False)
        overflow = f"Mon, 01 Jan {'9_' * 12}9 00:00:00 +{'9' * 20}"  # in werkzeug's parser of dates
        for odd in ({"If_Modified_Since": overflow}, {"Range": "bytes=0-1", "If_Range": overflow}):
            assert client.request(path, **odd).body == first.body
        assert "Last-Modified" not in first.headers
        assert client.request(path, If_None_Match=changed).body == first.body
        assert client.request(path, "HEAD").headers.keys() == first.headers.keys()
    assert first.headers["Cache-Control"] == "no-cache"
    assert first.headers.get(CORS) == again.headers.get(CORS) == ("*" if "json" in path else None)


@pytest.mark.parametrize("path", ["/static/", "/static/../app.py", "/static/%2e%2e/app.py"])
def test_other_files_are_not_served(server: Server, path: str) -> None:
    assert server.ask(path).status == 404


class TestGarbage:
    @pytest.mark.parametrize("name", GARBAGE | ODD)
    def test_no_request_is_a_bug(self, server: Server, name: str) -> None:
        logged = len(server.log())
        expected = REFUSED if name in GARBAGE else ANSWERED
        answer = server.send((GARBAGE | ODD)[name])
        assert answer.status in expected
        if name in GARBAGE:  # gunicorn answers itself
            assert answer.headers["Content-Type"] == "application/problem+json"
            problem = answer.json()
            assert list(problem) == ["type", "title", "status", "detail", "code"]
            assert problem["status"] == answer.status
            assert problem["code"] == problem["title"].lower().replace(" ", "_")
        assert "Traceback" not in server.log()[logged:]

    def test_malformed_header_is_neither_sent_back_nor_logged_whole(self, server: Server) -> None:
        logged = len(server.log())
        for line in (b"X\x01" * 4000, b"X: \x01" + b"y" * 8000, b"\xff" * 8000):
            with RawSocket(server.port) as client:
                client.send(b"GET / HTTP/1.1\r\nHost: a\r\n" + line + b"\r\n\r\n")
                answer = client.answer()
            assert answer.status == 400
            assert answer.json()["code"] == "bad_request"
            assert len(answer.body) <= 700
        assert max(map(len, server.log()[logged:].splitlines())) <= 1000

    def test_empty_path_is_the_first_page_whatever_else_is_asked(self, server: Server) -> None:
        for host in ("a", "["):
            with RawSocket(server.port) as client:
                client.send(
                    b"GET http://x HTTP/1.1\r\nUpgrade: x\r\nHost: %b\r\n\r\n" % host.encode()
                )
                assert client.answer().status == 200

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

    @pytest.mark.parametrize("name", ["SCRIPT_NAME", "PATH_INFO"])
    def test_no_header_shifts_the_path(self, server: Server, name: str) -> None:
        answer = server.send(request_bytes(STATUS, {"Host": "a", name: "/elsewhere"}))
        assert (answer.status, answer.json()["status"]) == (200, "operational")

    @pytest.mark.parametrize(("target", "status"), [("a:80", 404), (STATUS, 405)])
    def test_connect_leads_nowhere(self, server: Server, target: str, status: int) -> None:
        assert server.ask(target, "CONNECT").status == status

    def test_body_is_never_taken_for_the_next_request(self, server: Server) -> None:
        body = request_bytes("/api/v1/nothing", {"Host": "a"})
        head = request_bytes(STATUS, {"Host": "a", "Content-Length": str(len(body))})
        with RawSocket(server.port) as connection:
            connection.send(head + body)
            answer = connection.answer()
            assert (answer.status, answer.headers["Connection"]) == (200, "close")
            assert connection.ended()

    def test_half_a_form_changes_nothing(self, server: Server) -> None:
        fields = {"username": "half", "email": "half@example.com", "password": "long enough word"}
        form = form_bytes("/sign-up", **fields)
        with RawSocket(server.port) as broken:
            broken.send(form[:-4])
            broken.sock.shutdown(socket.SHUT_WR)
            assert broken.answer().status == 400
        assert server.send(form).status == 303, "the name is still free"
