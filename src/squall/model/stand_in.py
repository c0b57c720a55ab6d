"""A copy of a model to try things on.

Capture runs the example through a model several times, wraps calls and sets modes; the caller's module sees none
of it. Every tensor has memory of its own, since a forward may write to it, and neither gradient nor hooks.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from squall.errors import ModelError

Call = Callable[..., Any]


def stand_in(model: nn.Module, *, training: bool) -> nn.Module:
    """A copy of `model` in one mode.

    Raises:
        ModelError: a module cannot be copied, or a parameter has a hook that would be lost.
    """
    _refuse_hooks(model)
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _tensors_of(module):
            if id(tensor) not in memo:
                memo[id(tensor)] = _twin(tensor)
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(
            subject=f"model {type(model).__name__}",
            expected="modules that copy.deepcopy can copy",
            got=f"{type(error).__name__}: {error}",
            remedy="Keep locks, files and the like out of modules.",
        ) from error
    return twin.train(training)


@contextmanager
def calls_wrapped(model: nn.Module, wrap: Callable[[str, nn.Module, Call], Call | None]) -> Iterator[None]:
    """While in the block, each module's call is `wrap(name, module, call)`, unless that is None.

    A call includes the module's hooks. Only modules of a stand-in may be wrapped.
    """
    wrapped = []
    try:
        for name, module in model.named_modules():
            call = wrap(name, module, module._call_impl)
            if call is not None:
                module.__dict__["_call_impl"] = call
                wrapped.append(module)
        yield
    finally:
        for module in wrapped:
            del module.__dict__["_call_impl"]


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in module._parameters.values() if tensor is not None)
    yield from (tensor for tensor in module._buffers.values() if tensor is not None)
    yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _twin(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        twin: Tensor = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
        vars(twin).update(vars(tensor))
        return twin
    return tensor.detach().clone().requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _refuse_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            raise ModelError(
                subject=f"parameter {name!r}",
                expected="no hook on its gradient, which is lost when the model is cut",
                got="one made by register_hook",
                remedy="Remove it, or do the same in forward or in the update rule.",
            )


def is_on_meta(model: nn.Module) -> bool:
    """Whether some tensor of the model has no values."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
