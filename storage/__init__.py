"""Where keys and counts are stored: SQLite or PostgreSQL, behind the methods of a Store."""

from typing import Protocol

from models import ApiKey
from ratelimit import Allowance, Quota


class Store(Protocol):
    """What the rest of the service asks of a database; each method may raise PeeweeException.

    A window ends at `(now // seconds + 1) * seconds`. A row with another `reset` has used nothing
    of the current window. `Limiter.hit`, SAVE in sqlite.py and count.sql all follow this rule.
    """

    def find(self, key_id: str) -> ApiKey | None:
        """The key with this id, ended or not."""

    def hit(self, key: ApiKey, quota: Quota, cost: int = 1) -> Allowance | None:
        """Count a request if the window's allowance is not used up; None if the key is deleted.

        A cost of 0 counts nothing and asks no database: it goes by the row that was found.
        """

    def ended(self, key_ids: set[str]) -> set[str]:
        """Which of these keys have ended."""

    def save(self) -> None:
        """Save what has been counted, and delete rows that are too old.

        Just before, the caller forgets all keys that it has looked up. With SQLite, no other
        greenlet runs between that and the end of the save, so no count is seen twice or missed.
        """

    def close(self) -> None:
        """Save what is left, and close the database."""
