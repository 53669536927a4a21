"""A walk at random through what users do; each answer is compared with that of a model."""

import os
import random
import re
import signal
import time
from calendar import timegm
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from html import escape
from typing import Any
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

import pytest

from commands.cli import KEY_COLUMNS
from conftest import StartServer
from model import TIERS, Facts, Key
from paths import ECHO, KEYS, ME, SECURITY, STATS, TEST, TIME
from rawsocket import PING, PONG, TEXT, Answer, RawSocket, frame, request_bytes
from serving import Server, eventually, patience

NOTICED_SECONDS = 2  # until every process knows that a key was changed
SAVED_SECONDS = 1.5  # until the database has what was counted: 1, and a pause of the machine
MOST_KEYS = 20  # of one user; 25 are allowed
STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGHUP]
UNITS = {1: "second", 60: "minute", 3600: "hour"}
ROW = re.compile(r"(<tr[^>]*>(?:(?!<tr).)*?sk_\w+_(\w{8})….*?</tr>)", re.S)  # of a key in the page


def test_random_walk_fits_the_model(start_server: StartServer, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("walk_seed") or random.randrange(10**6)
    limits = [f"{tier}={limit}/{UNITS[window]}" for tier, (limit, window) in TIERS.items()]
    server = start_server(RATE_LIMITS=",".join(limits))
    options = "--postgres " if server.postgres else ""
    print(f"To repeat it: pytest -n 0 {options}tests/acceptance/test_walk.py --walk-seed {seed}")
    with ExitStack() as stack:
        walk = Walk(server, random.Random(seed), stack)
        walk.go(45)
    assert "Traceback" not in server.log()


class Impossible(Exception):
    """A step that cannot be taken now."""


class Walk:
    def __init__(self, server: Server, chance: random.Random, stack: ExitStack) -> None:
        self.server, self.chance, self.stack = server, chance, stack
        self.users: dict[str, OpenerDirector] = {}  # each with a browser
        self.keys: list[Key] = []
        self.lost_in_chart = Counter[str]()  # by user
        self.echoes: list[RawSocket] = []
        self.times: list[tuple[RawSocket, Key]] = []

    def go(self, seconds: float) -> None:
        steps: dict[Callable[[], None], int] = {
            **{self.sign_up: 1, self.create: 8, self.rotate: 4, self.revoke: 3, self.rename: 8},
            **{self.expire: 3, self.change_tier: 6, self.hit: 40, self.burst: 10, self.storm: 5},
            **{self.read_user: 8, self.read_page: 12, self.read_list: 2, self.restart: 2},
            **{self.open_echo: 4, self.open_time: 8, self.talk: 4},
        }
        end = time.monotonic() + seconds
        self.take(self.sign_up, self.create)
        while time.monotonic() < end:
            self.take(*self.chance.choices(list(steps), list(steps.values())))
        self.take(self.read_list)
        for how in (signal.SIGKILL, signal.SIGTERM):
            self.restart(how)

    def take(self, *steps: Callable[[], None]) -> None:
        for step in steps:
            print(f"{time.time():.3f} {step.__name__}")
            with suppress(Impossible):
                step()
            for client, key in list(self.times):
                if not key.is_live(time.time()):
                    client.sock.settimeout(patience(NOTICED_SECONDS))
                    assert client.close_code() == 1008, "the key has ended"
                    self.times.remove((client, key))

    # In the pages

    def sign_up(self) -> None:
        name = f"user{len(self.users)}"
        if len(self.users) < 5:
            self.users[name] = build_opener(HTTPCookieProcessor())
            fields = {"username": name, "email": f"{name}@example.com", "password": "long enough"}
            self.submit(name, "/sign-up", "", **fields)

    def create(self) -> None:
        user, name = self.chance.choice(list(self.users)), f"key & {time.time()}"
        type, tier = self.chance.choice(["production", "development"]), "free"
        self.expect_room(user)
        if self.chance.random() < 0.2:
            tier = self.chance.choice(list(TIERS))
            expires = self.chance.choice([[], ["--expires", "3s"], ["--expires", "1d"]])
            options = ["--type", type, "--tier", tier, *expires]
            secret = self.server.flask("key", "create", user, name, *options).strip()
        else:
            secret = secret_in(self.submit(user, SECURITY, KEYS, name=name, type=type))
        self.keys.append(Key(user, secret, type, Facts(name, tier, self.end_of(secret))))

    def rotate(self) -> None:
        """The successor takes over what is saved of the window, which may lack a second."""
        key, now = self.some_live_key(), time.time()
        self.expect_room(key.user)
        if key.rotated:
            raise Impossible
        if self.chance.random() < 0.3:
            secret = self.server.flask("key", "rotate", key.id, "--grace", "3s").strip()
            until, grace = later(), 3
        else:
            form = f"{KEYS}/{key.id}/successor"
            secret = secret_in(self.submit(key.user, f"{KEYS}/{key.id}/rotate", form))
            until, grace = self.noticed(), 86_400
        successor = key.successor(secret, self.end_of(secret))
        end = self.end_of(key.secret)
        assert end == key.facts.ends_at or int(now) <= end - grace <= time.time()
        key.change(until, ends_at=end)
        self.keys.append(successor)
        began, seen = time.time(), parts(self.server.ask(STATS, X_API_Key=secret))
        used = seen["limit"] - seen["left"] - seen["total"]  # which is 0 if nothing was left
        expected = min(successor.used(seen["reset"]), seen["limit"])  # of a tier that was changed
        saved = 0 if self.server.postgres else patience(SAVED_SECONDS)
        successor.lose(expected - used, now - saved)
        successor.take(seen, began, time.time(), stats=True)

    def revoke(self) -> None:
        key = self.key_to_end()
        if self.chance.random() < 0.3:
            self.server.flask("key", "revoke", key.id)
            until = later()
        else:
            self.submit(key.user, f"{KEYS}/{key.id}/revoke", "")
            until = self.noticed()
        key.revoked = True
        key.change(until, ends_at=0)

    def rename(self) -> None:
        key, name = self.some_live_key(), f"renamed <b> {time.time()}"
        self.submit(key.user, f"{KEYS}/{key.id}/rename", "", name=name)
        key.change(self.noticed(), name=name)

    def read_page(self) -> None:
        """Each live key with its use; the chart follows within a second."""
        user = self.chance.choice(list(self.users))
        began, page = time.time(), self.visit(user, SECURITY)
        rows = {key_id: row for row, key_id in ROW.findall(page)}
        for key in [key for key in self.keys if key.user == user and key.settled(began)]:
            row = rows.get(key.id, "")
            assert (f"{key.id}/revoke" in row) == key.is_live(began)
            assert (f"{key.id}/rotate" in row) == (key.state(began) == "live")
            if key.is_live(began):
                assert re.search(rf">{re.escape(escape(key.facts.name))}\s*<", row)
                used, limit = map(int, re.findall(r"(\d+) of (\d+)", row)[0])
                right = [(one["left"], one["limit"]) for one in key.answers(began, time.time())]
                assert (max(0, limit - used - 1), limit) in right, (used, right)

        is_whole = lambda: self.missing_in_chart(user) == self.lost_in_chart[user]  # noqa: E731
        eventually(is_whole, patience(SAVED_SECONDS), "the chart has not all requests")

    def missing_in_chart(self, user: str) -> int:
        found = re.findall(r"<strong>([\d,]+)</strong> request", self.visit(user, SECURITY))
        charted = int(found[0].replace(",", "")) if found else 0
        return sum(key.total for key in self.keys if key.user == user) - charted

    # By hand

    def expire(self) -> None:
        key, end = self.key_to_end(), int(time.time()) + self.chance.choice([0, 1, 4])
        self.server.execute("UPDATE api_key SET expires_at = ? WHERE id = ?", end, key.id)
        key.change(later(), ends_at=end)

    def change_tier(self) -> None:
        key, tier = self.some_live_key(), self.chance.choice([*TIERS, "quick"])
        if self.chance.random() < 0.2:
            self.server.flask("key", "tier", key.id, tier)
        else:
            self.server.execute("UPDATE api_key SET tier = ? WHERE id = ?", tier, key.id)
        key.change(later(), tier=tier)

    def read_list(self) -> None:
        is_saved = lambda: not any(missing for _, missing in self.listed())  # noqa: E731
        eventually(is_saved, patience(SAVED_SECONDS + 1), "what was counted is not saved")

    def listed(self) -> list[tuple[Key, int]]:
        """Each key, and how many of its requests `flask key list` does not have."""
        began, lines = time.time(), self.server.flask("key", "list").splitlines()
        rows = [dict(zip(KEY_COLUMNS, line.split("\t"), strict=True)) for line in lines]
        found = {row["id"]: row for row in rows}
        assert found.keys() == {key.id for key in self.keys}
        for key in self.keys:
            row = found[key.id]
            right = (key.user, key.facts.name, key.type, key.facts.tier)
            assert (row["username"], row["name"], row["type"], row["tier"]) == right
            assert row["state"] in (key.state(began), key.state(time.time()))
            assert (row["rotated_at"] != "never") == key.rotated
            assert (row["revoked_at"] != "never") == key.revoked
        return [(key, key.total - int(found[key.id]["total"])) for key in self.keys]

    def restart(self, how: signal.Signals | None = None) -> None:
        """At a kill, a second may be lost: of what SQLite counts, of PostgreSQL's chart."""
        self.take(self.open_echo, self.open_time, self.burst)
        now, how = time.time(), how or self.chance.choice(STOPS)
        print(how.name)
        if how == signal.SIGHUP and self.server.postgres:
            before = set(self.server.worker_pids)
            os.kill(self.server.pid, how)
            eventually(lambda: len(set(self.server.worker_pids) - before) == 2, 10)
            eventually(lambda: len(self.server.worker_pids) == 2, 10)
        else:
            assert self.server.stop(how)[0] == (-9 if how == signal.SIGKILL else 0)
        if how != signal.SIGKILL:
            if not self.server.postgres:
                assert self.server.stored == {"service.db"}
                assert self.server.database.stat().st_mode & 0o777 == 0o600, "for its owner only"
            assert {client.close_code() for client in self.echoes} <= {1001}
            assert {c.close_code() for c, key in self.times if key.is_live(now)} <= {1001}
        self.echoes, self.times = [], []
        if self.server.ended:
            self.server.start()
        since = now - patience(SAVED_SECONDS) if how == signal.SIGKILL else time.time()
        for key, lost in self.listed():
            key.lose(lost, time.time() if self.server.postgres else since)
            key.total -= lost
        for user in self.users if self.server.postgres and how == signal.SIGKILL else []:
            hits = [hit for key in self.keys if key.user == user for hit in key.hits]
            lost = self.missing_in_chart(user) - self.lost_in_chart[user]
            assert 0 <= lost <= sum(made >= since for made, _ in hits), f"{lost} of {user} are lost"
            self.lost_in_chart[user] += lost

    # With a key

    def hit(self) -> None:
        self.ask(self.some_key(), 1, 1)

    def burst(self) -> None:
        self.ask(self.some_key(), 1, 25)

    def storm(self) -> None:
        if (key := self.some_key()).settled(time.time()):
            self.ask(key, 16, 3)

    def ask(self, key: Key, connections: int, each: int) -> None:
        began = time.time()
        with ExitStack() as stack:
            clients = [stack.enter_context(RawSocket(self.server.port)) for _ in range(connections)]
            paths = self.chance.choices([TEST, STATS], k=connections * each)
            for client, path in zip(clients * each, paths, strict=True):
                client.send(request_bytes(path, {"Host": "a", "X-API-Key": key.secret}))
            answers = [parts(client.answer()) for client in clients * each]
        seen = [(one, path == STATS) for one, path in zip(answers, paths, strict=True)]
        if connections > 1:  # in the order in which they were counted
            seen.sort(key=lambda s: (s[0].get("reset"), -s[0].get("left", 0), s[0]["status"], s[1]))
        for answer, is_stats in seen:
            key.take(answer, began, time.time(), is_stats)

    def read_user(self) -> None:
        key, began = self.some_key(), time.time()
        answer = self.server.ask(ME, X_API_Key=key.secret)
        key.take(parts(answer), began, time.time())
        if answer.status == 200:
            body, own = answer.json(), [one for one in self.keys if one.user == key.user]
            live = [sum(one.is_live(moment) for one in own) for moment in (began, time.time())]
            assert (body["username"], body["email"]) == (key.user, f"{key.user}@example.com")
            assert body["api_key_count"] in live

    # Sockets

    def open_echo(self) -> None:
        client = self.stack.enter_context(RawSocket(self.server.port))
        self.echoes.append(client.open(ECHO))

    def open_time(self, key: Key | None = None) -> None:
        key = key or self.some_key()
        if key.facts.tier == "quick" or not key.settled(time.time()) or time.time() % 60 > 57:
            raise Impossible  # the answer to an upgrade does not say in which window it is counted
        client = self.stack.enter_context(RawSocket(self.server.port))
        began, answer = time.time(), client.handshake(f"{TIME}?api_key={key.secret}")
        if answer.status == 101:
            hello = {"type": "auth_success", "api_key_name": key.facts.name}
            assert client.frame().json() == hello
            self.times.append((client, key))
        key.take(parts(answer), began, time.time())

    def talk(self) -> None:
        began = time.time()
        for number, client in enumerate(self.echoes):
            client.send(frame(TEXT, f"hello {number}".encode()))
            assert said(client)["message"] == f"hello {number}"
        for client, key in self.times:
            if key.is_live(began) and key.settled(began):
                client.send(frame(TEXT, b"What a client says here is ignored."))
                while utc(said(client)["timestamp"]) < began:
                    pass

    # Helpers

    def expect_room(self, user: str) -> None:
        if sum(key.user == user for key in self.keys) >= MOST_KEYS:
            raise Impossible

    def some_live_key(self) -> Key:
        """A key that may be changed: alive for some seconds, and known to everybody as it is."""
        now = time.time()
        keys = [key for key in self.keys if key.settled(now) and key.is_live(now)]
        if not keys:
            raise Impossible
        return self.chance.choice(keys)

    def key_to_end(self) -> Key:
        key = self.some_live_key()
        with suppress(Impossible):
            self.open_time(key)
        return key

    def some_key(self) -> Key:
        return self.chance.choice(self.keys if self.chance.random() < 0.3 else self.keys[-4:])

    def noticed(self) -> float:
        """Until when a change in a page may go unnoticed; a single process knows it at once."""
        return later() if self.server.postgres else 0

    def end_of(self, secret: str) -> float:
        sql = "SELECT expires_at FROM api_key WHERE id = ?"
        return self.server.execute(sql, secret[8:16])[0][0] or float("inf")

    def visit(self, user: str, path: str, data: bytes | None = None) -> str:
        with self.users[user].open(self.server.url + path, data, timeout=10) as response:
            return response.read().decode()

    def submit(self, user: str, page: str, action: str, **fields: str) -> str:
        """Fill in and send the form that has this action, or none, as a browser does."""
        forms = re.findall(r"<form([^>]*)>(.*?)</form>", self.visit(user, page), re.S)
        targets = [(re.findall(r'action="(.*?)"', head), form) for head, form in forms]
        (form,) = [form for target, form in targets if target == ([action] if action else [])]
        hidden = dict(re.findall(r'type="hidden" name="(\w+)" value="(.*?)"', form))
        chosen = dict(re.findall(r'<select id="(\w+)".*?<option value="(.*?)"', form, re.S))
        return self.visit(user, action or page, urlencode(hidden | chosen | fields).encode())


def later() -> float:
    """Until when a change that was made elsewhere may go unnoticed."""
    return time.time() + patience(NOTICED_SECONDS)


def secret_in(page: str) -> str:
    return re.findall(r"sk_(?:live|test)_\w{8}_\w{38}", page)[0]


def utc(text: str) -> float:
    return timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")) + float(text[19:-1] or 0)


def said(client: RawSocket) -> Any:
    while (found := client.frame()).opcode == PING:
        client.send(frame(PONG, found.payload))
    return found.json()


def parts(answer: Answer) -> dict[str, Any]:
    """What an answer says about its key; headers and body must agree."""
    seen: dict[str, Any] = {"status": {101: 200}.get(answer.status, answer.status)}
    if answer.status in (200, 429):
        headers, body = answer.headers, answer.json()
        names = {"Limit": "limit", "Remaining": "left", "Reset": "reset"}
        seen |= {name: int(headers[f"X-RateLimit-{word}"]) for word, name in names.items()}
        seen["tier"] = headers["RateLimit-Policy"].split('"')[1]
        assert f"r={seen['left']};" in headers["RateLimit"]
        names = {"api_key_name": "name", "api_key_type": "type", "total_requests": "total"}
        seen |= {name: body[word] for word, name in names.items() if word in body}
        assert body.get("rate_limit_tier", seen["tier"]) == seen["tier"]
        assert body.get("requests_remaining", seen["left"]) == seen["left"]
        assert "reset_time" not in body or utc(body["reset_time"]) == seen["reset"]
    return seen
