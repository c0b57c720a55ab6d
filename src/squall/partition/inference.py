"""A trained model's forward pass, computed by the partitions of the plan that it was trained under.

The model is captured in evaluation mode on the first inputs of each form, and its plan laid over that graph. All partitions
work in the calling process, each with its own share of parameters and buffers and with messages between them, as in a run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from squall.model.capture import capture
from squall.model.captured import Captured
from squall.model.structure import Structure
from squall.partition.made import made_share
from squall.partition.model_plan import Plan
from squall.partition.together import Together

_Form = tuple[Structure, tuple[tuple[tuple[int, ...], torch.dtype], ...]]


@dataclass(frozen=True, slots=True)
class _Made:
    captured: Captured
    together: Together


class Inference:
    """Called with a batch of inputs, as `squall.model.objective.call` takes them; returns what the model would.

    Args:
        model: in which opaque modules run; it may be on the meta device if it has none.
        plan: of this model, in either mode.
        value: name of a parameter or buffer -> its values, whole, in memory of their own. Of one tensor at a time more than
            a share is held.
    """

    def __init__(self, model: nn.Module, plan: Plan, value: Callable[[str], Tensor]) -> None:
        self._model, self._plan, self._value = model, plan, value
        self._made: list[tuple[_Form, _Made]] = []

    @torch.no_grad()
    def __call__(self, inputs: Any) -> Any:
        """The model's output for a batch of any number of examples.

        Raises:
            ModelError: the model cannot be captured in evaluation mode.
            ConfigError: the plan is of another model.
        """
        args, kwargs = _call(inputs)
        tensors, structure = Structure.of((args, kwargs))
        form = (structure, tuple((tuple(each.shape[1:]), each.dtype) for each in tensors))
        made = next((made for known, made in self._made if known == form), None)
        if made is None:
            made = self._make(*structure.build([_example(each) for each in tensors]))
            self._made.append((form, made))
        count = min((len(each) for each in tensors), default=0)
        if count == 0:  # a graph is of at least one example
            tensors = [_example(each) for each in tensors]
        made.together.step(made.captured.flat(*structure.build(tensors)))
        outputs = made.together.outputs()
        if count == 0:
            outputs = [output[:0] if output.dim() else output for output in outputs]
        return made.captured.result.build(outputs)

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Made:
        with torch.enable_grad():  # capture looks at gradients, too
            captured = capture(self._model, args, kwargs, training=False)
        plan = self._plan.on(captured.graph)
        shares = [made_share(captured.graph, plan, p, self._value) for p in range(plan.partitions)]
        return _Made(captured, Together(captured, self._model, plan, trains=False, shares=shares))


def _call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return ((), dict(inputs)) if isinstance(inputs, dict) else ((inputs,), {})


def _example(tensor: Tensor) -> Tensor:
    """Two examples, to capture with: the first two, or what there is and zeros."""
    missing = 2 - len(tensor)
    return tensor[:2] if missing <= 0 else torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])
