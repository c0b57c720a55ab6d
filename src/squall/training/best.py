"""The best model so far: measured, and kept on disk as soon as it is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from squall.errors import ConfigError
from squall.observe.files import write_atomic
from squall.shard.store import write_tensors

MODEL, FIGURES = "best.safetensors", "best.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestKeeper:
    """Keeps the model that is best by one metric in the run directory. It has no state but its files.

    Attributes:
        metric: as evaluations name it, as in "test_accuracy"; smaller is better if "loss" or "error" is in it.
        directory: of the run.
    """

    metric: str
    directory: Path

    @classmethod
    def of(cls, request: str, names: list[str], directory: Path) -> "BestKeeper":
        """For what a job asks for: a metric's name, with or without "test_".

        Raises:
            ConfigError: no evaluation measures it.
        """
        for name in (request, f"test_{request}"):
            if name in names:
                return cls(metric=name, directory=directory)
        raise ConfigError(
            subject="Job(keep_best=)",
            expected=f"one of {', '.join(names)}" if names else "a job with test=",
            got=repr(request),
        )

    def is_better(self, value: float, than: float | None) -> bool:
        if value != value:  # not a number
            return False
        if than is None:
            return True
        return value < than if "loss" in self.metric or "error" in self.metric else value > than

    def best(self) -> float | None:
        """The best value so far; None before the first."""
        path = self.directory / FIGURES
        return float(json.loads(path.read_text())[self.metric]) if path.exists() else None

    def offer(self, values: Mapping[str, float], model: nn.Module, minibatches: int) -> bool:
        """Keep the model if it is better than the best so far; say whether it was."""
        if not self.is_better(values[self.metric], self.best()):
            return False
        write_tensors(self.directory / MODEL, model.state_dict())
        write_atomic(self.directory / FIGURES, json.dumps({**values, "minibatches": minibatches}))
        return True
