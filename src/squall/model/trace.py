"""torch.export, asked for what capture needs, and its refusals in our words."""

import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from squall.errors import ModelError, is_library
from squall.model.opaque import Placeholders
from squall.model.stand_in import calls_wrapped
from squall.model.structure import Structure


class Wrapper(nn.Module):
    """The model as a function of flat tensors, which is what torch.export is given.

    Attributes:
        result: the structure of what the model returned when last called.
    """

    def __init__(self, model: nn.Module, arguments: Structure) -> None:
        super().__init__()
        self.model = model
        self._arguments = arguments
        self._kept = _Kept()

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        args, kwargs = self._arguments.build(tensors)
        before = dict(self.model.named_buffers())
        leaves, structure = Structure.of(self.model(*args, **kwargs))
        after = dict(self.model.named_buffers())
        assigned = [name for name, buffer in before.items() if after.get(name) is not buffer]
        self._kept.result, self._kept.assigned = structure, tuple(assigned)
        return (*leaves, *(after[name] for name in assigned if name in after))

    @property
    def result(self) -> Structure:
        assert self._kept.result is not None
        return self._kept.result

    @property
    def assigned(self) -> tuple[str, ...]:
        """Buffers that forward set anew, as in ``self.mean = ...``: their values follow the results."""
        return self._kept.assigned


@dataclass(slots=True)
class _Kept:
    """Outlives a trace: torch.export puts a module's own attributes back as they were."""

    result: Structure | None = None
    assigned: tuple[str, ...] = ()


class Untraceable(Exception):  # noqa: N818  it becomes a ModelError or one more opaque module
    """torch.export could not trace the model.

    Attributes:
        module: the innermost module whose forward was running; "" for the model itself.
        line: the user's own line.
        reason: what is in the way.
        remedy: the way on.
    """

    def __init__(self, *, module: str, line: str, reason: str, remedy: str) -> None:
        self.module, self.line, self.reason, self.remedy = module, line, reason, remedy
        super().__init__(reason)

    def error(self) -> ModelError:
        where = f"module {self.module!r}" if self.module else "the model's own forward"
        return ModelError(
            subject=f"{where} ({self.line or 'no line is known'})",
            expected="a forward that can be written as ops of torch for every batch",
            got=self.reason,
            remedy=self.remedy,
        )


def trace(
    wrapper: Wrapper, tensors: Sequence[Tensor], dims: Sequence[int | None], placeholders: Placeholders
) -> tuple[ExportedProgram, Any]:
    """Trace a wrapped stand-in.

    Args:
        dims: of each tensor, the dimension whose size stays open.
        placeholders: stands for opaque modules.
    Returns:
        the program in the training IR, and sympy's symbol of the batch size; None if no size is open.
    Raises:
        Untraceable: what torch.export refuses, or an open size that the model fixes.
    """
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({dim: batch} if dim is not None else {} for dim in dims)
    guards: list[tuple[str, str]] = []
    try:
        with ExitStack() as stack:
            stack.enter_context(_quiet())
            stack.enter_context(redirect_stdout(io.StringIO()))
            stack.enter_context(redirect_stderr(io.StringIO()))
            stack.enter_context(_guards_noted(guards))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(placeholders)
            stack.enter_context(calls_wrapped(wrapper.model, placeholders.wrap))
            program = torch.export.export(wrapper, tuple(tensors), dynamic_shapes=(shapes,), strict=False)
    except ModelError:
        raise
    except Exception as error:
        raise _told(error, wrapper.model, guards) from error
    return program, _symbol(program, dims)


def _symbol(program: ExportedProgram, dims: Sequence[int | None]) -> Any:
    names = iter(dims)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in program.graph_signature.user_inputs:
            dim = next(names)
            if dim is not None:
                return node.meta["val"].shape[dim].node.expr
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.export's warnings are about its own workings; what matters to a user is said by us."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.fx.experimental.symbolic_shapes")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def _guards_noted(guards: list[tuple[str, str]]) -> Iterator[None]:
    """Note at which line of the user's each condition on a size arose: torch.export does not say it."""
    original = getattr(ShapeEnv, "_log_guard", None)
    if original is None:
        yield
        return

    def noting(self: Any, prefix: str, guard: Any, *args: Any, **kwargs: Any) -> Any:
        line = _line_of(_users_frame())
        if line:
            guards.append((str(guard), line))
        return original(self, prefix, guard, *args, **kwargs)

    ShapeEnv._log_guard = noting  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ShapeEnv._log_guard = original  # type: ignore[method-assign]


def _users_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code is Wrapper.forward.__code__:
            return None  # not in the model's code: beyond it comes who called us
        frame = frame.f_back
    return frame


def _line_of(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    return f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'


# Refusals.

_WAY_ON = "or keep the module whole: squall.opaque(module), or opaque=({name},)"


def _told(error: Exception, model: nn.Module, guards: list[tuple[str, str]]) -> Untraceable:
    module, line = _blamed(error.__traceback__, model)
    name = repr(module) if module else "'name.of.module'"
    kind, text = type(error).__name__, str(error).strip().split("\n")[0]
    way_on = _WAY_ON.format(name=name)
    if "DataDependent" in kind or "data-dependent" in text:
        return Untraceable(
            module=module,
            line=line,
            reason="a branch, loop or size that depends on the values of a tensor",
            remedy=f"Use torch.where or a mask, {way_on}.",
        )
    if "Constraints violated" in text or "ConstraintViolation" in kind:
        condition, where = guards[-1] if guards else ("", "")
        return Untraceable(
            module=module,
            line=where or line,
            reason=f"a batch size fixed by the code{f': it needs {condition}' if condition else ''}",
            remedy=f"Take the size from the tensor, as x.shape[0] and not len(x), or -1 in view, {way_on}.",
        )
    if "fake tensor in the exported program" in text:
        return Untraceable(
            module=module,
            line=line,
            reason="a write behind autograd's back, as with .data",
            remedy=f"Write within torch.no_grad() instead, {way_on}.",
        )
    return Untraceable(
        module=module,
        line=line,
        reason=f"{kind}: {text}",
        remedy=f"Write that step with ops of torch, {way_on}.",
    )


def _blamed(traceback: TracebackType | None, model: nn.Module) -> tuple[str, str]:
    """The innermost module whose code was running, and the user's innermost line."""
    names = {id(module): name for name, module in model.named_modules()}
    module, line = "", ""
    while traceback is not None:
        frame = traceback.tb_frame
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            module = names[id(owner)]
        if not is_library(frame.f_code.co_filename):
            line = f'File "{frame.f_code.co_filename}", line {traceback.tb_lineno}, in {frame.f_code.co_name}'
        traceback = traceback.tb_next
    return module, line
