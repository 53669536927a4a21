"""What is promised of a key, in the simplest words: test_walk.py compares each answer with it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TIERS = {"free": (40, 60), "pro": (150, 3600), "quick": (6, 1)}  # requests in so many seconds


class Facts(NamedTuple):
    """What can be changed about a key."""

    name: str
    tier: str
    ends_at: float = math.inf


@dataclass
class Key:
    user: str
    secret: str
    type: str
    facts: Facts
    rotated: bool = False
    revoked: bool = False
    earlier: list[tuple[float, Facts]] = field(default_factory=list)  # what may be seen until when
    total: int = 0
    hits: list[tuple[float, int]] = field(default_factory=list)  # when, and the end of the window

    @property
    def id(self) -> str:
        return self.secret[8:16]

    def change(self, until: float, **facts: Any) -> None:
        """Change it; not everybody needs to know before that moment."""
        self.earlier.append((until, self.facts))
        self.facts = self.facts._replace(**facts)

    def settled(self, now: float) -> bool:
        """Whether everybody knows everything about it, and nothing ends within some seconds."""
        end = self.facts.ends_at
        return all(until < now for until, _ in self.earlier) and not now < end < now + 10

    def state(self, now: float) -> str:
        if self.revoked:
            return "revoked"
        if self.facts.ends_at <= now:
            return "expired"
        return "rotated" if self.rotated else "live"

    def is_live(self, now: float) -> bool:
        return self.state(now) in ("live", "rotated")

    def used(self, reset: int) -> int:
        """In the window that ends then: the latest requests, if they were made in it."""
        others = [place for place, hit in enumerate(self.hits, 1) if hit[1] != reset]
        return len(self.hits) - max(others, default=0)

    def answers(self, began: float, ended: float, stats: bool = False) -> Iterator[dict[str, Any]]:
        """Every right answer to a request, for /usage/stats or not, between these moments."""
        known = [self.facts, *(facts for until, facts in self.earlier if began < until)]
        for moment in (began, *range(int(began) + 1, int(ended) + 1)):
            for facts in known:
                yield self._answer(facts, moment, stats)

    def _answer(self, facts: Facts, moment: float, stats: bool) -> dict[str, Any]:
        if facts.ends_at <= moment:
            return {"status": 401}
        limit, seconds = TIERS[facts.tier]
        reset = (int(moment) // seconds + 1) * seconds
        left = limit - self.used(reset)
        window = {"tier": facts.tier, "limit": limit, "reset": reset}
        about = {"name": facts.name, "type": self.type, "total": self.total + (left > 0)}
        if left <= 0:
            rest = {"status": 200, **about} if stats else {"status": 429}
            return {"left": 0, **window, **rest}
        return {"status": 200, "left": left - 1, **window, **about}

    def take(self, seen: dict[str, Any], began: float, ended: float, stats: bool = False) -> None:
        """What was seen of an answer must be right; then it counts."""
        right = list(self.answers(began, ended, stats))
        found = next((answer for answer in right if seen.items() <= answer.items()), None)
        assert found, f"{seen} is none of {right}"
        if found.get("total") == self.total + 1:
            self.total += 1
            self.hits.append((ended, found["reset"]))

    def lose(self, count: int, since: float) -> None:
        """The latest requests are not counted, none of which was made before that moment."""
        assert 0 <= count <= sum(made >= since for made, _ in self.hits), f"{count} are lost"
        del self.hits[len(self.hits) - count :]

    def successor(self, secret: str, ends_at: float) -> "Key":
        self.rotated, facts = True, self.facts._replace(ends_at=ends_at)
        return Key(self.user, secret, self.type, facts, hits=[*self.hits])
