"""Roles that do not answer, as those who wait for them tell their launcher. No clock here."""

from dataclasses import dataclass, field

from squall.observe.events import Silent


@dataclass(slots=True)
class Silences:
    """Who waits for whom, and since when.

    >>> silences = Silences()
    >>> silences.told("replica0.0", "shard0", 5.0, now=12.0)
    Silent(time_s=12.0, role='shard0', seconds=5.0, waiting=('replica0.0',))
    >>> silences.told("replica1.0", "shard0", 5.0, now=13.0), silences.waits(19.0)
    (None, ('replica0.0 and 1 more wait for shard0, since 12 s',))
    >>> silences.told("replica1.0", "shard0", 0.0, now=20.0)
    >>> silences.told("replica0.0", "shard0", 0.0, now=20.0), silences.waits(20.0)
    (Silent(time_s=20.0, role='shard0', seconds=13.0, waiting=()), ())
    """

    _since: dict[str, dict[str, float]] = field(default_factory=dict)  # by who is silent, by who waits
    _first: dict[str, float] = field(default_factory=dict)  # by who is silent, since when

    def told(self, who: str, role: str, seconds: float, now: float) -> Silent | None:
        """One waits for the answer of another for so long, or has had it after all.

        Returns:
            What is worth an event: the first word of it, and the last.
        """
        waiting = self._since.setdefault(role, {})
        if seconds:
            waiting[who] = now - seconds
            if role in self._first:
                return None
            self._first[role] = now - seconds
            return Silent(time_s=now, role=role, seconds=seconds, waiting=(who,))
        waiting.pop(who, None)
        if waiting or (first := self._first.pop(role, None)) is None:
            return None
        return Silent(time_s=now, role=role, seconds=now - first)

    def ended(self, who: str) -> None:
        """Who is gone waits for nobody."""
        for role, waiting in self._since.items():
            waiting.pop(who, None)
            if not waiting:
                self._first.pop(role, None)

    def waits(self, now: float) -> tuple[str, ...]:
        """The same in words, for people."""
        return tuple(
            f"{_named(sorted(waiting))} for {role}, since {now - min(waiting.values()):.0f} s"
            for role, waiting in self._since.items()
            if waiting
        )


def _named(waiting: list[str]) -> str:
    return f"{waiting[0]} waits" if len(waiting) == 1 else f"{waiting[0]} and {len(waiting) - 1} more wait"
