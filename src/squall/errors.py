"""Every error that Squall raises on purpose.

SquallError
|- ConfigError            the request contradicts itself or asks for what is not there  (the user can fix it)
|  |- DataError           a file or data set is not what it claims to be
|  |- ModelError          a model cannot be trained as it is: not sendable, overlapping parameters
|  `- RunExistsError      the run directory holds a run already
|- RunError               a run started and could not finish
|  |- UserCodeError       the user's own code raised; carries role, step and the user's line
|  |- DivergedError       gradients or parameters stopped being finite
|  `- LostError           roles that the run cannot do without are gone
|     `- NoReplicaError   every replica is gone for good; what they did is kept, and the run can be resumed
|- CorruptError           a file of a run directory is torn, foreign or altered          (never loaded)
`- ProtocolError
   |- LocalProtocolError  we were about to break the protocol                            (a bug in this process)
   `- RemoteProtocolError a peer broke it                                                (drop the peer, keep serving)
"""

import os
import traceback as tracebacks
from functools import partial
from typing import Any


class SquallError(Exception):
    """Base of all errors above.

    A subclass takes its facts as keyword arguments, keeps each as an attribute of the same name,
    and hands one finished sentence to ``super().__init__``.
    """

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        # Errors cross process borders: rebuild them from the facts, not from the sentence.
        facts = {name: fact for name, fact in vars(self).items() if not name.startswith("_")}
        return partial(type(self), **facts), ()


class _Explained(SquallError):  # noqa: N818  a base, never raised
    """An error told by four facts: what, expected, got, and what to do now."""

    def __init__(self, *, subject: str, expected: str, got: str, remedy: str = "") -> None:
        self.subject, self.expected, self.got, self.remedy = subject, expected, got, remedy
        super().__init__(f"{subject}: expected {expected}, but got {got}. {remedy}".rstrip())


class ConfigError(_Explained):
    """The request contradicts itself, or asks for something that is not there."""


class DataError(ConfigError):
    """A file or data set is not what it claims to be; `subject` names the file and the place."""


class ModelError(ConfigError):
    """A model cannot be trained as it is."""


class RunExistsError(ConfigError):
    """The run directory holds a run already: choose another, or resume it."""


class RunError(SquallError):
    """A run started and could not finish."""

    def __init__(self, *, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class UserCodeError(RunError):
    """The user's own code raised on a role.

    Attributes:
        role: where, as in ``"replica1.0"``.
        step: which minibatch, as in ``"epoch 0, position 7"``; empty before the first.
        line: the user's own line, as in ``'File "model.py", line 12, in forward'``.
        error: class name and text of the exception.
        traceback: the whole traceback as text.
    """

    def __init__(self, *, role: str, step: str, line: str, error: str, traceback: str) -> None:
        self.role, self.step, self.line = role, step, line
        self.error, self.traceback = error, traceback
        where = f"{role} at {step}" if step else role
        super().__init__(reason=f"{where}: {error} ({line})")

    @classmethod
    def of(cls, error: BaseException, *, role: str, step: str) -> "UserCodeError":
        """Describe an exception that the user's code raised."""
        frames = tracebacks.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not is_library(frame.filename)] or list(frames)
        last = theirs[-1] if theirs else None
        line = (
            "no line is known"
            if last is None
            else f'File "{last.filename}", line {last.lineno}, in {last.name}'
        )
        said = str(error).strip()
        return cls(
            role=role,
            step=step,
            line=line,
            error=f"{type(error).__name__}: {said}" if said else type(error).__name__,
            traceback="".join(tracebacks.format_exception(error)),
        )

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        facts = {name: getattr(self, name) for name in ("role", "step", "line", "error", "traceback")}
        return partial(type(self), **facts), ()


class DivergedError(RunError):
    """Gradients or parameters stopped being finite, so that going on is pointless.

    Attributes:
        tensor: the first tensor that was not finite.
        step: the block at which it was seen.
    """

    def __init__(self, *, tensor: str, step: str, what: str) -> None:
        self.tensor, self.step, self.what = tensor, step, what
        super().__init__(
            reason=f"diverged: {what} of {tensor!r} not finite at {step}. "
            "Lower the learning rate, set clip_norm, or look at the data of that step."
        )

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return partial(type(self), tensor=self.tensor, step=self.step, what=self.what), ()


class LostError(RunError):
    """Roles that the run cannot do without are gone."""


class NoReplicaError(LostError):
    """Every replica is gone for good; the shards have stored what was done, so that the run can be resumed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: the machine's trouble, not the code's."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    )


def users_line(trace: str) -> str:
    """The innermost line of the user's own in a printed traceback, as ``'File "model.py", line 12, in forward'``.

    Of the last line if all are of libraries; "" if there is none.

    >>> users_line('  File "model.py", line 3, in forward\\n    x = f(y)')
    'File "model.py", line 3, in forward'
    """
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    theirs = [frame for frame in frames if not is_library(frame.split('"')[1])]
    return (theirs or frames or [""])[-1]


_LIBRARIES = (f"{os.sep}squall{os.sep}", f"{os.sep}torch{os.sep}", f"{os.sep}numpy{os.sep}")


def is_library(filename: str) -> bool:
    """Whether a source file is ours, torch's or NumPy's; recipes count as the user's own."""
    return any(part in filename for part in _LIBRARIES) and f"{os.sep}recipes{os.sep}" not in filename


class CorruptError(_Explained):
    """A file of a run directory is torn, foreign or altered: it is named and never loaded."""


class ProtocolError(SquallError):
    """Someone sent a message that the protocol does not allow."""

    def __init__(self, *, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class LocalProtocolError(ProtocolError):
    """This process was about to send or do something illegal: a bug here."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something illegal: drop the peer and go on serving the others."""
