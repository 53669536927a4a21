"""A walk at random through what happens to users and keys, compared with a small model."""

import random
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fcntl import ioctl
from itertools import takewhile
from subprocess import PIPE, Popen
from termios import FIONREAD
from typing import Any

import pytest

from conftest import StartServer
from helpers.paths import ME, STATS, TEST
from helpers.rawsocket import Answer
from helpers.server import REPOSITORY, Server, eventually, patience

WALK_SECONDS = 40
NOTICED_SECONDS = 2  # until every process knows that a key was changed
SAVED_SECONDS = 1.5  # until the database has what was counted: 1, and a pause of the machine
TIERS = {"free": (40, 60), "pro": (90, 60), "quick": (6, 1)}  # requests in so many seconds
LIMITS = "free=40/minute,pro=90/minute,quick=6/second"
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
SAVED = """SELECT total, (SELECT coalesce(sum(requests), 0) FROM hourly_usage WHERE key_id = id)
    FROM api_key WHERE id = ?"""
LATE = [  # each reads a user; then the command waits for the rest of a line, the form for its hash
    '"$PYTHON" -m flask user password "$NAME" --password-stdin',
    """form() { curl -s -H "X-Forwarded-For: $CALLER" -d "password=long enough" "$@"; }
    form -L -b <(form -o /dev/null -c - -d "username=$NAME" "$URL/log-in") \\
        -H "Wait-For: /proc/$$/fd/0" "$URL/settings/profile/delete" |
        grep "Your account and its keys are deleted" > /dev/null""",
]
HASHES_WAIT = """
import gevent, pathlib
from accounts import passwords
from flask import request
verify = passwords.verify_password
def wait_and_verify(*args):
    if file := request.headers.get("Wait-For"):  # until its other end is closed
        gevent.get_hub().threadpool.apply(pathlib.Path(file).read_bytes)
    return verify(*args)
passwords.verify_password = wait_and_verify"""
ADVICE = (
    "what had read a user and then waited has changed another, or says that it has changed what "
    "was gone: use `with transaction(user):`, see storage/database.py"
)


def test_random_walk_fits_the_model(
    start_patched: StartServer, pytestconfig: pytest.Config
) -> None:
    seed = pytestconfig.getoption("walk_seed") or random.randrange(10**6)
    server = start_patched(HASHES_WAIT, RATE_LIMITS=LIMITS, PROXY_HOPS="1")
    print(
        f"To repeat it: pytest -n 0 --ci {'--postgres ' if server.postgres else ''}"
        f"tests/acceptance/test_walk.py --walk-seed {seed}"
    )
    Walk(server, random.Random(seed)).go()
    assert "Traceback" not in server.log()


@dataclass
class Key:
    """What is promised of a key, in the simplest words."""

    secret: str
    tier: str = "free"
    is_live: bool = True
    is_rotated: bool = False
    known_at: float = 0  # when every process knows its last change
    total: int = 0
    charted: int = 0
    hits: list[tuple[float, int]] = field(default_factory=list)  # when, and the end of the window

    @property
    def id(self) -> str:
        return self.secret[8:16]

    def used(self, reset: int) -> int:
        """How many of the last requests were made in the window that ends then."""
        return len(list(takewhile(lambda hit: hit[1] == reset, reversed(self.hits))))

    def check(self, path: str, answer: Answer, began: float) -> None:
        """The answer must be right; then it counts."""
        if not self.is_live:
            assert answer.status == 401
            return
        limit, seconds = TIERS[self.tier]
        reset = int(answer.headers["X-RateLimit-Reset"])
        assert reset % seconds == 0
        assert began < reset <= time.time() + seconds
        left = limit - self.used(reset)
        if left > 0:
            self.total, self.charted = self.total + 1, self.charted + 1
            self.hits.append((time.time(), reset))
        assert answer.status == (200 if left > 0 or path == STATS else 429)
        assert int(answer.headers["X-RateLimit-Limit"]) == limit
        assert int(answer.headers["X-RateLimit-Remaining"]) == max(0, left - 1)
        assert answer.json().get("total_requests", self.total) == self.total

    def change(self, **facts: str | bool) -> None:
        """A change that is made elsewhere may go unnoticed for some time."""
        vars(self).update(facts, known_at=time.time() + patience(NOTICED_SECONDS))


class Walk:
    def __init__(self, server: Server, chance: random.Random) -> None:
        self.server, self.chance = server, chance
        self.keys = [Key(server.new_key(tier=tier), tier) for tier in [*TIERS, "free"]]
        self.users: dict[str, str] = {}  # as `stored` returns them
        self.late = ExitStack()  # what has begun and not ended

    def go(self) -> None:
        steps = {
            **{self.ask: 20, self.rotate: 3, self.change_tier: 2, self.revoke: 1, self.restart: 2},
            **{self.new_user: 2, self.delete_user: 2, self.begin: 4, self.late.close: 2},
        }
        end = time.monotonic() + WALK_SECONDS
        with self.late:
            while time.monotonic() < end:
                possible = steps if self.users else {self.new_user: 1}
                (step,) = self.chance.choices(list(possible), list(possible.values()))
                print(f"{time.time():.3f} {step.__name__}")
                step()
                assert self.stored() == self.users, ADVICE

    def ask(self) -> None:
        """Each time over a new connection, so that any process may answer."""
        key, path = self.some_key(), self.chance.choice([TEST, ME, STATS])
        for _ in range(self.chance.choice([1, 1, 5, 30])):
            began = time.time()
            key.check(path, self.server.ask(path, X_API_Key=key.secret), began)

    def rotate(self) -> None:
        """The successor goes on with the window as it was saved."""
        key, grace = self.some_live_key(), self.chance.choice(["0", "0", "24h"])
        is_saved = lambda: self.saved(key) == (key.total, key.charted)  # noqa: E731
        eventually(is_saved, patience(SAVED_SECONDS), "what was counted is not saved")
        secret = self.server.flask("key", "rotate", key.id, "--grace", grace).strip()
        self.keys.append(replace(key, secret=secret, total=0, charted=0, hits=[*key.hits]))
        key.change(is_live=grace != "0", is_rotated=True)

    def change_tier(self) -> None:
        """To one with a window of the same length."""
        key, tier = self.some_live_key(), self.chance.choice(["free", "pro"])
        if key.tier != "quick":
            self.server.flask("key", "tier", key.id, tier)
            key.change(tier=tier)

    def revoke(self) -> None:
        key = self.some_live_key()
        self.server.flask("key", "revoke", key.id)
        key.change(is_live=False)

    def restart(self) -> None:
        """Only a kill may lose something: the last second of SQLite's counts, or of the chart."""
        how = self.chance.choice(STOPS)
        self.late.close()
        self.ask()
        print(how.name)
        is_kill = how == signal.SIGKILL
        since = time.time() - (patience(SAVED_SECONDS) if is_kill else 0)
        assert self.server.stop(how)[0] == (-signal.SIGKILL if is_kill else 0)
        for key in [key for key in self.keys if key.is_live]:
            total, charted = self.saved(key)
            lost, most = key.total - total, sum(when > since for when, _ in key.hits)
            assert 0 <= lost <= (0 if self.server.postgres else most)
            assert lost <= key.charted - charted <= most
            key.total, key.charted = total, charted
            key.hits = key.hits[: len(key.hits) - lost]
        self.server.start()

    def saved(self, key: Key) -> tuple[int, int]:
        """How many requests the row of the key has, and its chart."""
        ((total, charted),) = self.server.execute(SAVED, key.id)
        return total, charted

    def some_key(self) -> Key:
        """One that every process knows as it is."""
        eventually(lambda: any(key.known_at < time.time() for key in self.keys), 60)
        return self.chance.choice([key for key in self.keys if key.known_at < time.time()])

    def some_live_key(self) -> Key:
        """One that was not rotated; a new one if there is none."""
        usable = [key for key in self.keys if key.is_live and not key.is_rotated]
        known = [key for key in usable if key.known_at < time.time()]
        if not known:
            known.append(Key(self.server.new_key()))
            self.keys += known
        return self.chance.choice(known)

    def new_user(self) -> None:
        """With a key, and a name that others have had; the one who has it now is renamed."""
        name, other = self.chance.choice(["ada", "bob", "eve"]), self.chance.randbytes(8).hex()
        self.server.execute('UPDATE "user" SET username = ? WHERE username = ?', other, name)
        self.users = {user: other if its == name else its for user, its in self.users.items()}
        self.server.flask(
            *("user", "create", name, f"{other}@example.com", "--password-stdin"),
            input="long enough",
        )
        self.server.flask("key", "create", name, "only key")
        self.users |= self.stored(name)

    def delete_user(self) -> None:
        """The newest, whose number SQLite gives to the next one unless it is told not to."""
        self.server.flask("user", "delete", self.users.popitem()[1])

    def begin(self) -> None:
        """Begin something that has read a user, and waits."""
        user = self.chance.choice(list(self.users))
        process: Any = Popen(
            ["bash", "-c", self.chance.choice(LATE)],
            env=self.server.env
            | {
                "NAME": self.users[user],
                "PYTHON": self.server.command[0],
                "URL": self.server.url,
                "CALLER": f"192.0.2.{self.chance.randrange(256)}",
            },
            cwd=REPOSITORY,
            stdin=PIPE,
            bufsize=0,
        )
        process.stdin.write(b"long ")
        eventually(
            lambda: not any(ioctl(process.stdin, FIONREAD, bytes(4))), 60, "it reads no input"
        )
        self.late.callback(self.end, user, process)

    def end(self, user: str, process: Any) -> None:
        """It is done if the user is still there, with the same password."""
        process.communicate(b"enough\n", timeout=60)
        assert (process.returncode == 0, user in self.stored()) == (user in self.users, False), (
            ADVICE
        )
        self.users |= self.stored(self.users.pop(user, ""))

    def stored(self, name: str = "%") -> dict[str, str]:
        """The names of the users that the walk has made, by the password's hash and the key."""
        return dict(
            self.server.execute(
                """SELECT password_hash || api_key.id, username
                FROM "user" JOIN api_key ON user_id = "user".id
                WHERE api_key.name = 'only key' AND username LIKE ?""",
                name,
            )
        )
