"""When a shard that has ended is started again, and when it is given up."""

MOST_IN_A_ROW = 5
FORGIVEN_AFTER_S = 60.0
FIRST_PAUSE_S = 0.5


class ShardRestarts:
    """Decides for all shards of a run: at once the first time, then after a pause that doubles.

    A shard that has served for a minute begins anew; one that ends again and again is given up.

    >>> restarts = ShardRestarts()
    >>> [restarts.ended("shard0", 10.0 * ends) for ends in range(6)]
    [0.0, 10.5, 21.0, 32.0, 44.0, None]
    >>> restarts.ended("shard1", 50.0), restarts.ended("shard1", 120.0)
    (50.0, 120.0)
    """

    def __init__(self) -> None:
        self._ends: dict[str, tuple[float, int]] = {}  # when it ended last, and how often in a row
        self._due: dict[str, float] = {}

    def ended(self, name: str, now: float) -> float | None:
        """A shard has ended; when to start it again, None: not at all."""
        last, before = self._ends.get(name, (now, 0))
        if now - last > FORGIVEN_AFTER_S:
            before = 0
        self._ends[name] = (now, before + 1)
        if before == MOST_IN_A_ROW:
            return None
        self._due[name] = now + (FIRST_PAUSE_S * 2 ** (before - 1) if before else 0.0)
        return self._due[name]

    def is_awaited(self, name: str) -> bool:
        """Whether it is to be started and has not been."""
        return name in self._due

    def due(self, now: float) -> list[str]:
        """Who is to be started now; says so once."""
        names = [name for name, at in self._due.items() if at <= now]
        for name in names:
            del self._due[name]
        return names
