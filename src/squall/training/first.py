"""What the shards of a run begin from, held by the launcher until they have it, and the model without it.

Of a big model there should be few copies when a run starts. So the launcher's own model, from which roles and the result
get its structure, has no values of what is trained: those are here, each once.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from squall.errors import LocalProtocolError
from squall.rules.apply import SliceState

_OWN_FORM = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__deepcopy__")


@dataclass(slots=True, eq=False)
class First:
    """What shards begin from.

    Attributes:
        values: of a run that starts afresh: each trained parameter, whole, by all of its names.
        states: of one that goes on: every slice, in order.

    Neither is there of a deferred model, of which shards make their own, nor of one that was `let_go`.
    """

    values: Mapping[str, Tensor] | None = None
    states: tuple[SliceState, ...] | None = None

    def let_go(self) -> None:
        """The shards have it: nobody asks any more."""
        self.values = self.states = None

    def value(self, name: str) -> Tensor:
        """A trained parameter as the run starts with it."""
        if self.values is None:
            raise LocalProtocolError(reason=f"the first values of {name!r} were let go")
        return self.values[name]


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The values of what is trained, by all names; not copies."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }


def hollowed(model: nn.Module, *, is_ours: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model with parameters that have memory, but no values: what was never touched takes none from the system.

    Args:
        is_ours: nobody else has it: it is changed in place. Else a copy is, for a function may return what its maker keeps.

    Returns:
        The model; and its parameters without values, which are none if it has to stay as it is, since it cannot be copied, or
        brings its own way of being copied or sent, which may read them.
    """
    if any(_has_own_form(type(module)) for module in model.modules()):
        return model, ()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    empty = {id(own): torch.empty_like(own.detach()) for own in parameters}
    if is_ours:
        for own in parameters:
            own.data = empty[id(own)]
        return model, tuple(own.detach() for own in parameters)
    try:
        made = {id(own): type(own)(empty[id(own)], True) for own in parameters}  # as copying one does
        return copy.deepcopy(model, dict(made)), tuple(own.detach() for own in made.values())
    except Exception:  # whatever a user's module raises: a function was given since it may not be copied
        return model, ()


def _has_own_form(kind: type) -> bool:
    classes = (own for own in kind.__mro__ if own.__module__.partition(".")[0] not in ("torch", "builtins"))
    return any(name in vars(own) for own in classes for name in _OWN_FORM)
