"""`squall.Plan`: how a model is cut over partitions, by the names of its parameters and ops, for people and files.

`partition/plan.py` says the same of one graph by numbers. A model is captured in several graphs (alone, with a loss, in
training, in evaluation); names are what they have in common. `Plan.on(graph)` finds them again, and places whatever else
the graph has.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from squall.errors import MISFITS, ConfigError, CorruptError
from squall.model.graph import Extent, Graph, Source
from squall.partition import plan as numbered
from squall.partition import planner
from squall.partition.picture import Picture, picture
from squall.partition.plan import Holding, StageCut, holding_from_json, holding_to_json
from squall.partition.predict import Prediction

FORMAT, VERSION = "squall plan", 1
Shape = tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """Who owns what of one parameter, buffer or result of an op.

    Attributes:
        shape: its sizes; one that follows the number of examples is a text, as in ``"batch"``.
        holding: for each partition its share: for each axis a set of indices or None for all, or None for nothing.
    """

    shape: Shape
    holding: Holding


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cut of a model over partitions. Make one with `squall.plan`.

    Attributes:
        partitions: how many there are.
        how: the way in which it was made.
        parameters: parameters and buffers by qualified name.
        results: what ops give, as in ``"encoder.0/linear"``, or ``"encoder.0/linear.1"`` for the second such op there.
        staged: op -> how its stages are divided, of ops that are computed in stages.
        training: the mode that the model was captured in.
        couplings: why a minibatch cannot be computed in microbatches; empty if it can.
        predicted: what a step is expected to cost; None for a plan that nobody has priced.

    >>> import torch, squall
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> plan = squall.plan(model, torch.zeros(4, 8), partitions=2, how="vertical")
    >>> print(plan)
    a plan over 2 partitions (vertical)
      0.weight: 0 holds [0:8] of 16 x 8, 1 holds [8:16] of 16 x 8
      0.bias: 0 holds [0:8] of 16, 1 holds [8:16] of 16
      2.weight: 0 holds [0:2] of 4 x 16, 1 holds [2:4] of 4 x 16
      2.bias: 0 holds [0:2] of 4, 1 holds [2:4] of 4
    """

    partitions: int
    how: str = "by hand"
    parameters: Mapping[str, Owned]
    results: Mapping[str, Owned]
    staged: Mapping[str, tuple[StageCut, ...]] = field(default_factory=dict)
    training: bool = True
    couplings: tuple[str, ...] = ()
    predicted: Prediction | None = None
    drawn: Picture | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, graph: Graph, cut: numbered.Plan, *, how: str, prefix: str = "") -> "Plan":
        """The plan of one graph, by names.

        Args:
            prefix: of the names of the model within the graph, as in ``"model."``; what is not below it is left out.
        """
        names = _Names(graph, prefix)
        return cls(
            partitions=cut.partitions,
            how=how,
            parameters={name: _owned(graph, cut, at) for name, at in names.parameters.items()},
            results={name: _owned(graph, cut, at) for name, at in names.results.items()},
            staged={name: cut.staged[at] for name, at in names.ops.items() if at in cut.staged},
            training=graph.training,
        )

    def on(self, graph: Graph) -> numbered.Plan:
        """The same plan for a graph that has this model in it: alone, or as a part with a loss around it.

        What the graph has besides, a loss for instance, goes where the values are that it reads. In the other mode
        (evaluation), ops that have no counterpart are placed in the same way.

        Raises:
            ConfigError: the graph has not this model in it, with the name that differs.
        """
        names = _Names(graph, _prefix(self.parameters, graph))
        self._check_names("parameter or buffer", self.parameters, names.parameters, graph)
        if graph.training == self.training:
            self._check_names("op", self.results, names.results, graph)
        given = {at: self.parameters[name].holding for name, at in names.parameters.items()}
        given |= {
            at: self.results[name].holding
            for name, at in names.results.items()
            if name in self.results and self.results[name].shape == _shape(graph, at)
        }
        staged = {at: self.staged[name] for name, at in names.ops.items() if name in self.staged}
        return planner.completed(graph, self.partitions, given, staged)

    def _check_names(
        self, what: str, mine: Mapping[str, Owned], theirs: Mapping[str, int], graph: Graph
    ) -> None:
        for name in [*mine, *theirs]:
            if name not in theirs or name not in mine:
                near = get_close_matches(name, mine if name in theirs else theirs, 1)
                raise ConfigError(
                    subject=f"a plan over {self.partitions} partitions, and a model",
                    expected=f"the same {what} names in both",
                    got=f"{name!r} in the {'plan' if name in mine else 'model'} only"
                    + (f" ({near[0]!r} is near it)" if near else ""),
                    remedy="Make the plan anew for this model.",
                )
            shape = _shape(graph, theirs[name])
            if shape != mine[name].shape:
                raise ConfigError(
                    subject=f"the plan's {what} {name!r}",
                    expected=f"the model's shape {_by(shape)}",
                    got=_by(mine[name].shape),
                    remedy="Make the plan anew for this model.",
                )

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read what `save` wrote. Whether it fits a model is looked at when it is used with one.

        Raises:
            ConfigError: there is no such file, or it is of another version.
            CorruptError: it is no plan, or a damaged one; names the place.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(
                subject=f"the plan {str(path)!r}", expected="a file", got=str(error.strerror)
            ) from None
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _corrupt(path, f"no JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise _corrupt(path, "no plan of Squall")
        if data.get("version") != VERSION:
            raise ConfigError(
                subject=f"the plan {str(path)!r}",
                expected=f"version {VERSION}",
                got=repr(data.get("version")),
                remedy="Make it anew with this version of Squall.",
            )
        try:
            return cls.from_json(data)
        except MISFITS as error:
            raise _corrupt(path, f"{type(error).__name__}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """A description that `json.dumps` takes."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "partitions": self.partitions,
            "how": self.how,
            "training": self.training,
            "couplings": list(self.couplings),
            "parameters": {name: _owned_json(each) for name, each in self.parameters.items()},
            "results": {name: _owned_json(each) for name, each in self.results.items()},
            "staged": {
                name: [[holding_to_json(cut.shares), holding_to_json(cut.combined)] for cut in cuts]
                for name, cuts in self.staged.items()
            },
            "predicted": self.predicted and self.predicted.to_json(),
            "picture": self.drawn and self.drawn.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """The plan of such a description.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        count = int(data["partitions"])
        staged = {
            name: tuple(
                StageCut(shares=holding_from_json(shares), combined=holding_from_json(combined))
                for shares, combined in cuts
            )
            for name, cuts in data["staged"].items()
        }
        return cls(
            partitions=count,
            how=str(data["how"]),
            training=bool(data["training"]),
            couplings=tuple(map(str, data["couplings"])),
            parameters={name: _owned_from(name, each, count) for name, each in data["parameters"].items()},
            results={name: _owned_from(name, each, count) for name, each in data["results"].items()},
            staged=staged,
            predicted=Prediction.from_json(data["predicted"]) if data.get("predicted") else None,
            drawn=Picture.from_json(data["picture"]) if data.get("picture") else None,
        )

    def svg(self, path: str | Path) -> None:
        """Draw it: who holds what of each layer, what crosses, and the bytes on each edge.

        Raises:
            ConfigError: it was not made by `squall.plan`, so nobody has counted its bytes.
        """
        if self.drawn is None:
            raise ConfigError(
                subject="a picture of a plan",
                expected="a plan whose bytes were counted",
                got="one that was put together by hand",
                remedy="Make it with squall.plan(model, example_inputs, how=...).",
            )
        Path(path).write_text(picture(self.drawn))

    def __str__(self) -> str:
        lines = [f"a plan over {self.partitions} partitions ({self.how})"]
        for name, owned in self.parameters.items():
            shares = [
                f"{p} holds {_told(share, owned.shape)}"
                for p, share in enumerate(owned.holding)
                if share is not None
            ]
            lines.append(f"  {name}: {', '.join(shares)}")
        return "\n".join(lines)


class _Names:
    """Of one graph: the names of what is below a prefix, and their numbers."""

    def __init__(self, graph: Graph, prefix: str) -> None:
        self.parameters: dict[str, int] = {}
        self.ops: dict[str, int] = {}
        self.results: dict[str, int] = {}
        for index in graph.from_outside(Source.PARAMETER, Source.BUFFER):
            if graph.values[index].name.startswith(prefix):
                self.parameters[graph.values[index].name.removeprefix(prefix)] = index
        seen: dict[str, int] = {}
        for at, node in enumerate(graph.nodes):
            if not f"{node.module}.".startswith(prefix):
                continue
            module = f"{node.module}.".removeprefix(prefix).removesuffix(".")
            name = f"{module}/{node.target.split('.')[1]}"
            seen[name] = seen.get(name, -1) + 1
            name = name if seen[name] == 0 else f"{name}.{seen[name]}"
            self.ops[name] = at
            for k, value in enumerate(node.outputs):
                if value is not None:
                    self.results[name if len(node.outputs) == 1 else f"{name}[{k}]"] = value


def _prefix(parameters: Mapping[str, Owned], graph: Graph) -> str:
    """What stands before the model's own names in a graph that has more than the model."""
    names = [graph.values[at].name for at in graph.from_outside(Source.PARAMETER, Source.BUFFER)]
    first = next(iter(parameters), "")
    found = [name.removesuffix(first) for name in names if f".{name}".endswith(f".{first}")]
    fits = [prefix for prefix in found if all(prefix + name in names for name in parameters)]
    return min(fits or found or [""], key=len)


def _owned(graph: Graph, cut: numbered.Plan, index: int) -> Owned:
    return Owned(shape=_shape(graph, index), holding=cut.holdings[index])


def _shape(graph: Graph, index: int) -> Shape:
    return tuple(str(size) if isinstance(size, Extent) else size for size in graph.values[index].shape)


def _owned_json(owned: Owned) -> Any:
    return {"shape": list(owned.shape), "holding": holding_to_json(owned.holding)}


def _owned_from(name: str, described: Any, partitions: int) -> Owned:
    shape, holding = tuple(described["shape"]), holding_from_json(described["holding"])
    if len(holding) != partitions or any(share is not None and len(share) != len(shape) for share in holding):
        raise ValueError(
            f"{name!r} has shares that are not of {partitions} partitions and shape {_by(shape)}"
        )
    return Owned(shape=shape, holding=holding)


def _by(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _told(share: numbered.Share, shape: Shape) -> str:
    """As one would index it: ``"[:, 0:8] of 20 x 16"``."""
    axes = [
        ":" if axis is None or axis.size == size else "+".join(f"{a}:{b}" for a, b in axis.pairs())
        for axis, size in zip(share, shape, strict=True)
    ]
    while axes and axes[-1] == ":":
        axes.pop()
    return (f"[{', '.join(axes)}]" if axes else "all") + f" of {_by(shape)}"


def _corrupt(path: str | Path, what: str) -> CorruptError:
    return CorruptError(subject=f"the plan {str(path)!r}", expected="what Plan.save wrote", got=what)
