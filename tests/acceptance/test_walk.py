"""A walk at random through what happens to keys, compared with a small model."""

import random
import signal
import time
from dataclasses import dataclass, field, replace

import pytest

from conftest import StartServer
from helpers.paths import ME, STATS, TEST
from helpers.rawsocket import Answer
from helpers.server import Server, eventually, patience

WALK_SECONDS = 20
NOTICED_SECONDS = 2  # until every process knows that a key was changed
SAVED_SECONDS = 1.5  # until the database has what was counted: 1, and a pause of the machine
TIERS = {"free": 40, "pro": 90, "quick": 6}
LIMITS = "free=40/minute,pro=90/minute,quick=6/second"


@pytest.mark.long
def test_random_walk_fits_the_model(start_server: StartServer, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("randomly_seed")
    server = start_server(RATE_LIMITS=LIMITS)
    print(
        f"To repeat it: pytest -n 0 --ci {'--postgres ' if server.postgres else ''}"
        f"tests/acceptance/test_walk.py --randomly-seed={seed}"
    )
    Walk(server, random.Random(seed)).go()


@dataclass
class Key:
    """What is promised of a key, in the simplest words."""

    secret: str
    tier: str = "free"
    is_live: bool = True
    is_rotated: bool = False
    replaced: "Key | None" = None
    known_at: float = 0  # when every process knows its last change
    total: int = 0
    charted: int = 0
    hits: list[tuple[float, int]] = field(default_factory=list)  # when, and the end of the window

    @property
    def id(self) -> str:
        return self.secret[8:16]

    def check(self, path: str, answer: Answer) -> None:
        """The answer must be right; then it counts."""
        if not self.is_live:
            assert answer.status == 401
            return
        limit = TIERS[self.tier]
        reset = int(answer.headers["X-RateLimit-Reset"])
        left = limit - [end for _, end in self.hits].count(reset)  # of what is used
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


def window(hits: list[tuple[float, int]]) -> tuple[int, int]:
    """The end of the last window, and how many requests were made in it."""
    reset = hits[-1][1] if hits else 0
    return reset, [end for _, end in hits].count(reset)


class Walk:
    def __init__(self, server: Server, chance: random.Random) -> None:
        self.server, self.chance = server, chance
        self.keys = [Key(server.new_key(tier=tier), tier) for tier in [*TIERS, "free"]]

    def go(self) -> None:
        steps = {self.ask: 20, self.rotate: 3, self.change_tier: 2, self.revoke: 1, self.restart: 2}
        end = time.monotonic() + WALK_SECONDS
        while time.monotonic() < end:
            (step,) = self.chance.choices(list(steps), list(steps.values()))
            print(f"{time.time():.3f} {step.__name__}")
            step()

    def ask(self) -> None:
        """Each time over a new connection, so that any process may answer."""
        key, path = self.some_key(), self.chance.choice([TEST, ME, STATS])
        for _ in range(self.chance.choice([1, 1, 5, 30])):
            key.check(path, self.server.ask(path, X_API_Key=key.secret))

    def rotate(self) -> None:
        """The successor goes on with the window as it was saved, and one other key lives on."""
        key, grace = self.some_live_key(), self.chance.choice(["0", "0", "24h"])
        older = key.replaced if key.replaced and key.replaced.is_live else None
        both = [each for each in (key, older) if each]
        for each in both:
            eventually(
                lambda: self.saved(each) == (each.total, each.charted),  # noqa: B023
                patience(SAVED_SECONDS),
            )
        secret = self.server.flask("key", "rotate", key.id, "--grace", grace).strip()
        is_lost = older and not key.total
        new = replace(key, secret=secret, total=0, charted=0, replaced=older if is_lost else key)
        new.hits = [*max((each.hits for each in both), key=window)]
        self.keys.append(new)
        key.change(is_live=grace != "0" and not is_lost, is_rotated=True)
        if older and not is_lost:
            older.change(is_live=False)

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
        how = self.chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
        self.ask()
        print(how.name)
        since = time.time() - (patience(SAVED_SECONDS) if how == signal.SIGKILL else 0)
        self.server.stop(how)
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
        ((total, charted),) = self.server.execute(
            """SELECT total,
            (SELECT coalesce(sum(requests), 0) FROM hourly_usage WHERE key_id = id)
            FROM api_key WHERE id = ?""",
            key.id,
        )
        return total, charted

    def some_key(self) -> Key:
        """One that every process knows as it is."""
        return self.chance.choice(
            eventually(lambda: [key for key in self.keys if key.known_at < time.time()], 60)
        )

    def some_live_key(self) -> Key:
        """One that was not rotated; a new one if there is none."""
        if known := [
            key
            for key in self.keys
            if key.is_live and not key.is_rotated and key.known_at < time.time()
        ]:
            return self.chance.choice(known)
        self.keys.append(Key(self.server.new_key()))
        return self.keys[-1]
