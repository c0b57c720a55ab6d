"""From a program to what is drawn of it: layers as rows, shares as boxes, and bytes as edges."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from squall.model.graph import Source
from squall.observe.units import human_bytes
from squall.partition.picture import Box, Edge, Picture, Row
from squall.partition.planner import layers_of
from squall.partition.predict import Prediction
from squall.partition.program import Program
from squall.partition.regions import AnyRegion, Region


def drawing_of(program: Program, predicted: Prediction, how: str, prefix: str = "") -> Picture:
    """What to draw.

    Args:
        prefix: of the names of the model within the program's graph.
    """
    rows = _joined(
        [_row(program, nodes, prefix, predicted.microbatches) for nodes in _layers(program, prefix)]
    )
    count = program.plan.partitions
    named = f"{predicted.batch} examples a step"
    if predicted.microbatches > 1:
        named += f" in {predicted.microbatches} parts"
    title = f"{count} partition{'s' * (count > 1)}, {how}"
    took = "from op times measured here" if predicted.is_measured else "from shapes alone"
    subtitle = (
        f"{named}: {predicted.step_s * 1000:.3g} ms predicted ({took}), {human_bytes(predicted.bytes)} cross"
    )
    heads = tuple(
        (
            f"{human_bytes(predicted.parameter_bytes[p])} of parameters",
            f"{human_bytes(predicted.memory_bytes[p])} of memory in all",
            f"computes for {predicted.busy_s[p] / max(predicted.step_s, 1e-12):.0%} of a step",
        )
        for p in range(count)
    )
    return Picture(title=title, subtitle=subtitle, heads=heads, rows=rows)


def _layers(program: Program, prefix: str) -> list[tuple[int, ...]]:
    nodes = program.graph.nodes
    found = [layer for _, layer in layers_of(program.graph, [0.0] * len(nodes))]
    return [layer for layer in found if f"{nodes[layer[0]].module}.".startswith(prefix)]


def _row(program: Program, nodes: Sequence[int], prefix: str, microbatches: int) -> Row:
    graph = program.graph
    made = [index for at in nodes for index in graph.nodes[at].outputs if index is not None]
    main = max(made, key=lambda index: _whole(program, index))
    module = f"{graph.nodes[nodes[0]].module}.".removeprefix(prefix).removesuffix(".")
    ops = dict.fromkeys(graph.nodes[at].target.split(".")[1] for at in nodes)
    boxes: list[Box | None] = []
    for p, owned in enumerate(program.data[main].owners):
        if any(task.node in nodes for piece in program.parts[p].pieces for task in piece.tasks):
            parameters = _parameters(program, nodes, p)
            boxes.append(
                Box(text=_share(owned), part=owned.size / _whole(program, main), parameter_bytes=parameters)
            )
        else:
            boxes.append(None)
    return Row(
        name=module,
        ops=", ".join(ops),
        boxes=tuple(boxes),
        edges=_edges(program, nodes, microbatches),
    )


def _whole(program: Program, index: int) -> int:
    return max(Region.whole(program.data[index].shape).size, 1)


def _share(owned: AnyRegion) -> str:
    """The axes of which it has a part."""
    if owned.is_empty:
        return "a part of a sum"
    if owned.is_whole:
        return "all"
    if not isinstance(owned, Region):
        return f"{owned.size} elements"
    cut = [
        f"{', '.join(f'{a}:{b}' for a, b in list(axis.pairs())[:3])}{', …' * (len(axis.ranges) > 3)} of {size}"
        for axis, size in zip(owned.axes, owned.shape, strict=True)
        if axis.size < size
    ]
    return " by ".join(cut)


def _parameters(program: Program, nodes: Sequence[int], p: int) -> int:
    """Bytes that a partition owns of the parameters and buffers that these nodes are the first to read."""
    found = 0
    for index in program.graph.from_outside(Source.PARAMETER, Source.BUFFER):
        users = program.graph.users[index]
        if users and users[0] in nodes:
            found += program.data[index].owners[p].size * program.data[index].itemsize
    return found


def _edges(program: Program, nodes: Sequence[int], microbatches: int) -> tuple[Edge, ...]:
    """What is sent for these nodes that no earlier one of the receiver has been sent."""
    up: dict[tuple[int, int], int] = defaultdict(int)
    down: dict[tuple[int, int], int] = defaultdict(int)
    for value, links in program.sent.items():
        for (sender, receiver), regions in links.items():
            if _first_reader(program, value, receiver) in nodes:
                datum = program.data[value]
                size = sum(region.size for region in regions) * datum.itemsize
                size *= 1 if datum.lasts else microbatches
                up[sender, receiver] += size
                if (value, sender) in program.parts[receiver].returns:
                    down[sender, receiver] += size
    return tuple(
        Edge(sender=sender, receiver=receiver, up=size, down=down[sender, receiver])
        for (sender, receiver), size in sorted(up.items())
    )


def _first_reader(program: Program, value: int, receiver: int) -> int | None:
    tasks = (task for piece in program.parts[receiver].pieces for task in piece.tasks)
    return next(
        (
            task.node
            for task in tasks
            if any(read == value and not region.is_empty for read, region in task.reads)
        ),
        None,
    )


def _joined(rows: Sequence[Row]) -> tuple[Row, ...]:
    """A layer without parameters to which nothing crosses stands in the row above it."""
    found: list[Row] = []
    for row in rows:
        owns = any(box is not None and box.parameter_bytes for box in row.boxes)
        same = found and [box is None for box in found[-1].boxes] == [box is None for box in row.boxes]
        if same and not owns and not row.edges:
            found[-1] = replace(found[-1], ops=f"{found[-1].ops}, {row.ops}")
        else:
            found.append(row)
    return tuple(found)
