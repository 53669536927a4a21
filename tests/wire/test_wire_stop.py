"""What stops the real server, what a stop loses, and what the log never shows."""

import contextlib
import itertools
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import StartServer, in_ci
from helpers.load import Load, accepted
from helpers.paths import ECHO, STATUS, TEST, TIME
from helpers.rawsocket import UPGRADE, handshake_bytes, request_bytes
from helpers.server import Server, eventually, listens, random_key, serve_command, within
from models import PREFIXES


@pytest.mark.parametrize("number", [signal.SIGTERM, in_ci(signal.SIGINT)])
def test_everybody_is_told_and_nothing_is_lost(
    start_server: StartServer, number: signal.Signals
) -> None:
    """One request is under way; others are served as long as that one is."""
    server = start_server()
    key = server.new_key()
    with (
        ThreadPoolExecutor(1) as threads,
        server.connections(50) as sockets,
        server.connections(3) as (silent, idle, under_way),
    ):
        for place, client in enumerate(sockets):
            client.open(f"{TIME}?api_key={key}" if place % 2 else ECHO)
        under_way.send(request_bytes(TEST, {"Host": "a", "X-API-Key": key})[:-2])
        assert idle.request(TEST, X_API_Key=key).status == 200  # by then, it has begun

        stopping = threads.submit(server.stop, number)
        with within(1):
            assert sockets[0].close_code() == 1001, "see STOPS and lifecycle.serving"
            assert idle.request(TEST, X_API_Key=key).status == 200  # as long as others go on
            under_way.send(b"\r\n")
            assert {client.close_code() for client in sockets[1:]} == {1001}
        answer = under_way.answer()
        assert silent.ended(), "a connection without a request is not closed at a stop"
        stopping.result()
    assert (answer.status, answer.json()["success"]) == (200, True), "it was under way"
    assert not server.log_lines("could not save the last counts"), server.log()[-1000:]
    assert server.start().total(key) == 25 + 3, (
        "a stop loses or doubles counts (of 25 sockets and 3 requests): see save_and_close"
    )


def test_what_arrives_before_and_during_a_stop_is_answered(start_server: StartServer) -> None:
    """A handshake is refused; a body that does not come does no harm."""
    server = start_server()
    with server.connections(40) as pending, server.connections(3) as (told, late, halted):
        halted.send(request_bytes("/log-out", {"Host": "a", "Content-Length": "8"}, "POST"))
        told.open(ECHO)
        assert late.request(STATUS).status == 200
        late.send(handshake_bytes(ECHO)[:20])
        for client in pending:
            client.send(request_bytes(STATUS, {"Host": "a"}))
        os.kill(server.pid, signal.SIGTERM)
        assert told.close_code() == 1001
        assert [client.answer().status for client in pending] == [200] * 40, (
            "what arrived before the stop is answered: see server/lifecycle.py"
        )
        late.send(handshake_bytes(ECHO)[20:])
        answer = late.answer()
        assert server.wait() == 0, f"the status of a stop; its log ends with {server.log()[-1000:]}"
    assert server.postgres or server.stored == {"service.db"}, (
        "the file is not complete alone: the worker was killed, or save_and_close has not ended"
    )
    assert (answer.status, answer.json()["code"]) == (503, "too_many_sockets")


def test_no_second_signal_loses_a_count(start_server: StartServer) -> None:
    """Nor one to all processes, under load, beside idle connections, until the end."""
    server = start_server(RATE_LIMITS="free=1000000/day")
    key = server.new_key()
    with server.connections(20) as idle, Load(server.port, key, connections=8) as load:
        assert {client.request(STATUS).status for client in idle} == {200}
        eventually(lambda: len(load.replies) > 200)
        os.kill(server.pid, signal.SIGTERM)
        eventually(lambda: server.log_lines("Handling signal"))
        others = itertools.cycle([signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
        while not server.has_ended():
            os.killpg(server.pid, next(others))
            time.sleep(0.002)
        server.wait()  # the status may be that of a signal that came at the very end
        replies = load.stop()
    assert server.start().total(key) == len(accepted(replies)), (
        "a signal ends a process at once: see STOPS in server/lifecycle.py"
    )


def test_background_goes_on_after_a_bug(start_patched: StartServer) -> None:
    """Counts are saved, keys that ended are deleted, and one traceback is logged."""
    server = start_patched("lifecycle.SAVE_SECONDS = 0.05" + BUG)
    server.may_log_a_traceback = True
    eventually(lambda: server.log_lines("ValueError: a bug"))
    server.execute("UPDATE api_key SET expires_at = 1 WHERE id = ?", server.new_key()[8:16])
    assert server.ask(TEST, X_API_Key=server.new_key()).status == 200
    eventually(
        lambda: server.execute("SELECT total FROM api_key") == [(1,)],
        what="the count is saved, and the key that has expired is deleted, although each round of "
        "the background fails: see attempt and flush_until_stop",
    )
    eventually(
        lambda: len(server.log_lines("Traceback")) == len(server.worker_pids),
        what="one traceback for each worker: see attempt in server/lifecycle.py",
    )
    assert max(map(len, server.log().splitlines())) <= 1000, "a line is cut off: see redact"


BUG = """
from ws.open_sockets import OpenSockets

def fail(*_):
    raise ValueError("a bug\\x1b[1m %41a" * 1000)  # a line that gets longer by its redaction

OpenSockets.ping = OpenSockets.close_ended = fail
"""


def test_closed_terminal_saves_stops_and_frees_the_port(tmp_path: Path) -> None:
    """script(1) runs the demo on a terminal of its own, as `ssh -t` does."""
    server = Server(tmp_path, "script", "-qfc", f'exec "{sys.executable}" app.py', "/dev/null")
    with server.start():
        # script(1) copies it.
        found = eventually(lambda: re.search(r"(sk_live_\w+)\s", server.log()))
        assert {server.ask(TEST, X_API_Key=found[1]).status for _ in range(7)} == {200}
        server.stop(signal.SIGKILL)  # the terminal, and not the demo
    eventually(
        lambda: not listens("127.0.0.1", server.port),
        what="the demo stops with its terminal: see SIGHUP in server/lifecycle.py",
    )

    # Nobody else may close the file at the same moment: then SQLite would leave its log behind.
    eventually(lambda: server.stored == {"service.db"}, what="the file is complete alone")
    assert server.execute("SELECT total FROM api_key") == [(7,)], (
        "the 7 requests are saved when the terminal is closed"
    )


@pytest.mark.one_process("with PostgreSQL it is a reload")
def test_service_started_with_nohup_stays(start_server: StartServer) -> None:
    server = start_server("nohup", *serve_command())
    workers = server.worker_pids
    os.killpg(server.pid, signal.SIGHUP)
    server.handle_signals()
    assert server.ask(TEST).status == 401
    assert server.worker_pids == workers, "see IGNORES_HANGUP and handle_signals_in_worker"


def test_postgresql_reload_fails_nobody(start_server: StartServer, cluster: object) -> None:
    server = start_server(RATE_LIMITS="free=1000000/day")
    key = server.new_key()
    before = set(server.worker_pids)
    with Load(server.port, key, connections=4) as load:
        eventually(lambda: len(load.replies) > 100)
        for number, workers in ((signal.SIGHUP, 2), (signal.SIGTTIN, 3)):
            os.kill(server.pid, number)
            eventually(
                lambda: len({*server.worker_pids} - before) == len(server.worker_pids) == workers,  # noqa: B023
                10,
                "a reload replaces the workers, and SIGTTIN adds one: see handle_signals_in_master",
            )
        replies = load.stop()
    assert server.total(key) == len(accepted(replies)), "a reload loses counts, or counts twice"
    # A connection that a worker closes may cut off a request that it has not read.
    assert {reply.status for reply in replies} <= {200, 0}, "a reload refuses requests"


def test_no_secret_is_in_a_log_or_a_file_and_nobody_can_forge_a_line(
    start_server: StartServer,
) -> None:
    server = start_server(GUNICORN_CMD_ARGS="--access-logfile - --log-level debug")
    server.ask("/api/v1/%0d%0a%1b[2K%0b%c2%85%e2%80%a8forged")
    (line,) = eventually(lambda: server.log_lines("forged"))
    assert "GET /api/v1/" in line, "a path breaks a line of the log: see CONTROL in server/log.py"
    assert line.isprintable(), f"the log has control characters: see CONTROL: {line!r}"
    assert server.sign_up("ada").status == 303
    key = server.flask("key", "create", "ada", "ci").strip()
    escaped = "".join(f"%{ord(character):02X}" for character in key)
    broken = [f"{key[:5]}{sign}{key[5:]}" for sign in ("%01", "%0A", "%E2%80%8B")]
    # What nobody has may be a key of another server.
    texts = (key, *map(random_key, PREFIXES), escaped, *broken, key.replace("_", "%5F"))
    for text, (line, headers) in itertools.product(texts, PLACES):
        with contextlib.suppress(OSError):
            server.send(f"{line}\r\n{headers}\r\n".replace("KEY", text).encode())
    server.stop()
    files = [path for path in server.directory.rglob("*") if path.is_file()]
    assert server.postgres or server.database in files
    assert '"POST /sign-up" 303' in server.log()
    assert '"GET /api/v1/protected/test" 200' in server.log()
    secrets = ("scrypt:", "example.com", "long+enough", "long enough", key[17:-6])
    assert not [secret for secret in secrets if secret in server.log()], (
        "the log has a hash, an address, a password or a key: see redact and RedactingLogger.setup"
    )
    for path, text in itertools.product(files, texts):
        assert text[17:].encode() not in path.read_bytes(), f"{text} in {path}: see STARTS"


PLACES = [  # where a client might put a key, right or wrong
    (f"GET {TEST} HTTP/1.1", "Host: a\r\nX-API-Key: KEY\r\n"),
    (f"GET {TEST}?api_key=KEY HTTP/1.1", "Host: a\r\nReferer: http://a/?api_key=KEY\r\n"),
    (f"GET {TEST} HTTP/1.1", "Host: a\r\nUser-Agent: KEY\r\n"),
    (f"GET {TIME}?api_key=KEY HTTP/1.1", "".join(f"{n}: {v}\r\n" for n, v in UPGRADE.items())),
    (f"GET {TIME}?api_key=KEY nonsense", ""),
    (f"G@T {TIME}?api_key=KEY HTTP/1.1", ""),
    (f"GET {TEST} HTTP/1.1", "Host: a\r\nX-API-Key KEY\r\n"),
    (f"GET {TEST} HTTP/1.1", "Host: a\r\nKEY: x\r\n"),
    (f"GET {TEST} HTTP/1.1", "Host: a\r\nTransfer-Encoding: KEY\r\n"),
    ("KEY", ""),
    (f"KEY {TEST} HTTP/1.1", ""),
    ("GET /api/v1/KEY HTTP/1.1", "Host: KEY\r\n"),
    (f"GET {TIME}?api%5Fkey=KEY x y", "Host: a\r\n"),
]
