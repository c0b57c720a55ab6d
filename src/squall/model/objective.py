"""What a minibatch's loss is: a named loss, a loss module, a function, or a whole step of the user's own."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from squall.errors import ConfigError
from squall.model.device import CPU
from squall.model.precision import computing_in

LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "cross_entropy": nn.functional.cross_entropy,
    "mse": nn.functional.mse_loss,
    "l1": nn.functional.l1_loss,
    "bce_with_logits": nn.functional.binary_cross_entropy_with_logits,
    "nll": nn.functional.nll_loss,
}

Loss = str | Callable[[Any, Any], Tensor]
Step = Callable[[nn.Module, Any], Any]
Metric = Callable[[Any, Any], Any]


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of examples whose largest output is at the target's class.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).item()
    0.5
    """
    return (output.argmax(dim=1) == target).double().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """How a model and a batch become a mean loss and its weight.

    Attributes:
        loss: a name of `LOSSES`, or ``loss(output, target) -> scalar mean over the minibatch``. The batch must
            then be a pair (inputs, targets); inputs that are a tuple are the model's positional arguments, a
            dict its keyword arguments.
        step: instead of `loss`: ``step(model, batch) -> scalar mean, or (sum, weight)``, for any batch.
        precision: in which model, loss and metrics are computed; None: in the model's own dtypes.
    """

    loss: Loss | None
    step: Step | None
    precision: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.loss, str) and self.loss not in LOSSES:
            raise ConfigError(
                subject="loss",
                expected=f"one of {', '.join(LOSSES)}, an nn loss module, or loss(output, target)",
                got=repr(self.loss),
                remedy="For anything else give step=, a function of (model, batch) that returns the mean loss.",
            )

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """Within it the model is to be called, and its loss and metrics computed; not the backward pass."""
        return computing_in(self.precision, device)

    def mean(self, model: nn.Module, batch: Any) -> Tensor:
        """The minibatch's mean loss, a scalar that can be differentiated."""
        value = self.step(model, batch) if self.step is not None else self._by_loss(model, batch)
        if isinstance(value, tuple):
            total, weight = value
            value = total / weight
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                subject="the loss of a minibatch",
                expected="a tensor with one element, or a pair (sum, weight)",
                got=got,
                remedy="Return the mean over the minibatch.",
            )
        return value

    def _by_loss(self, model: nn.Module, batch: Any) -> Tensor:
        output, target = self.outputs(model, batch)
        function = LOSSES[self.loss] if isinstance(self.loss, str) else self.loss
        assert function is not None
        return function(output, target)

    def outputs(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """What the model makes of the batch's inputs, and the targets."""
        inputs, target = pair(batch)
        return call(model, inputs), target


def pair(batch: Any) -> tuple[Any, Any]:
    """A batch as (inputs, targets).

    Raises:
        ConfigError: it is none.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    got = f"a {type(batch).__name__}" + (
        f" of {len(batch)}" if isinstance(batch, tuple | list | dict) else ""
    )
    raise ConfigError(
        subject="a batch for loss=",
        expected="a pair (inputs, targets)",
        got=got,
        remedy="Give step=, a function of (model, batch) that returns the mean loss, for any other batch.",
    )


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model: a tuple of inputs by position, a dict by name, anything else as the one argument."""
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs)


@torch.no_grad()
def measure(
    model: nn.Module, objective: Objective, metrics: dict[str, Metric], batches: Any
) -> dict[str, float]:
    """On the CPU: the mean loss and metrics over ``(batch, number of examples)`` pairs, in eval mode, weighted by examples.

    The model's mode is put back.
    """
    was_training = model.training
    model.eval()
    sums: dict[str, float] = {}
    total = 0
    try:
        for batch, examples in batches:
            total += examples
            with objective.computing(CPU):
                values = _one(model, objective, metrics, batch)
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value * examples
    finally:
        model.train(was_training)
    return {name: value / max(total, 1) for name, value in sums.items()}


def _one(model: nn.Module, objective: Objective, metrics: dict[str, Metric], batch: Any) -> dict[str, float]:
    if objective.step is not None and not metrics:
        return {"loss": float(objective.mean(model, batch))}
    output, target = objective.outputs(model, batch)
    values = {name: float(metric(output, target)) for name, metric in metrics.items()}
    if objective.step is not None:
        return {"loss": float(objective.mean(model, batch)), **values}
    function = LOSSES[objective.loss] if isinstance(objective.loss, str) else objective.loss
    assert function is not None
    return {"loss": float(function(output, target)), **values}
