"""The two pictures of a run directory: ``loss.png`` and ``plan.svg``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import numpy as np

from squall.observe.files import write_atomic
from squall.observe.units import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GRAY = "#1f6feb", "#d9730d", "#57606a"


def plot_loss(history: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw training loss, and what the test set said, over the minibatches done; write it as PNG.

    The training loss is drawn as measured (light) and smoothed (dark); the test loss as points on the same
    axis; another test metric, the first by name, on an axis of its own. An empty history gives an empty
    picture that says so.

    Args:
        history: records as `squall.observe.metrics.read_history` returns them.
        path: the file; replaced as a whole.
        title: above the picture.
    """
    # No pyplot: it would choose a window system and keep the figure in a global list.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Margins that fit what is drawn here; having them computed takes as long as drawing.
    figure = Figure(figsize=(8, 4.5), dpi=120)
    figure.subplots_adjust(left=0.1, right=0.9, bottom=0.12, top=0.92)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # A title may hold a dollar sign, which matplotlib would read as mathematics.
    axes.set_title(title.replace("$", r"\$"))
    axes.set_xlabel("minibatches done, over all replicas")
    axes.set_ylabel("loss (mean over a minibatch)", color=_BLUE)
    axes.grid(alpha=0.25)
    _draw_train_loss(axes, history)
    _draw_tests(axes, history)
    if not axes.has_data():
        axes.text(0.5, 0.5, "nothing was measured", ha="center", va="center", transform=axes.transAxes)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomic(path, picture.getvalue())


def _draw_train_loss(axes: Axes, history: Sequence[Mapping[str, Any]]) -> None:
    points = [
        (record["minibatches"], record["train_loss"])
        for record in history
        if record.get("event") == "Progress" and record.get("train_loss") is not None
    ]
    if points:
        at, losses = zip(*points, strict=True)
        axes.plot(at, losses, color=_BLUE, alpha=0.3, linewidth=1)
        axes.plot(at, smoothed(losses), color=_BLUE, linewidth=1.8, label="training loss")
        axes.legend(loc="upper center", frameon=False)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean around each value, over about a thirtieth of all: light, and no lag.

    >>> smoothed([1.0, 2.0, 3.0])
    [1.0, 2.0, 3.0]
    """
    window = np.ones(2 * (len(values) // 60) + 1)
    # At both ends the window is cut short, so divide by what is left of it.
    sums, counts = np.convolve(values, window, "same"), np.convolve(np.ones(len(values)), window, "same")
    means: list[float] = (sums / counts).tolist()
    return means


def _draw_tests(axes: Axes, history: Sequence[Mapping[str, Any]]) -> None:
    tests = [record for record in history if record.get("event") == "Evaluated"]
    names = sorted({name for record in tests for name in record["metrics"]})
    losses = [name for name in names if name.endswith("loss")]
    for name in losses:
        axes.plot(*_points(tests, name), "o", color=_BLUE, markersize=4, label=_words(name))
    if losses:
        axes.legend(loc="upper center", frameon=False)
    others = [name for name in names if name not in losses]
    if others:
        name = others[0]
        second = axes.twinx()
        second.plot(*_points(tests, name), "s-", color=_ORANGE, markersize=4, linewidth=1)
        unit = " (fraction)" if "accuracy" in name else ""
        second.set_ylabel(_words(name) + unit, color=_ORANGE)


def _points(tests: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    known = [record for record in tests if record["metrics"].get(name) is not None]
    return [record["minibatches"] for record in known], [record["metrics"][name] for record in known]


def _words(name: str) -> str:
    return name.replace("_", " ").replace("$", r"\$")


_BOX_WIDTH, _BOX_HEIGHT, _GAP, _MARGIN = 132, 52, 28, 24
_TITLE_Y, _REPLICA_Y, _SHARD_Y, _NOTE_Y, _HEIGHT = 34, 60, 220, 304, 324
_NARROWEST = 480
_MOST_BOXES = 8


def plan_svg(layout_rows: Sequence[tuple[int, int]], *, replicas: int, model: str) -> str:
    """Draw who talks to whom: replicas above, shards below, and the bytes that each edge carries.

    Every replica pushes a gradient of a shard's size to it and fetches as many parameters, so all edges into
    one shard carry the same. Of more than eight replicas or shards the first are drawn and the rest counted.

    Args:
        layout_rows: (shard, bytes) of each slice; slices of one shard are added up.
        replicas: how many there are.
        model: the model's name.

    Returns:
        the SVG document, for `squall.observe.files.write_atomic`.

    >>> picture = plan_svg([(0, 4_000_000), (1, 3_000_000)], replicas=2, model="digits")
    >>> picture.count("<line"), picture.count("<rect"), "4.00 MB an edge" in picture
    (4, 5, True)
    """
    sizes: dict[int, int] = {}
    for shard, size in layout_rows:
        sizes[shard] = sizes.get(shard, 0) + size
    above = _first_few([(f"replica {index}", "computes") for index in range(replicas)])
    below = _first_few(
        [(f"shard {shard}", f"{human_bytes(size)} an edge") for shard, size in sorted(sizes.items())]
    )
    most = max(len(above), len(below))
    width = max(most * (_BOX_WIDTH + _GAP) - _GAP + 2 * _MARGIN, _NARROWEST)
    title = f"{model}: {_count(replicas, 'replica')}, {_count(len(sizes), 'shard')}"
    total = human_bytes(sum(sizes.values()))
    note = f"A push or a fetch moves {total} between a replica and all shards together."
    parts = [
        f'<rect width="{width}" height="{_HEIGHT}" fill="white"/>',
        _text(width / 2, _TITLE_Y, title, size=16),
        *_edges(len(above), len(below), width),
        *_row_of_boxes(above, _REPLICA_Y, width, fill="#ddf4ff", line=_BLUE),
        *_row_of_boxes(below, _SHARD_Y, width, fill="#fff1e5", line=_ORANGE),
        _text(width / 2, _NOTE_Y, note, size=12, color=_GRAY),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" '
        f'width="{width}" height="{_HEIGHT}" font-family="sans-serif">'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _first_few(boxes: list[tuple[str, str]]) -> list[tuple[str, str]]:
    if len(boxes) <= _MOST_BOXES:
        return boxes
    return [*boxes[: _MOST_BOXES - 1], (f"{len(boxes) - _MOST_BOXES + 1} more", "not drawn")]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _centres(num_boxes: int, width: int) -> list[float]:
    """The middles of a row of boxes, side by side around the middle of the picture."""
    step = _BOX_WIDTH + _GAP
    return [width / 2 + (at - (num_boxes - 1) / 2) * step for at in range(num_boxes)]


def _edges(num_above: int, num_below: int, width: int) -> list[str]:
    return [
        f'<line x1="{start:g}" y1="{_REPLICA_Y + _BOX_HEIGHT}" x2="{stop:g}" y2="{_SHARD_Y}" '
        f'stroke="{_GRAY}" stroke-opacity="0.5"/>'
        for start in _centres(num_above, width)
        for stop in _centres(num_below, width)
    ]


def _row_of_boxes(boxes: list[tuple[str, str]], y: int, width: int, *, fill: str, line: str) -> list[str]:
    parts = []
    for centre, (name, detail) in zip(_centres(len(boxes), width), boxes, strict=True):
        parts += [
            f'<rect x="{centre - _BOX_WIDTH / 2:g}" y="{y}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" '
            f'rx="8" fill="{fill}" stroke="{line}"/>',
            _text(centre, y + 22, name, size=14),
            _text(centre, y + 40, detail, size=12, color=_GRAY),
        ]
    return parts


def _text(x: float, y: float, words: str, *, size: int, color: str = "#1f2328") -> str:
    return f'<text x="{x:g}" y="{y}" font-size="{size}" fill="{color}" text-anchor="middle">{escape(words)}</text>'
