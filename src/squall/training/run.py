"""A run that has ended, or been interrupted: its model, figures and files."""

import copy
import json
import operator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from squall.errors import ConfigError, CorruptError
from squall.keywords import named
from squall.model.device import CPU
from squall.model.objective import call
from squall.model.precision import computing_in
from squall.observe.ledger import read_ledger
from squall.observe.metrics import read_history
from squall.partition.inference import Inference
from squall.partition.model_plan import Plan
from squall.training.directory import RunDirectory
from squall.training.job import Job
from squall.training.prepare import build

PREDICT_BATCH = 256
MODELLED = "modelled"
"""In job.json, the word for a run in which no gradient was computed."""


class Run:
    """What `squall.fit` returns and `squall.load` opens; everything is read from the run directory when asked for.

    Attributes:
        path: the run directory.
    """

    def __init__(self, directory: RunDirectory, job: Job | None, model: nn.Module | None = None) -> None:
        self.path: Path = directory.path
        self._directory = directory
        self._job = job
        self._given_model = model

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, why={self.metrics.get('why')!r})"

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The figures of the whole run: "train_loss", "test_loss", "test_accuracy", "samples_per_second" (from the
        ledger), "wall_s", "why" it ended, and more."""
        return dict(self._directory.read_json(self._directory.result))

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """What was measured when: the records of ``metrics.jsonl``."""
        return read_history(self._directory.metrics)

    def ledger(self) -> "np.ndarray[Any, np.dtype[np.void]]":
        """Every push as the shards settled it: a structured array in order of time."""
        return read_ledger(self._directory.ledger)

    def traffic(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(sender, receiver) to (bytes, messages)."""
        rows = self._directory.read_json(self._directory.traffic)
        return {(row["sender"], row["receiver"]): (row["bytes"], row["messages"]) for row in rows}

    def state_dict(self) -> dict[str, Tensor]:
        """The trained model's state dict, on the CPU.

        Raises:
            ConfigError: no gradient was computed in this run, so it trained no model.
        """
        if self._directory.read_json(self._directory.job).get("compute") == MODELLED:
            raise ConfigError(
                subject=f"the model of {self.path}",
                expected="a run that computed gradients",
                got='one of Simulated(compute="modelled"): only the protocol ran',
                remedy='Use compute="real", with fewer replicas.',
            )
        return _state(self._directory.model)

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, on the CPU, in eval mode; the caller's own is left as it was.

        Raises:
            ConfigError: the run was opened without a model and is not of a recipe; or no gradient was computed in it.
        """
        state = self.state_dict()
        if self._given_model is not None:
            model = self._given_model
        elif self._job is not None:
            model = build(self._job)
        else:
            raise ConfigError(
                subject=f"the model of {self.path}",
                expected="a model to load the parameters into",
                got="none",
                remedy="Use squall.load(DIR, model=Net()).",
            )
        model.load_state_dict(state)
        return model.eval()

    @cached_property
    def _inference(self) -> Inference | None:
        """The partitions of a model that was cut."""
        if not self._directory.partitions.exists():
            return None
        state = self.model.state_dict()
        plan = Plan.load(self._directory.partitions)
        return Inference(self.model, plan, lambda name: state[name].clone())

    def best(self) -> nn.Module:
        """The model that an evaluation found best (a job with `keep_best`), in eval mode.

        Raises:
            CorruptError: the run kept none.
        """
        model = copy.deepcopy(self.model)
        model.load_state_dict(_state(self.path / "best.safetensors"))
        return model.eval()

    @torch.no_grad()
    def predict(self, x: Any, batch_size: int = PREDICT_BATCH) -> Any:
        """The model's outputs for `x`, computed in batches of `batch_size`, under the job's `precision`.

        Those of a model that was cut are computed by its partitions.
        Under "bfloat16" outputs in that dtype come back as float32, which has all their values.

        Args:
            x: inputs as the model takes them: a tensor or array, a tuple of them (by position), or a dict (by
                name), with a common first dimension.
        """
        from squall.data.tree import leaves, map_leaves

        compute = partial(call, self.model) if self._inference is None else self._inference
        tensors = map_leaves(torch.as_tensor, x)
        count = len(leaves(tensors)[0][1])
        parts = (slice(start, start + batch_size) for start in range(0, max(count, 1), batch_size))
        precision = self._directory.read_json(self._directory.job).get("precision")
        with computing_in(precision, CPU):
            outputs = [compute(map_leaves(operator.itemgetter(part), tensors)) for part in parts]
        if precision is not None:
            outputs = [map_leaves(_in_float32, output) for output in outputs]
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs)
        return _joined(outputs)


def _state(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:
        raise CorruptError(
            subject=str(path), expected="a model of the run", got=f"{type(error).__name__}: {error}"
        ) from error


def _in_float32(output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) and output.dtype == torch.bfloat16 else output


def _joined(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs)
    if isinstance(first, dict):
        return {name: _joined([output[name] for output in outputs]) for name in first}
    if isinstance(first, tuple | list):
        return type(first)(_joined(list(parts)) for parts in zip(*outputs, strict=True))
    return outputs


@named
def load(path: str | Path, model: nn.Module | None = None) -> Run:
    """Open a run that has ended.

    Args:
        path: its directory.
        model: a model of the same architecture, for `run.model` and `run.predict`; a run of a recipe makes its own.

    Raises:
        ConfigError: there is no run at `path`.
    """
    directory = RunDirectory.open(Path(path))
    told = directory.read_json(directory.job)
    job = None
    if model is None and told.get("recipe") is not None:
        from squall.training.recipe import job_of

        job = job_of(told["recipe"])
    return Run(directory, job, model)


def as_json(metrics: dict[str, Any], path: Path) -> str:
    """One line for ``--json``."""
    return json.dumps({**metrics, "path": str(path)})
