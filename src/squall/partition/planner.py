"""Ways to make a plan: layers to partitions (horizontal), through layers (vertical), both (mixed), or at random.

All of them walk the graph once. A *team* of partitions computes each node: one partition in a horizontal cut, all of
them in a vertical one. Within a team, each value is cut along one axis, the one for which the least has to travel.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from random import Random

from squall.errors import ConfigError
from squall.model.graph import Graph, Source
from squall.partition.call import Call
from squall.partition.calls import bound
from squall.partition.plan import Holding, Plan, StageCut
from squall.partition.walk import BATCH, RandomWalk, Walk


def horizontal(graph: Graph, partitions: int) -> Plan:
    """Whole layers to partitions, contiguous, balanced by their arithmetic."""
    return mixed(graph, [1] * partitions)


def vertical(graph: Graph, partitions: int, *, tiles: Sequence[str] = ()) -> Plan:
    """Every layer over all partitions: by features, feature maps, heads.

    Args:
        tiles: ops to cut in space instead, by name, as in ``("conv2d", "max_pool2d")``.
    """
    return mixed(graph, [partitions], tiles=tiles)


def mixed(
    graph: Graph,
    teams: Sequence[int],
    *,
    tiles: Sequence[str] = (),
    speeds: Sequence[float] | None = None,
    costs: Sequence[float] | None = None,
    joined: bool = True,
) -> Plan:
    """Layers to teams of partitions, and within a team through the layers.

    Args:
        teams: how many partitions each team has, from the first layers on.
        tiles: as for `vertical`.
        speeds: of each partition, in any unit: shares are in proportion. Equal by default.
        costs: of each node of the graph, in any unit; multiplications by default.
        joined: keep activations and pooling with the layer before them, since no more crosses behind them than before;
            apart, the teams can be more equal.
    """
    if not teams or min(teams) < 1:
        raise ConfigError(
            subject="a plan", expected="at least one partition in each team", got=str(list(teams))
        )
    ends = [sum(teams[:at]) for at in range(len(teams) + 1)]
    members = [tuple(range(a, b)) for a, b in pairwise(ends)]
    fast = tuple(speeds or [1.0] * ends[-1])
    rates = [sum(fast[p] for p in team) for team in members]
    layers = layers_of(graph, costs)
    runs = _balanced(_with_followers(graph, layers, len(teams)) if joined else layers, rates)
    team_of = {node: members[team] for team, nodes in enumerate(runs) for node in nodes}
    return Walk(graph, ends[-1], team_of, tuple(tiles), fast).plan()


def one_apart(
    graph: Graph,
    partitions: int,
    *,
    speeds: Sequence[float] | None = None,
    costs: Sequence[float] | None = None,
) -> Plan | None:
    """The layer that takes longest on the fastest partition, alone, and the others in order over the rest.

    Layers before it and behind it may be together then: a line whose slowest partition has less to do than in any that
    is cut in order. None if no layer takes more than the fastest partition's share.
    """
    fast = tuple(speeds or [1.0] * partitions)
    layers = layers_of(graph, costs)
    largest = max(range(len(layers)), key=lambda at: layers[at][0])
    own = max(range(partitions), key=lambda p: (fast[p], p))
    others = [p for p in range(partitions) if p != own]
    if not others or layers[largest][0] <= _cost(layers) * fast[own] / sum(fast):
        return None
    runs = _balanced([*layers[:largest], *layers[largest + 1 :]], [fast[p] for p in others])
    team_of = dict.fromkeys(layers[largest][1], (own,))
    team_of |= {node: (p,) for p, nodes in zip(others, runs, strict=True) for node in nodes}
    return Walk(graph, partitions, team_of, (), fast).plan()


def by_hand(
    graph: Graph,
    partitions: int,
    team_of: Mapping[int, tuple[int, ...]],
    *,
    tiles: Sequence[str] = (),
    speeds: Sequence[float] | None = None,
    weights: Mapping[int, Mapping[int, float]] | None = None,
) -> Plan:
    """Nodes to teams as told; a node that is not told goes where what it reads is.

    Args:
        team_of: node -> its partitions.
        weights: node -> partition -> its share in a cut of that node's results, in any unit; by speeds if not told.
    """
    fast = tuple(speeds or [1.0] * partitions)
    return Walk(graph, partitions, team_of, tuple(tiles), fast, weights).plan()


def completed(
    graph: Graph,
    partitions: int,
    holdings: Mapping[int, Holding],
    staged: Mapping[int, tuple[StageCut, ...]],
    speeds: Sequence[float] | None = None,
) -> Plan:
    """A plan of which a part is given; nodes that are not go where what they read is.

    Args:
        holdings: value -> who owns what.
        staged: node -> how its stages are divided, of nodes whose outputs are given.
    """
    walk = Walk(graph, partitions, {}, (), tuple(speeds or [1.0] * partitions))
    return walk.plan(holdings, staged)


def random(graph: Graph, partitions: int, seed: int) -> Plan:
    """Any cut that can be computed, for tests: uneven, gappy, every value for itself, ops in stages."""
    return RandomWalk(graph, partitions, Random(seed)).plan()


def layers_of(graph: Graph, costs: Sequence[float] | None = None) -> list[tuple[float, tuple[int, ...]]]:
    """Consecutive nodes of one module, with what they cost.

    Args:
        costs: of each node; by default multiplications for one example, about.
    """
    found: list[tuple[float, list[int]]] = []
    before = None
    for at, node in enumerate(graph.nodes):
        if node.module != before or not found:
            found.append((0.0, []))
        before = node.module
        cost, nodes = found[-1]
        found[-1] = (cost + _cost_at(graph, at, costs), nodes)
        nodes.append(at)
    return [(cost, tuple(nodes)) for cost, nodes in found]


def _cost_at(graph: Graph, at: int, costs: Sequence[float] | None) -> float:
    return cost_of(bound(graph, at, BATCH).call) / BATCH if costs is None else costs[at]


def cost_of(call: Call) -> float:
    """Multiplications of an op, roughly: output elements times what each sums over."""
    size = float(sum(prod(shape) for shape in call.outputs))
    if call.name.startswith("conv") or call.name in (
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "locally_connected2d",
    ):
        weight = call.inputs[-1 if call.name in ("matmul", "mm", "bmm", "addmm") else 1].shape
        each = weight[-1] if call.name in ("linear", "locally_connected2d") else None
        return size * (
            each
            or (prod(weight[1:]) if call.name.startswith("conv") else weight[-2 if len(weight) > 1 else 0])
        )
    return size


def _with_followers(graph: Graph, layers: "_Layers", least: int) -> "_Layers":
    """Layers without parameters (activations, pooling) joined to the one before, as long as there are enough for all.

    What follows a layer makes its result smaller or leaves it as large, so a cut is better behind it.
    """
    found: list[tuple[float, tuple[int, ...]]] = []
    for cost, nodes in layers:
        read = {index for at in nodes for index in graph.nodes[at].inputs}
        if found and not any(graph.values[index].source is Source.PARAMETER for index in read):
            before, earlier = found[-1]
            found[-1] = (before + cost, earlier + nodes)
        else:
            found.append((cost, nodes))
    return found if len(found) >= least else layers


def _balanced(layers: "_Layers", rates: Sequence[float]) -> list[list[int]]:
    """Contiguous runs, one for each team, whose largest cost over its team's rate is least, to a millionth."""
    low, high = 0.0, _cost(layers) / min(rates)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _runs(layers, rates, middle) is not None else (middle, high)
    runs = _runs(layers, rates, high * (1 + 1e-6))
    assert runs is not None
    while not all(runs) and any(len(run) > 1 for run in runs):  # nobody idles if that can be helped
        idle = next(at for at, run in enumerate(runs) if not run)
        largest = max((at for at, run in enumerate(runs) if len(run) > 1), key=lambda at: _cost(runs[at]))
        runs.pop(idle)
        place = largest - (idle < largest)
        run = runs[place]
        at = min(range(1, len(run)), key=lambda at: max(_cost(run[:at]), _cost(run[at:])))
        runs[place : place + 1] = [run[:at], run[at:]]
    return [[node for _, nodes in run for node in nodes] for run in runs]


_Layers = Sequence[tuple[float, tuple[int, ...]]]


def _cost(layers: _Layers) -> float:
    return sum(cost for cost, _ in layers)


def _runs(layers: _Layers, rates: Sequence[float], limit: float) -> list[_Layers] | None:
    """Layers in order, to each team as many as it can do in so much time; None if some are left."""
    runs: list[list[tuple[float, tuple[int, ...]]]] = []
    at = 0
    for rate in rates:
        runs.append([])
        while at < len(layers) and _cost(runs[-1]) + layers[at][0] <= limit * rate:
            runs[-1].append(layers[at])
            at += 1
    return list(runs) if at == len(layers) else None
