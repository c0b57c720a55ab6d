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
import sysconfig
import traceback as tracebacks
from collections.abc import Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
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
        lines = [f'File "{frame.filename}", line {frame.lineno}, in {frame.name}' for frame in frames]
        said = str(error).strip()
        return cls(
            role=role,
            step=step,
            line=_users(lines) or "no line is known",
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

    Of the last line, and said so, if all are of libraries; "" if there is none.

    >>> users_line('  File "model.py", line 3, in forward\\n    x = f(y)')
    'File "model.py", line 3, in forward'
    """
    return _users([line.strip() for line in trace.splitlines() if line.strip().startswith("File ")])


def _users(lines: Sequence[str]) -> str:
    """The innermost of these lines that is the user's own, or at least of nothing that we know."""
    files = [line.split('"')[1] for line in lines]
    for is_foreign in (lambda file: is_library(file) or _is_installed(file), is_library):
        theirs = [line for line, file in zip(lines, files, strict=True) if not is_foreign(file)]
        if theirs:
            return theirs[-1]
    return f"no line of yours: {lines[-1]}" if lines else ""


def is_library(filename: str) -> bool:
    """Whether a source file is ours, torch's, NumPy's or the standard library's; recipes count as the user's own.

    >>> is_library(os.__file__), is_library(__file__), is_library("/home/me/torch/squall/model.py")
    (True, True, False)
    """
    if filename.startswith(("<frozen ", "<eval_with_key>")):
        return True  # Python's own imports, and code that torch.fx makes
    path = os.path.abspath(filename)
    if path.startswith(_RECIPES):
        return False
    return path.startswith(_libraries()) or (path.startswith(_standard()) and not _is_installed(path))


def _is_installed(filename: str) -> bool:
    """Whether it lies where packages are installed."""
    return f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename


_OURS = str(Path(__file__).parent) + os.sep
_RECIPES = os.path.join(_OURS, "recipes") + os.sep


@cache
def _libraries() -> tuple[str, ...]:
    """The folders of Squall, torch and NumPy: by where they are, for the user's own may be called the same."""
    found = [spec.submodule_search_locations for name in ("torch", "numpy") if (spec := find_spec(name))]
    return (_OURS, *(os.path.abspath(folder) + os.sep for folders in found for folder in folders or ()))


@cache
def _standard() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})


class CorruptError(_Explained):
    """A file of a run directory is torn, foreign or altered: it is named and never loaded."""


MISFITS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What taking a description apart raises that is none: whoever reads one from outside refuses it by these."""


class ProtocolError(SquallError):
    """Someone sent a message that the protocol does not allow."""

    def __init__(self, *, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class LocalProtocolError(ProtocolError):
    """This process was about to send or do something illegal: a bug here."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something illegal: drop the peer and go on serving the others."""
