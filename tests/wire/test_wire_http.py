"""The REST half over real connections: status, body and headers exactly as promised."""

import re
import socket
import subprocess
import time

import pytest

import auth
from conftest import StartServer
from rawsocket import Answer, RawSocket, form_bytes, request_bytes
from serving import Server, eventually, random_key

PUBLIC = ["/api/v1/demo/year", "/api/v1/status"]
PROTECTED = ["/api/v1/protected/test", "/api/v1/user/me", "/api/v1/usage/stats"]
YEAR, STATUS, TEST, ME, STATS = PUBLIC + PROTECTED
SOCKETS = ["/api/v1/ws/echo", "/api/v1/ws/time"]
EXPOSED = {
    *("RateLimit", "RateLimit-Policy", "Retry-After", "WWW-Authenticate"),
    *("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"),
}
CHALLENGE = 'ApiKey realm="api", header="X-API-Key"'


def problem(answer: Answer) -> dict[str, object]:
    """The body of a problem, once everything that all problems share is as it should be."""
    body: dict[str, object] = answer.json()
    assert answer.body.endswith(b"\n")
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert body["status"] == answer.status
    assert all(isinstance(body[member], str) for member in ("type", "title", "detail", "code"))
    return body


def refusal(answer: Answer) -> tuple[int, object]:
    return answer.status, problem(answer)["code"]


@pytest.mark.parametrize("path", PUBLIC + PROTECTED)
def test_cors_and_json_everywhere(server: Server, server_key: str, path: str) -> None:
    with RawSocket(server.port) as connection:
        head = connection.request(path, "HEAD", X_API_Key=server_key)
        get = connection.request(path, X_API_Key=server_key, Origin="https://a.example")
    assert head.status == get.status == 200
    assert set(head.headers) == set(get.headers)
    assert get.headers["Content-Type"] == "application/json"
    assert get.headers["Cache-Control"] == "no-store"
    assert get.headers["Access-Control-Allow-Origin"] == "*"
    assert set(get.headers["Access-Control-Expose-Headers"].split(", ")) >= EXPOSED
    assert "Set-Cookie" not in get.headers
    assert get.body.endswith(b"}\n")


class TestKeys:
    @pytest.mark.parametrize("path", PROTECTED)
    def test_no_key_is_refused(self, server: Server, server_key: str, path: str) -> None:
        for asked in (path, f"{path}?api_key={server_key}"):
            answer = server.ask(asked)
            assert refusal(answer) == (401, "missing_api_key")
            assert answer.json()["detail"] == "Send your key in the X-API-Key header."
            assert answer.headers["WWW-Authenticate"] == CHALLENGE
            assert "RateLimit" not in answer.headers

    def test_every_bad_key_gets_the_same_answer(self, server: Server, server_key: str) -> None:
        """The revoked one, which this process knows as good, within two seconds."""
        revoked = server.new_key("old")
        assert server.ask(ME, X_API_Key=revoked).status == 200
        server.flask("key", "revoke", revoked[8:16])
        unknown = random_key()
        half = server_key[:17] + unknown[17:-6]
        bad = ["x", revoked, unknown, half + auth.checksum(half), half + server_key[-6:]]
        bad += [f'"{server_key}"', f"Bearer {server_key}", server_key[:-1]]
        bad += ["\xe9", "a" * 5000, f"{server_key},{server_key}"]

        def are_refused_alike() -> bool:
            answers = [server.ask(ME, X_API_Key=key) for key in bad]
            alike = {(answer.status, answer.body) for answer in answers}
            return len(alike) == 1 and problem(answers[0])["code"] == "invalid_api_key"

        eventually(are_refused_alike, 2)
        answer = server.ask(ME, X_API_Key=revoked)
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, CHALLENGE)
        assert f"has {len(server_key)} characters, without quotes" in answer.json()["detail"]
        assert "RateLimit" not in answer.headers


class TestLimits:
    def test_limit_refuses_the_sixth_of_five_calls(self, server: Server) -> None:
        key = server.new_key(tier="five")
        until_the_turn = 60 - time.time() % 60
        time.sleep(until_the_turn if until_the_turn < 3 else 0)
        tests = [server.ask(TEST, X_API_Key=key) for _ in range(4)]
        stats = server.ask(STATS, X_API_Key=key)
        refused = server.ask(TEST, X_API_Key=key)

        assert [answer.status for answer in (*tests, stats, refused)] == [200] * 5 + [429]
        for remaining, answer in zip((4, 3, 2, 1, 0, 0), (*tests, stats, refused), strict=True):
            reset = int(answer.headers["X-RateLimit-Reset"])
            found = re.fullmatch(r'"five";r=(\d+);t=(\d+)', answer.headers["RateLimit"])
            assert found
            left, seconds_left = map(int, found.groups())
            assert left == int(answer.headers["X-RateLimit-Remaining"]) == remaining
            assert 0 <= reset - time.time() <= seconds_left <= 60
            assert answer.headers["X-RateLimit-Limit"] == "5"
            assert answer.headers["RateLimit-Policy"] == '"five";q=5;w=60'
        assert stats.json()["total_requests"] == 5
        assert stats.json()["requests_remaining"] == 0
        reset_time = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(reset))
        assert stats.json()["reset_time"] == reset_time
        assert int(refused.headers["Retry-After"]) >= max(1, seconds_left)
        assert problem(refused) == {
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Too Many Requests",
            "status": 429,
            "detail": refused.json()["detail"],
            "code": "rate_limited",
            "violated-policies": ["five"],
            "reset_time": reset_time,
        }

    def test_curl_that_retries_gets_every_response(self, server: Server) -> None:
        """As docs/testing-clients.md says; one second allows five of the seven."""
        url, key = f"{server.url}{TEST}?[1-7]", server.new_key(tier="blink")
        curl = ["curl", "-sf", "--retry", "3", "-H", f"X-API-Key: {key}", url]
        assert subprocess.run(curl, capture_output=True).returncode == 0
        assert server.total(key) == 7

    def test_public_endpoints_count_nothing(self, server: Server) -> None:
        key = server.new_key()
        answers = [server.ask(path, X_API_Key=key) for path in PUBLIC * 2]
        assert not any("RateLimit" in answer.headers for answer in answers)
        assert server.total(key) == 0


class TestErrors:
    @pytest.mark.parametrize("path", ["/api/", "/api/v1", "/api/v1/nothing", "/api/v2/status"])
    def test_no_such_path(self, server: Server, path: str) -> None:
        answer = server.ask(path)
        detail = "There is nothing at this path. The paths are listed in /openapi.json."
        words = {"type": "about:blank", "title": "Not Found", "code": "not_found"}
        assert problem(answer) == {**words, "status": 404, "detail": detail}

    @pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "TRACE", "BREW"])
    def test_wrong_method(self, server: Server, method: str) -> None:
        for path in PUBLIC + PROTECTED:
            answer = server.ask(path, method)
            assert refusal(answer) == (405, "method_not_allowed")
            assert answer.json()["detail"] == "This path supports GET, HEAD, and OPTIONS."
            assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}

    def test_websocket_on_another_path(self, server: Server) -> None:
        with RawSocket(server.port) as client:
            answer = client.handshake(STATUS)
        assert refusal(answer) == (400, "bad_request")
        assert answer.json()["detail"] == "This path is not a WebSocket."

    @pytest.mark.parametrize("path", [*PUBLIC, *PROTECTED, *SOCKETS[:1], "/api/v1/typo"])
    def test_cors_preflight_allows_the_key_header(self, server: Server, path: str) -> None:
        asked = {"Access_Control_Request_Method": "GET", "Origin": "https://a.example"}
        answer = server.ask(path, "OPTIONS", Access_Control_Request_Headers="x-api-key", **asked)
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert answer.headers["Access-Control-Allow-Headers"].startswith("X-API-Key, Content-Type")
        assert "GET" in answer.headers["Access-Control-Allow-Methods"]

    def test_a_bug_is_logged_and_leaks_nothing(self, start_server: StartServer) -> None:
        server = start_server()
        key = server.new_key()
        server.execute('UPDATE "user" SET created_at = 1000000000000000000')  # no such year
        answer = server.ask(f"{ME}?api_key=secret&q=private", X_API_Key=key)
        assert refusal(answer) == (500, "internal_error")
        assert problem(answer)["detail"] == "Something went wrong on our side."
        assert "Traceback" in server.log()
        assert server.log_lines(ME)
        assert not any(word in server.log() for word in ("secret", "private", key))


POST = b"POST /api/v1/status HTTP/1.1\r\nHost: a\r\n"
GARBAGE = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}
ODD = {
    "bad chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "bytes that are no UTF-8": b"GET /api/v1/%ff%fe HTTP/1.1\r\nHost: a\r\n\r\n",
    "line break in the path": b"GET /api/v1/%0d%0aX:y HTTP/1.1\r\nHost: a\r\n\r\n",
    "Latin-1 host": b"GET /api/v1/status HTTP/1.1\r\nHost: \xe9\r\n\r\n",
    "Latin-1 key": b"GET /api/v1/user/me HTTP/1.1\r\nHost: a\r\nX-API-Key: \xff\r\n\r\n",
}
REFUSED = {*range(400, 500), 501, 505}
ANSWERED = {200, 400, 401, 404, 413}


class TestGarbage:
    @pytest.mark.parametrize("name", GARBAGE | ODD)
    def test_no_request_is_a_bug(self, server: Server, name: str) -> None:
        logged = len(server.log())
        expected = REFUSED if name in GARBAGE else ANSWERED
        answer = server.send((GARBAGE | ODD)[name])
        assert answer.status in expected
        assert name in ODD or answer.headers["Content-Type"] == "text/plain"
        assert "Traceback" not in server.log()[logged:]

    @pytest.mark.parametrize("headers", [{}, {"Host": ""}, {"Upgrade": "h2c"}])
    @pytest.mark.parametrize("path", [STATUS, "/", "/openapi.json"])
    def test_a_host_must_be_named(self, server: Server, path: str, headers: dict[str, str]) -> None:
        answer = server.send(request_bytes(path, headers))
        assert answer.status == 400
        assert path != STATUS or problem(answer)["code"] == "bad_request"
        assert server.send(request_bytes(path, headers, version="HTTP/1.0")).status == 200

    @pytest.mark.parametrize("name", ["SCRIPT_NAME", "PATH_INFO"])
    def test_no_header_shifts_the_path(self, server: Server, name: str) -> None:
        answer = server.send(request_bytes(STATUS, {"Host": "a", name: "/elsewhere"}))
        assert (answer.status, answer.json()["status"]) == (200, "operational")

    def test_smuggling_a_body_is_never_taken_for_the_next_request(self, server: Server) -> None:
        body = request_bytes("/api/v1/nothing", {"Host": "a"})
        head = request_bytes(STATUS, {"Host": "a", "Content-Length": str(len(body))})
        with RawSocket(server.port) as connection:
            connection.send(head + body)
            assert connection.answer().status == 200
            assert connection.request(YEAR).status == 200

    def test_half_a_form_changes_nothing(self, server: Server) -> None:
        fields = {"username": "half", "email": "half@example.com", "password": "long enough word"}
        form = form_bytes("/sign-up", **fields)
        with RawSocket(server.port) as broken:
            broken.send(form[:-4])
            broken.sock.shutdown(socket.SHUT_WR)
            assert broken.answer().status == 400
        assert server.send(form).status == 303, "the name is still free"
