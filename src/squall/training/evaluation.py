"""Measuring a test set with parameters that lie on shards."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from squall.data.minibatches import Minibatches
from squall.errors import SquallError, UserCodeError
from squall.model.buffers import set_buffers
from squall.model.install import load_values
from squall.model.layout import Layout
from squall.model.objective import Metric, Objective, measure


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured, on what.

    Attributes:
        test: the test set, in its own order.
        metrics: name to ``function(output, target)``, beside the loss.
    """

    test: Minibatches
    objective: Objective
    metrics: Mapping[str, Metric]
    layout: Layout

    @property
    def names(self) -> list[str]:
        """What an evaluation measures."""
        return ["test_loss", *(f"test_{name}" for name in self.metrics)]

    def of_model(self, model: nn.Module) -> dict[str, float]:
        """Measure with a model as it is: names as in ``{"test_loss": 0.1, "test_accuracy": 0.97}``.

        Raises:
            UserCodeError: the model, the loss, a metric or the data set raised.
        """
        batches = (self.test.load(0, position) for position in range(self.test.num_minibatches))
        try:
            return self.of_batches(model, batches)
        except SquallError:
            raise
        except Exception as error:
            raise UserCodeError.of(error, role="evaluator", step="") from error

    def of_batches(self, model: nn.Module, batches: Iterable[tuple[Any, int]]) -> dict[str, float]:
        """Measure on these pairs of a minibatch and how many examples it holds; what is raised goes through."""
        values = measure(model, self.objective, dict(self.metrics), batches)
        return {f"test_{name}": value for name, value in values.items()}

    def of_slices(
        self, model: nn.Module, vectors: Sequence[Tensor], buffers: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Measure with these slices' values (shape (S,) each, in order) and buffers; `model` is written."""
        load_slices(model, self.layout, vectors, buffers)
        return self.of_model(model)


def load_slices(
    model: nn.Module, layout: Layout, vectors: Sequence[Tensor], buffers: Mapping[str, Tensor]
) -> None:
    """Copy slices' values (shape (S,) each, in order) and buffers into a model."""
    load_values(layout, vectors, dict(model.named_parameters(remove_duplicate=False)))
    set_buffers(model, dict(buffers))
