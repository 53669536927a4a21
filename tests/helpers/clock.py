"""A clock that stands still until a test moves it."""

NOON = 1_795_262_400  # 2026-11-21T12:00:00Z, a Saturday


class Clock:
    """Stands in for the module `time` in a module that is tested."""

    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    monotonic = time
