"""`squall.plan`: captures a model, measures its ops, makes plans, prices them, and takes the quickest that fits."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from squall.errors import ConfigError, ModelError
from squall.keywords import named
from squall.model.capture import capture
from squall.model.captured import Captured
from squall.model.deferred import ModelInParts
from squall.model.graph import Graph, Ref
from squall.model.randomness import random_state_kept
from squall.model.stand_in import is_on_meta, stand_in
from squall.model.structure import Structure
from squall.partition import plan as numbered
from squall.partition import planner
from squall.partition.agenda import policy_for
from squall.partition.compiler import program_of
from squall.partition.cost import Machine, OpTime
from squall.partition.coupling import couplings
from squall.partition.drawing import drawing_of
from squall.partition.measure import guess, measure
from squall.partition.model_plan import Plan
from squall.partition.predict import Prediction, predict, refuse_what_does_not_fit
from squall.partition.program import Program

Team = int | Sequence[int] | Mapping[int, float]
How = str | Sequence[int] | Mapping[str, Team]
PREFIX = "model."
WAYS = ("auto", "vertical", "horizontal")


@named
def plan(
    model: nn.Module | ModelInParts,
    example_inputs: Any,
    *,
    partitions: int | None = None,
    how: How = "auto",
    machines: Sequence[Machine] | None = None,
    tiles: Sequence[str] = (),
    microbatches: int | None = None,
    training: bool = True,
) -> Plan:
    """Cut a model over partitions, and say what a step will cost.

    Args:
        model: any module; it is not changed. On the meta device, and of a `squall.deferred` one, nothing is measured.
        example_inputs: a call's inputs, of at least two examples and best of a real minibatch: one tensor, a tuple for
            several arguments, or a dict for arguments by name.
        partitions: how many; by default as many as there are machines, or as `how` says.
        how: "vertical" cuts through layers, "horizontal" between them, "auto" takes what is predicted to be quickest of
            these and of mixtures. A list of team sizes, as in ``[1, 3]``, gives layers to teams in order and cuts
            through them within a team. A dict places layers by hand: name or pattern of a module -> a partition, several,
            or ``{partition: weight}`` for uneven parts; the first pattern that fits counts, a pattern fits all that is
            below what it names, and what fits none goes where its inputs are.
        machines: one for each partition, with speeds, memory and lines; shares follow the speeds. By default all
            partitions run on this machine, with no limit of memory.
        tiles: ops to cut in space rather than by feature maps, as in ``("conv2d", "max_pool2d")``.
        microbatches: parts of a minibatch that are under way at a time; None: 4 for layers in line, if they may be.
        training: the mode to capture; in evaluation the forward pass alone is priced.

    Returns:
        a plan, with `predicted`, `save`, `svg` and `on`.
    Raises:
        ConfigError: it does not fit; names the machine and the bytes. Or the request contradicts itself.
        ModelError: the model cannot be captured.

    >>> import torch, squall
    >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    >>> x = torch.zeros(8, 64)
    >>> plan = squall.plan(net, x, partitions=2, how="vertical")
    >>> plan.predicted.batch, sorted(plan.predicted.links)
    (8, [(0, 1), (1, 0)])
    >>> uneven = squall.plan(net, x, how={"0": {0: 3, 1: 1}, "2": 1})
    >>> [share and share[0] for share in uneven.parameters["0.weight"].holding]
    [Indices[0:48], Indices[48:64]]
    >>> squall.plan(net, x, partitions=2, machines=[squall.Machine(memory_bytes=1000)] * 2)
    Traceback (most recent call last):
        ...
    squall.errors.ConfigError: ...
    """
    if isinstance(model, ModelInParts):
        model = model(0).model
    count = _count(partitions, how, machines)
    here = list(machines or [Machine(cores=os.cpu_count())] * count)
    args, kwargs = _call(example_inputs)
    priced = _priced(model, args, kwargs, training)
    found = [
        _Candidate(name, cut, *priced.price(cut, here, microbatches))
        for name, cut in _cuts(priced, count, how, here, tiles)
    ]
    fitting = [each for each in found if _fits(each.prediction, here)]
    if not fitting:
        refuse_what_does_not_fit(
            min(found, key=lambda each: max(each.prediction.memory_bytes)).prediction, here
        )
    best = min(fitting, key=lambda each: each.prediction.step_s)
    named = Plan.of(priced.captured.graph, best.cut, how=best.name, prefix=PREFIX)
    drawn = drawing_of(best.program, best.prediction, best.name, PREFIX)
    return replace(named, predicted=best.prediction, drawn=drawn, couplings=priced.couplings)


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    cut: numbered.Plan
    program: Program
    prediction: Prediction


class Totalled(nn.Module):
    """A model with a number to differentiate, in the place of a loss: the mean of each floating-point output, added up."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output = self.model(*args, **kwargs)
        tensors, _ = Structure.of(output)
        means = [each.mean() for each in tensors if each.is_floating_point()]
        return (sum(means[1:], means[0]) if means else None), output


@dataclass(frozen=True, slots=True)
class _Priced:
    """A captured model with what its ops take."""

    captured: Captured
    times: tuple[OpTime, ...]
    is_measured: bool
    batch: int
    loss: int | None
    couplings: tuple[str, ...]

    def price(
        self, cut: numbered.Plan, machines: Sequence[Machine], microbatches: int | None
    ) -> tuple[Program, Prediction]:
        """With the number of microbatches asked for; else one, or four where these are quicker."""
        may_split = self.loss is not None and not self.couplings and self.batch % 4 == 0
        if microbatches and microbatches > 1 and self.couplings:
            raise ConfigError(
                subject="plan(microbatches=)",
                expected="1, since examples depend on one another",
                got=f"{microbatches}, and {'; '.join(self.couplings)}",
            )
        counts = [microbatches] if microbatches else [1, *([4] if may_split else [])]
        found = [self._price(cut, machines, count) for count in counts]
        return min(found, key=lambda each: each[1].step_s)

    def _price(
        self, cut: numbered.Plan, machines: Sequence[Machine], count: int
    ) -> tuple[Program, Prediction]:
        if self.batch % count:
            raise ConfigError(
                subject="plan(microbatches=)",
                expected=f"a number that divides {self.batch} examples",
                got=str(count),
            )
        program = program_of(self.captured.graph, cut, self.batch // count, self.loss)
        told = predict(
            program,
            self.times,
            machines,
            measured_at=self.batch,
            microbatches=count,
            policy=policy_for(cut.partitions, count),
            is_measured=self.is_measured,
        )
        return program, told


def _priced(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> _Priced:
    whole = Totalled(model)
    try:
        captured = capture(whole, args, kwargs, training=training)
    except ModelError as error:  # the user knows the model, not what was put around it
        subject = error.subject.replace(Totalled.__name__, type(model).__name__)
        raise ModelError(
            subject=subject, expected=error.expected, got=error.got, remedy=error.remedy
        ) from error
    tensors: Sequence[Tensor] = captured.flat(args, kwargs)
    batch = captured.batch(tensors)
    is_measured = not is_on_meta(model)
    if is_measured:
        with random_state_kept():
            times = measure(captured, stand_in(whole, training=training), tensors)
    else:
        times = guess(captured.graph, batch)
    first = captured.graph.outputs[0]
    has_loss = training and isinstance(first, Ref) and captured.graph.values[first.index].requires_grad
    loss = first.index if has_loss else None
    reasons = couplings(captured.graph, loss, PREFIX)
    return _Priced(captured, times, is_measured, batch, loss, reasons)


def _cuts(
    priced: _Priced, count: int, how: How, machines: Sequence[Machine], tiles: Sequence[str]
) -> Iterable[tuple[str, numbered.Plan]]:
    """Plans that come into question, by name."""
    graph, speeds = priced.captured.graph, [machine.speed for machine in machines]
    costs = [each.total_s for each in priced.times]
    if isinstance(how, Mapping):
        yield "by hand", _by_hand(graph, count, how, tiles, speeds)
        return
    ways = {"vertical": [count], "horizontal": [1] * count}
    if not isinstance(how, str):
        chosen = {f"mixed {'+'.join(map(str, how))}": list(how)}
    elif how == "auto":
        halves = {f"mixed {a}+{count - a}": [a, count - a] for a in range(1, count)} if count > 2 else {}
        chosen = {**ways, **halves}
    else:
        chosen = {how: ways[how]}
    for name, teams in chosen.items():
        if len(teams) == count > 1 and (cut := planner.one_apart(graph, count, speeds=speeds, costs=costs)):
            yield name, cut
        for joined in (True, False) if len(teams) > 1 else (True,):
            yield (
                name,
                planner.mixed(graph, teams, tiles=tiles, speeds=speeds, costs=costs, joined=joined),
            )


def _by_hand(
    graph: Graph, count: int, how: Mapping[str, Team], tiles: Sequence[str], speeds: Sequence[float]
) -> numbered.Plan:
    weights = dict(enumerate(speeds))
    team_of: dict[int, tuple[int, ...]] = {}
    weights_of: dict[int, Mapping[int, float]] = {}
    unused = set(how)
    for at, node in enumerate(graph.nodes):
        module = f"{node.module}.".removeprefix(PREFIX).removesuffix(".")
        pattern = next((each for each in how if _is_below(module, each)), None)
        if pattern is not None and f"{node.module}.".startswith(PREFIX):
            unused.discard(pattern)
            team_of[at] = tuple(sorted(_weights(how[pattern], weights)))
            weights_of[at] = _weights(how[pattern], weights)
    if unused:
        raise ConfigError(
            subject=f"plan(how=): {sorted(unused)[0]!r}",
            expected="the name or pattern of a module that computes something",
            got=f"none such among {', '.join(_modules(graph))}",
        )
    return planner.by_hand(graph, count, team_of, tiles=tiles, speeds=speeds, weights=weights_of)


def _is_below(module: str, pattern: str) -> bool:
    """Whether a pattern names a module or one that it is within."""
    names = module.split(".")
    return any(fnmatchcase(".".join(names[:end]), pattern) for end in range(1, len(names) + 1))


def _modules(graph: Graph) -> list[str]:
    found = dict.fromkeys(f"{node.module}.".removeprefix(PREFIX).removesuffix(".") for node in graph.nodes)
    return [name for name in found if name]


def _weights(team: Team, speeds: Mapping[int, float]) -> dict[int, float]:
    if isinstance(team, Mapping):
        return {int(p): float(weight) for p, weight in team.items()}
    members = [team] if isinstance(team, int) else list(team)
    return {p: speeds.get(p, 1.0) for p in members}


def _count(partitions: int | None, how: How, machines: Sequence[Machine] | None) -> int:
    """How many partitions are asked for, in whichever way."""
    told: dict[str, int] = {}
    if partitions is not None:
        told["partitions"] = partitions
    if machines is not None:
        told["machines"] = len(machines)
    if isinstance(how, Mapping):
        named = {p for team in how.values() for p in _weights(team, {})}
        if not told or max(named, default=0) >= min(told.values()) or min(named, default=0) < 0:
            told["how"] = max(named, default=0) + 1
    elif not isinstance(how, str):
        told["how"] = sum(how)
    elif how not in WAYS:
        raise ConfigError(
            subject="plan(how=)",
            expected=f"one of {', '.join(WAYS)}, a list of team sizes, or a dict of modules",
            got=repr(how),
        )
    if len(set(told.values())) != 1 or min(told.values()) < 1:
        raise ConfigError(
            subject="squall.plan",
            expected="one number of partitions, at least 1",
            got=", ".join(f"{name} for {number}" for name, number in told.items()) or "none",
            remedy="Say partitions=, or give a machine for each.",
        )
    return next(iter(told.values()))


def _call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as in a batch: a tuple by position, a dict by name, anything else as the one argument."""
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def _fits(prediction: Prediction, machines: Sequence[Machine]) -> bool:
    return all(
        machine.memory_bytes is None or need <= machine.memory_bytes
        for machine, need in zip(machines, prediction.memory_bytes, strict=True)
    )
