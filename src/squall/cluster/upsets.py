"""Chaos on real processes: sends the signals that `squall.cluster.chaos` decides on, and says that it did."""

import random
import signal
from collections import Counter
from collections.abc import Sequence

from squall.cluster.chaos import Chaos, Strike
from squall.cluster.roster import Roster
from squall.faults import Fault, Kill, role_of
from squall.observe.events import Disturbed
from squall.training.recorder import Recorder

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "go on": signal.SIGCONT}


class Upsets:
    """Kills and pauses the processes of one run.

    Args:
        faults: what the job was asked to have.
        seed: of the run; the same one has the same roles struck at the same minibatches of theirs.
        roster: whose processes.
        recorder: told of each strike.
    """

    def __init__(self, faults: Sequence[Fault], seed: int, roster: Roster, recorder: Recorder) -> None:
        def draw(number: int, role: str, place: int) -> float:
            return random.Random(f"{seed}/{number}/{role}/{place}").random()

        roles = list(dict.fromkeys(role_of(name) for name in roster.roles))
        self._chaos = Chaos(faults, roles, draw)
        self._roster, self._recorder = roster, recorder
        self._steps: Counter[str] = Counter()
        self._restart_after: dict[str, float | None] = {}
        self._killed: dict[str, str] = {}  # processes, with the fault that says so

    def finished(self, name: str, minibatches: int) -> None:
        """A replica's process has finished so many more."""
        self._steps[role_of(name)] += minibatches

    def tick(self, now: float, began: float) -> None:
        """Do what is due.

        Args:
            now: of the run's clock.
            began: when, by that clock, faults began to count.
        """
        if not self._chaos.is_over:
            for strike in self._chaos.due(now - began, self._steps):
                self._do(strike, now)

    def calm(self, now: float) -> None:
        """Let everybody go on, and strike no more: the run is to end."""
        for strike in self._chaos.calm():
            self._do(strike, now)

    def restart_after(self, name: str) -> float | None:
        """After how many seconds a process that was killed here is to come back; None: as ever."""
        return self._restart_after.pop(name, None)

    def said_of(self, name: str) -> str:
        """What is to be added to how a process ended: which fault did it, if one did. Told once for each death."""
        fault = self._killed.pop(name, None)
        return "" if fault is None else f", as the chaos {fault!r} says"

    def _do(self, strike: Strike, now: float) -> None:
        struck = [name for name in self._roster.roles if role_of(name) == strike.role]
        is_there = [self._roster.signal(name, SIGNALS[strike.what]) for name in struck]
        if not any(is_there):
            return  # it is dead already
        if isinstance(strike.fault, Kill):
            self._restart_after.update(dict.fromkeys(struck, strike.fault.restart))
            self._killed.update(dict.fromkeys(struck, str(strike.fault)))
        self._recorder.happened(
            Disturbed(time_s=now, role=strike.role, what=strike.what, fault=str(strike.fault))
        )
