"""A look at what is only computed now and then, before anything is trained: the test set and the metrics."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from squall.data.minibatches import Minibatches
from squall.data.tree import leaves
from squall.errors import ConfigError, SquallError, UserCodeError
from squall.model.randomness import random_state_kept
from squall.training.evaluation import Evaluation

FEW = 2


def try_evaluation(
    evaluation: Evaluation, model: nn.Module, train: Minibatches, another: Callable[[], nn.Module]
) -> None:
    """Measure a few examples of the test set, so that one that does not fit is found before the work and not after it.

    What the training set's examples fail with as well is left to training, which says where.

    Args:
        model: the run's; what is tried is a copy that shares its parameters.
        another: makes a model like it, if it cannot be copied.

    Raises:
        ConfigError: the model, the loss or a metric cannot be computed on the test set.
    """
    with random_state_kept():
        tried = _copy(model, another)
        if _failure(evaluation, evaluation.test.resized(FEW), tried) is None:
            return
        # Some code may want whole minibatches.
        error = _failure(evaluation, evaluation.test, tried)
        alone = replace(evaluation, metrics={})
        if error is None or _failure(alone, train, tried) is not None:
            return
        told = UserCodeError.of(error, role="", step="")
        got = f"{told.error} ({told.line}), on {_form(evaluation.test)}"
        if _failure(alone, evaluation.test, tried) is None:
            raise ConfigError(
                subject=f"Job(metrics=): {_faulty(evaluation, tried)!r}",
                expected="a function of (output, target) that returns a number",
                got=got,
            ) from error
        raise ConfigError(
            subject="Job(test=)",
            expected=f"examples that fit the model and the loss, as those of train= do: {_form(train)}",
            got=got,
        ) from error


def _copy(model: nn.Module, another: Callable[[], nn.Module]) -> nn.Module:
    """A model that may be called without a trace left: its parameters are the model's own, all else is a copy."""
    try:
        return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    except Exception:
        return another()


def _failure(evaluation: Evaluation, minibatches: Minibatches, model: nn.Module) -> Exception | None:
    """What the first minibatch fails with."""
    try:
        evaluation.of_batches(model, [minibatches.load(0, 0)])
    except SquallError:
        raise
    except Exception as error:
        return error
    return None


def _faulty(evaluation: Evaluation, model: nn.Module) -> str:
    """The first metric that fails."""
    alone = {name: replace(evaluation, metrics={name: metric}) for name, metric in evaluation.metrics.items()}
    return next((name for name, one in alone.items() if _failure(one, one.test, model) is not None), "")


def _form(minibatches: Minibatches) -> str:
    """Types and shapes of the first minibatch, as in "float32 (64, 20), int64 (64,)"."""
    try:
        batch, _ = minibatches.load(0, 0)
    except Exception:
        return "a minibatch that cannot be loaded"
    return ", ".join(_form_of(leaf) for _, leaf in leaves(batch))


def _form_of(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    return type(leaf).__name__
