"""The specification: endpoints, keys and limits, errors, and both sockets."""

import time
from typing import Any
from urllib.parse import quote

import pytest
from flask.testing import FlaskClient

import app as service
from accounts import api_keys
from auth import EMPTY_KEY
from helpers.clock import Clock
from helpers.described import times_in
from helpers.paths import GATE, ME, PROTECTED, STATS, STATUS, TEST, TIME, YEAR
from helpers.rawsocket import Answer, RawSocket, handshake_bytes
from helpers.server import Server, eventually, patience, random_key
from settings import Settings


def utc(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


# The endpoints and the sockets, as the specification shows them


def get(server: Server, path: str, **headers: str) -> Any:
    answer = server.ask(path, **headers)
    assert (
        answer.status,
        answer.headers["Content-Type"],
        answer.body[-1:],
        b"\\u" in answer.body,
    ) == (200, "application/json", b"\n", False), (
        f"{path}: the status, the type, a newline at the end, letters as they are: {answer.body!r}"
    )
    return answer.json()


def test_bodies_are_the_same_with_flask_debug(
    client: FlaskClient, config: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASK_DEBUG", "1")
    debugged = service.create_app(config).test_client()
    for path in (STATUS, TEST, "/api/nowhere"):
        assert debugged.get(path).data == client.get(path).data, (
            "FLASK_DEBUG changes a body: see Service.__init__"
        )


def test_year(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    new_year = 1_798_761_600  # 2027-01-01T00:00:00Z
    for now, number in ((new_year - 1, 2026), (new_year, 2027)):
        monkeypatch.setattr(service, "time", Clock(now))
        assert client.get(YEAR).get_json() == {
            "year": number,
            "message": f"The current year is {number}.",
            "timestamp": utc(now).replace("Z", ".000Z"),
        }


def test_status_says_whether_a_key_is_good(server: Server, server_key: str) -> None:
    assert [get(server, STATUS, X_API_Key=key) for key in ("", "nonsense", server_key)] == [
        {"status": "operational", "version": "1.0.0", "authenticated": is_good}
        for is_good in (False, False, True)
    ], "without a key, with a bad one, with a good one: see status in app.py"


def test_protected_test(server: Server) -> None:
    body = get(server, TEST, X_API_Key=server.new_key("caf\u00e9", tier="pro", type="development"))
    assert times_in(body.pop("timestamp")) == [pytest.approx(time.time(), abs=60)]
    assert body == {
        "success": True,
        "message": "Your API key is valid.",
        "api_key_name": "caf\u00e9",
        "api_key_type": "development",
        "rate_limit_tier": "pro",
    }


def test_user_me(server: Server, server_key: str) -> None:
    """A key that has expired is not counted, whenever its row is deleted."""
    ((user_id, name, created_at),) = server.execute(
        """SELECT id, username, created_at FROM "user"
        WHERE id = (SELECT user_id FROM api_key WHERE id = ?)""",
        server_key[8:16],
    )
    server.execute(
        """UPDATE api_key SET user_id = ?, created_at = 1,
        expires_at = CASE name WHEN 'old' THEN 1 END WHERE id IN (?, ?)""",
        user_id,
        server.new_key("old")[8:16],
        server.new_key()[8:16],
    )
    assert get(server, ME, X_API_Key=server_key) == {
        "user_id": user_id,
        "username": name,
        "email": f"{name}@example.com",
        "created_at": utc(created_at),
        "api_key_count": 2,
    }, (
        "see user_me in app.py, and OWNER in storage/key_store.py: the time is the user's, all "
        "valid keys are counted, and an expired one is not"
    )


def test_gate_says_who_calls_and_refuses_in_a_header_too(server: Server) -> None:
    key = server.new_key(tier="once", type="development")
    ((user_id,),) = server.execute("SELECT user_id FROM api_key WHERE id = ?", key[8:16])
    answer = server.ask(f"{GATE}/", "HEAD", X_API_Key=key)
    assert (answer.status, answer.body, answer.headers.get("Content-Type")) == (204, b"", None)
    assert {name: text for name, text in answer.headers.items() if name.startswith("X-Auth-")} == {
        "X-Auth-Key-Id": key[8:16],
        "X-Auth-User-Id": str(user_id),
        "X-Auth-Key-Type": "development",
        "X-Auth-Tier": "once",
    }, "see gate in app.py"
    for path, method, sent, status in [
        (GATE, "GET", "", 401),
        (f"{GATE}/", "GET", "nonsense", 401),
        (GATE, "GET", key, 429),
        (GATE, "DELETE", key, 405),
        (GATE, "GET", "nonsense", 401),  # again, after one without a body
    ]:
        refused = server.ask(path, method, X_API_Key=sent)
        assert problem(refused)["status"] == status, f"{method} {path}"
        assert refused.headers["X-Gate-Problem"].encode("ascii") + b"\n" == refused.body, (
            f"{method} {path}: the header has the same problem as the body: see problem_response"
        )
        minimal = server.ask(path, method, X_API_Key=sent, Prefer="wait=9, return=minimal")
        assert (minimal.status, minimal.body, "X-Gate-Problem" in minimal.headers) == (
            status,
            b"",
            True,
        )


# Keys and limits


CHALLENGE = 'ApiKey realm="api", header="X-API-Key"'


def problem(answer: Answer) -> dict[str, object]:
    """The body of a problem."""
    body: dict[str, object] = answer.json()
    assert answer.headers["Content-Type"] == "application/problem+json", answer
    assert (body["status"], answer.body[-1:]) == (answer.status, b"\n"), answer
    return body


@pytest.mark.parametrize("path", PROTECTED)
def test_no_key_is_refused(server: Server, server_key: str, path: str) -> None:
    for answer in (
        server.ask(path),
        server.ask(path, X_API_Key=""),
        server.ask(f"{path}?api_key={server_key}"),
    ):
        assert (answer.status, problem(answer)["code"]) == (401, "missing_api_key"), (
            "the key comes in X-API-Key only, and without one a request is refused: see require_key"
        )
        assert (
            answer.json()["detail"],
            answer.headers["WWW-Authenticate"],
            "RateLimit" in answer.headers,
        ) == (f"Send your key in the X-API-Key header. {EMPTY_KEY}", CHALLENGE, False)


def test_every_bad_key_gets_the_same_answer(server: Server, server_key: str) -> None:
    """The revoked one, which this process knows as good, within two seconds."""
    revoked = server.new_key("old")
    assert server.ask(TEST, X_API_Key=revoked).status == 200
    server.flask("key", "revoke", revoked[8:16])
    expired = server.new_key("expired")
    server.execute("UPDATE api_key SET expires_at = 1 WHERE id = ?", expired[8:16])
    unknown = random_key()
    good, half = server_key[:-6], server_key[:17] + unknown[17:-6]
    others = [
        half,
        good[:-1],
        f"{good}a",
        f"{good[:16]}\xe9{good[17:]}",
        good.replace("live", "test"),
    ]
    bad = [
        *(text + api_keys.checksum(text) for text in others),
        *("x", revoked, expired, unknown, half + server_key[-6:]),
        *(f'"{server_key}"', f"Bearer {server_key}", server_key[:-1]),
        *("\xe9", "a" * 5000, f"{server_key},{server_key}"),
        # As a client sends what it copies from a page that shortens it.
        *(f"{server_key[:16]}\xe2\x80\xa6", f"{server_key[:-1]}\xe9"),
    ]

    def are_refused_alike() -> bool:
        assert get(server, STATUS, X_API_Key=server_key)["authenticated"], "it is remembered"
        answers = [
            answer
            for key in bad
            for answer in (
                server.ask(TEST, X_API_Key=key),
                server.send(handshake_bytes(f"{TIME}?api_key={quote(key[:999], '', 'latin-1')}")),
            )
        ]
        return len({(answer.status, answer.body) for answer in answers}) == 1

    eventually(
        are_refused_alike,
        patience(2),
        "every bad key gets the same answer in the header and in the query, also one that is not "
        "ASCII (see find_key and invalid_key in auth.py), a revoked one within 2 s (see "
        "CACHE_SECONDS)",
    )
    answer = server.ask(TEST, X_API_Key=revoked)
    assert (
        answer.status,
        problem(answer)["code"],
        answer.headers["WWW-Authenticate"],
        "RateLimit" in answer.headers,
    ) == (401, "invalid_api_key", CHALLENGE, False)
    assert (
        f"begins with sk_live_ or sk_test_, followed by {len(server_key) - 8} characters, without"
        in answer.json()["detail"]
    )


def test_limit_refuses_the_sixth_of_five_calls(server: Server) -> None:
    key = server.new_key("counter", tier="five")
    server.execute("UPDATE api_key SET total = 7 WHERE id = ?", key[8:16])  # in earlier windows
    tests = [server.ask(TEST, method, X_API_Key=key) for method in ("GET", "HEAD") * 2]
    stats = server.ask(STATS, X_API_Key=key)
    refused = server.ask(TEST, X_API_Key=key)
    later = server.ask(STATS, X_API_Key=key)  # it is answered, and not counted

    answers = (*tests, stats, refused, later)
    assert [answer.status for answer in answers] == [200] * 5 + [429, 200], "see count_request"
    for remaining, answer in zip((4, 3, 2, 1, 0, 0, 0), answers, strict=True):
        reset = int(answer.headers["X-RateLimit-Reset"])
        seconds_left = int(answer.headers["RateLimit"].removeprefix(f'"five";r={remaining};t='))
        assert answer.headers["RateLimit-Policy"] == '"five";q=5;w=86400'
    assert (
        stats.json()
        == later.json()
        == {
            "api_key_name": "counter",
            "rate_limit_tier": "five",
            "total_requests": 12,
            "requests_remaining": 0,
            "reset_time": utc(reset),
        }
    )
    assert max(1, seconds_left) <= int(refused.headers["Retry-After"]) < seconds_left + 60, (
        "Retry-After is the time that is left of the window: see rate_limited"
    )
    assert problem(refused) == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Too Many Requests",
        "status": 429,
        "detail": "The limit of 5 requests per day is used up.",
        "code": "rate_limited",
        "violated-policies": ["five"],
        "reset_time": utc(reset),
    }


# Errors


@pytest.mark.parametrize(
    "path",
    [
        *("/api", "/api/", "//api/v1/nothing", "/api/v1/ws/nothing"),
        *("/api/v1//status", "/api/v1/status//"),  # these are not redirected
    ],
)
def test_no_such_path(server: Server, path: str) -> None:
    assert problem(server.ask(path)) == {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "detail": "There is nothing here; openapi.json and asyncapi.json list the paths.",
        "code": "not_found",
    }


# Sockets


def test_time_socket_greets_and_sends_each_second_once(server: Server, server_key: str) -> None:
    with RawSocket(server.port).open(
        f"{TIME}?my_api_key=x&api_key={server_key.replace('_', '%5F')}"
    ) as ws:
        assert ws.frame().json() == {"type": "auth_success", "api_key_name": "shared key"}
        updates = [ws.frame().json() for _ in range(4)]
        # Each is a second after the one before, unless the machine pauses.
        while len({times_in(updates[-n]["formatted"])[0] + n for n in range(1, 5)}) > 1:
            assert len(updates) < 30, f"seconds are skipped or repeated: {updates[-4:]}: see Ticker"
            updates.append(ws.frame().json())
    for update in updates:
        moment = update.pop("timestamp")
        assert times_in(moment) == [pytest.approx(time.time(), abs=60)]
        assert update == {
            "type": "time_update",
            "formatted": moment[:19].replace("T", " ") + " UTC",
        }
