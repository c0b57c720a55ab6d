"""How a run in processes stands: what its launcher has heard of it, and what it has decided."""

from collections.abc import Callable
from dataclasses import dataclass, field

from squall.blocks import BlockSet
from squall.cluster.roster import RoleProcess
from squall.cluster.silences import Silences
from squall.errors import SquallError, UserCodeError
from squall.wire.control import LinkCount


@dataclass(eq=False)
class Course:
    """From the start of a run to its end.

    Args:
        also_failed: called with what fails after the first failure, and says something new.

    Attributes:
        why, settled: how the coordinator says that it ended, and what is settled.
        errors: what failed, in order.
        is_fatal: there is nothing left that could be saved.
        waits: who waits for whom, in words.
        silences: who waits for whose answer.
        has_evaluator: it is there, and may be asked.
        is_evaluating: it was asked, and has not answered yet.
        is_evaluation_lost: it has ended before it answered.
        ends: by replica, how it ended the last time, in words.
        raised: by role, the exception that it is about to end with.
        counts: by role, what passed its connections.
        refused: by role, how many connections it refused.
        stopping: why the coordinator was told to stop; None: it was not.
        last: the name of the last checkpoint; "" before it is asked for.
        is_ending: roles are told to finish.
    """

    also_failed: Callable[[SquallError], None]
    why: str | None = None
    settled: BlockSet = field(default_factory=BlockSet)
    errors: list[SquallError] = field(default_factory=list)
    is_fatal: bool = False
    waits: tuple[str, ...] = ()
    silences: Silences = field(default_factory=Silences)
    has_evaluator: bool = False
    is_evaluating: bool = False
    is_evaluation_lost: bool = False
    ends: dict[str, str] = field(default_factory=dict)
    raised: dict[str, str] = field(default_factory=dict)
    counts: dict[str, tuple[LinkCount, ...]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    stopping: str | None = None
    last: str = ""
    is_ending: bool = False

    @property
    def error(self) -> SquallError | None:
        """The cause of the failure: what failed first."""
        return self.errors[0] if self.errors else None

    def fail(self, error: SquallError, *, is_fatal: bool = False) -> None:
        """It cannot go on. The first failure is the cause; what fails after it, or because of it, is told as well."""
        self.is_fatal |= is_fatal
        if any(_is_same(error, other) for other in self.errors):
            return
        self.errors.append(error)
        if len(self.errors) > 1:
            self.also_failed(error)

    def raised_by(self, name: str) -> str:
        """The exception that a role is about to end with, or has ended with, behind a colon; "" if there was none."""
        error = self.raised.get(name)
        return "" if error is None else f": {error}"

    def keep_counts(self, role: RoleProcess) -> None:
        """What a role has counted stays counted; its next process begins at 0."""
        before = f"{role.name}, start {role.incarnation}"
        self.counts[before] = self.counts.pop(role.name, ())
        self.refused[before] = self.refused.pop(role.name, 0)


def _is_same(error: SquallError, other: SquallError) -> bool:
    """Whether one says what the other does; two replicas run into the same line of the user's."""
    if isinstance(error, UserCodeError) and isinstance(other, UserCodeError):
        return (error.error, error.line) == (other.error, other.line)
    return str(error) == str(other)
