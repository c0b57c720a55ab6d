"""Which signal goes to which process when, by the faults that a run was asked to have. Pure: time and chance are handed in."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from squall.errors import ConfigError
from squall.faults import AtStep, AtTime, Chance, Delay, Drop, Duplicate, Fault, Kill, Pause, is_named

Draw: TypeAlias = Callable[[int, str, int], float]
"""(number of the fault, role, minibatch) to a number in [0, 1) that depends on nothing else but the run's seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Do this to a role now.

    Attributes:
        role: as faults name it: "replica2", "shard0".
        what: "kill", "stop", or "go on" after a pause.
        fault: which says so.
    """

    role: str
    what: str
    fault: Kill | Pause


@dataclass(slots=True)
class _Aim:
    """One fault and one role that it means."""

    number: int
    fault: Kill | Pause
    role: str
    seen: int = 0  # minibatches that have been looked at
    is_over: bool = False


class Chaos:
    """Says what is to be done to whom.

    A role's steps are the minibatches that it has finished, in all its lives, as far as is known; those of a role that
    computes none are the whole run's. So on processes a fault of the 20th minibatch comes soon after the 20th.

    Args:
        faults: kills and pauses; others are left out.
        roles: that there are.
        draw: what chance is; see `Draw`.

    >>> from squall.faults import parse
    >>> chaos = Chaos(parse("pause:replica0,2s@step=5"), ["replica0", "replica1"], lambda *place: 0.5)
    >>> [strike.what for strike in chaos.due(1.0, {"replica0": 4, "replica1": 9})]
    []
    >>> [strike.what for strike in chaos.due(1.5, {"replica0": 6, "replica1": 9})]
    ['stop']
    >>> [strike.what for now in (3.4, 3.5, 3.6) for strike in chaos.due(now, {"replica0": 6, "replica1": 12})]
    ['go on']
    """

    def __init__(self, faults: Sequence[Fault], roles: Iterable[str], draw: Draw) -> None:
        self._draw = draw
        self._aims = [
            _Aim(number, fault, role)
            for number, fault in enumerate(faults)
            if isinstance(fault, Kill | Pause)
            for role in roles
            if is_named(role, fault.role)
        ]
        self._paused: dict[str, tuple[float, Pause]] = {}  # until when

    @property
    def is_over(self) -> bool:
        """Nothing will be done any more."""
        return not self._paused and all(aim.is_over for aim in self._aims)

    def due(self, now: float, steps: Mapping[str, int]) -> list[Strike]:
        """What to do now.

        Args:
            now: seconds since the start.
            steps: minibatches finished, by replica; of one that is not there, 0.
        """
        whole = sum(steps.values())
        strikes = self._going_on(now)
        for aim in self._aims:
            done = steps.get(aim.role, 0) if aim.role.startswith("replica") else whole
            if not aim.is_over and self._hits(aim, now, done):
                strikes.extend(self._strike(aim, now))
        return strikes

    def calm(self) -> list[Strike]:
        """The run is about to end: whoever stands still goes on, and nothing else happens."""
        for aim in self._aims:
            aim.is_over = True
        return self._going_on(float("inf"))

    def _hits(self, aim: _Aim, now: float, done: int) -> bool:
        before, aim.seen = aim.seen, max(aim.seen, done)
        match aim.fault.when:
            case AtTime(seconds=seconds):
                aim.is_over = now >= seconds
                return aim.is_over
            case AtStep(step=step):
                aim.is_over = done >= step
                return aim.is_over
            case Chance(probability=probability):
                places = range(before, done)
                return any(self._draw(aim.number, aim.role, place) < probability for place in places)

    def _strike(self, aim: _Aim, now: float) -> list[Strike]:
        if isinstance(aim.fault, Kill):
            self._paused.pop(aim.role, None)
            return [Strike(role=aim.role, what="kill", fault=aim.fault)]
        until, _ = self._paused.get(aim.role, (0.0, aim.fault))
        self._paused[aim.role] = max(until, now + aim.fault.seconds), aim.fault
        return [Strike(role=aim.role, what="stop", fault=aim.fault)]

    def _going_on(self, now: float) -> list[Strike]:
        over = [(role, fault) for role, (until, fault) in self._paused.items() if until <= now]
        for role, _ in over:
            del self._paused[role]
        return [Strike(role=role, what="go on", fault=fault) for role, fault in over]


def expect_kinds(faults: Sequence[Fault], where: str, *, is_tcp: bool) -> None:
    """Refuse what cannot be done to real processes.

    Args:
        where: the cluster, as errors call it.
        is_tcp: there are connections that something may stand in between.

    Raises:
        ConfigError: names the fault.
    """
    for fault in faults:
        if isinstance(fault, Duplicate):
            raise ConfigError(
                subject=f"the fault '{fault}' under {where}",
                expected="faults that can happen to a stream of bytes",
                got="a message that arrives twice, which TCP and shared memory rule out",
                remedy="Have it in virtual time: squall.Simulated(faults=...).",
            )
        if isinstance(fault, Drop) and fault.kind.startswith(
            ("refuse", "hold", "release", "inquire", "returned")
        ):
            raise ConfigError(
                subject=f"the fault '{fault}' under {where}",
                expected="a kind of message that replicas send or get",
                got="one between coordinator and shard, whose line is not made anew when it breaks",
                remedy="Have it in virtual time: squall.Simulated(faults=...).",
            )
        if not isinstance(fault, Kill | Pause) and not is_tcp:
            what = "delayed" if isinstance(fault, Delay) else "lost" if isinstance(fault, Drop) else "held up"
            raise ConfigError(
                subject=f"the fault '{fault}' under {where}",
                expected="connections on which messages can be " + what,
                got="shared memory",
                remedy='Use cluster=squall.Local(transport="tcp").',
            )


def expect_modelled(faults: Sequence[Fault], where: str) -> None:
    """Refuse what virtual time has no answer to.

    Raises:
        ConfigError: names the fault.
    """
    for fault in faults:
        roles = [getattr(fault, name) for name in ("role", "one", "other") if hasattr(fault, name)]
        if "evaluator" in roles:
            raise ConfigError(
                subject=f"the fault '{fault}' under {where}",
                expected="a replica, a shard or the coordinator",
                got="'evaluator', which takes no time there",
                remedy="Have it on real processes: squall.Local().",
            )
