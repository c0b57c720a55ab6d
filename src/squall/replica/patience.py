"""Whom a replica waits for: what of it is told, and when it is too long. No clock here."""

from collections.abc import Mapping

from squall.errors import LostError
from squall.replica.exchange import LOST_AFTER_S
from squall.wire.control import Awaits
from squall.wire.tcp import WAITS_TOLD_AFTER_S


class Silences:
    """Those who are there and do not answer: each is told when it has been waited for long, and when it has answered.

    >>> silences = Silences()
    >>> silences.look({"shard0": 1, "shard1": 1}, now=10.0), silences.look({"shard1": 1}, now=14.0)
    ([], [])
    >>> silences.look({"shard1": 1}, now=15.5), silences.look({}, now=20.0)
    ([Awaits(role='shard1', seconds=5.5)], [Awaits(role='shard1', seconds=0.0)])
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}  # by role and request
        self._told: set[tuple[str, int]] = set()

    def __bool__(self) -> bool:
        return bool(self._since)

    def look(self, awaited: Mapping[str, int], now: float) -> list[Awaits]:
        """Take in who has not answered yet.

        Args:
            awaited: roles, with the number of the request that each has not answered.

        Returns:
            What is to be told.
        """
        self._since = {request: self._since.get(request, now) for request in awaited.items()}
        answered = sorted(self._told - set(self._since))
        late = {
            request: now - since
            for request, since in self._since.items()
            if request not in self._told and now - since > WAITS_TOLD_AFTER_S
        }
        self._told = self._told.difference(answered).union(late)
        return [
            *(Awaits(role=role, seconds=0.0) for role, _ in answered),
            *(Awaits(role=role, seconds=seconds) for (role, _), seconds in late.items()),
        ]


class Absences:
    """Shards, or the coordinator, that are gone and are waited for: for how long is told every few seconds, and not for ever.

    Args:
        name: who waits.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._since: dict[str, float] = {}
        self._told = 0.0

    def __bool__(self) -> bool:
        return bool(self._since)

    def __contains__(self, name: object) -> bool:
        return name in self._since

    def gone(self, shard: str, now: float) -> None:
        self._told = self._since.setdefault(shard, now)

    def back(self, shard: str) -> None:
        self._since.pop(shard, None)

    def tick(self, now: float) -> None:
        """Time has passed; call it about once a second.

        Raises:
            LostError: one has been waited for too long.
        """
        for shard, since in self._since.items():
            if now - since > LOST_AFTER_S:
                raise LostError(reason=f"{shard} is gone, and did not come back within {LOST_AFTER_S:g} s")
        if self._since and now - self._told > WAITS_TOLD_AFTER_S:
            self._told = now
            waits = ", ".join(
                f"{shard}, gone for {now - since:.0f} s" for shard, since in self._since.items()
            )
            print(f"{self._name} waits for {waits}", flush=True)
