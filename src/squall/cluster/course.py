"""How a run in processes stands: what its launcher has heard of it, and what it has decided."""

from dataclasses import dataclass, field

from squall.blocks import BlockSet
from squall.cluster.roster import RoleProcess
from squall.errors import SquallError
from squall.wire.control import LinkCount


@dataclass(eq=False)
class Course:
    """From the start of a run to its end.

    Attributes:
        why, settled: how the coordinator says that it ended, and what is settled.
        error: the first cause of a failure; what follows from it is not told again.
        is_fatal: there is nothing left that could be saved.
        waits: who waits for whom, in words.
        is_evaluating: the evaluator is busy, or gone.
        ends: by replica, how it ended the last time, in words.
        counts: by role, what passed its connections.
        refused: by role, how many connections it refused.
        stopping: why the coordinator was told to stop; None: it was not.
        last: the name of the last checkpoint; "" before it is asked for.
        is_ending: roles are told to finish.
    """

    why: str | None = None
    settled: BlockSet = field(default_factory=BlockSet)
    error: SquallError | None = None
    is_fatal: bool = False
    waits: tuple[str, ...] = ()
    is_evaluating: bool = False
    ends: dict[str, str] = field(default_factory=dict)
    counts: dict[str, tuple[LinkCount, ...]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    stopping: str | None = None
    last: str = ""
    is_ending: bool = False

    def fail(self, error: SquallError, *, is_fatal: bool = False) -> None:
        """It cannot go on; the first one that is told counts."""
        if self.error is None:
            self.error, self.is_fatal = error, is_fatal

    def keep_counts(self, role: RoleProcess) -> None:
        """What a role has counted stays counted; its next process begins at 0."""
        before = f"{role.name}, start {role.incarnation}"
        self.counts[before] = self.counts.pop(role.name, ())
        self.refused[before] = self.refused.pop(role.name, 0)
