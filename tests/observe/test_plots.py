"""Tests of squall.observe.plots: the pictures hold the data, whatever the history lacks.

Faults planted here by hand, each seen to fail a test: nulls of the history not skipped · the test metric dropped ·
records of other events drawn · the ends of the smoothing divided by the whole window · a shard's
slices not added up · the model's name not escaped · one box too many drawn · pyplot used.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from squall.observe.plots import plan_svg, plot_loss, smoothed

PNG = b"\x89PNG\r\n\x1a\n"


def progress(minibatches: int, loss: float | None) -> dict[str, Any]:
    return {"event": "Progress", "minibatches": minibatches, "train_loss": loss}


def evaluated(minibatches: int, **metrics: float | None) -> dict[str, Any]:
    return {"event": "Evaluated", "minibatches": minibatches, "metrics": metrics}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved while the test runs."""
    saved: list[Figure] = []
    save = Figure.savefig

    def watched(self: Figure, *args: Any, **kwargs: Any) -> None:
        saved.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", watched)
    return saved


def lines(figure: Figure, axes: int) -> list[tuple[list[float], list[float]]]:
    return [
        (np.array(line.get_xdata()).tolist(), np.array(line.get_ydata()).tolist())
        for line in figure.axes[axes].lines
    ]


def test_losses_and_accuracy_are_drawn_over_minibatches(tmp_path: Path, figures: list[Figure]) -> None:
    history: list[dict[str, Any]] = [
        {"event": "Joined", "role": "replica0.0"},
        {"event": "Another", "minibatches": 5, "train_loss": 9.0, "metrics": {"test_loss": 9.0}},
        progress(10, 2.0),
        progress(20, None),
        evaluated(25, test_loss=1.5, test_accuracy=0.5),
        progress(30, 1.0),
        evaluated(35, test_loss=None, test_accuracy=0.75),
    ]
    plot_loss(history, tmp_path / "loss.png", "digits for $5 and $6")

    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    train = ([10, 30], [2.0, 1.0])
    assert lines(figures[0], 0) == [train, train, ([25], [1.5])]
    assert lines(figures[0], 1) == [([25, 35], [0.5, 0.75])]
    labels = [axes.get_ylabel() for axes in figures[0].axes]
    assert (labels[0], labels[1]) == ("loss (mean over a minibatch)", "test accuracy (fraction)")
    assert figures[0].axes[0].get_xlabel() == "minibatches done, over all replicas"


def test_without_another_test_metric_there_is_one_axis(tmp_path: Path, figures: list[Figure]) -> None:
    plot_loss([progress(1, 1.0), evaluated(1, test_loss=2.0)], tmp_path / "a.png", "")
    assert len(figures[0].axes) == 1


@pytest.mark.parametrize("history", [[], [progress(5, None)]])
def test_a_history_without_a_loss_gives_a_picture_that_says_so(
    tmp_path: Path, figures: list[Figure], history: list[dict[str, Any]]
) -> None:
    plot_loss(history, tmp_path / "a.png", "nothing")
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["nothing was measured"]


def test_smoothing_keeps_a_straight_line_and_its_ends_are_means_of_what_is_there() -> None:
    flat = smoothed([3.0] * 500)
    assert flat == pytest.approx([3.0] * 500)

    rising = smoothed([float(at) for at in range(180)])  # a reach of three on each side
    assert rising[90] == pytest.approx(90.0)
    assert rising[0] == pytest.approx((0 + 1 + 2 + 3) / 4)


def test_matplotlib_is_not_loaded_before_something_is_drawn_and_pyplot_never(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, squall.observe.plots as plots\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        f"plots.plot_loss([], pathlib.Path({str(tmp_path / 'a.png')!r}), '')\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def parts(picture: str, tag: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(picture).findall(f"{{http://www.w3.org/2000/svg}}{tag}")


def test_the_plan_has_an_edge_from_each_replica_to_each_shard_and_its_bytes() -> None:
    picture = plan_svg([(0, 1_000_000), (1, 3_000_000), (0, 1_500_000)], replicas=3, model="<net> & co")

    words = [text.text for text in parts(picture, "text")]
    assert len(parts(picture, "line")) == 6
    assert {"replica 0", "replica 1", "replica 2", "shard 0", "shard 1"} < set(words)
    assert words.count("2.50 MB an edge") == words.count("3.00 MB an edge") == 1
    assert words[0] == "<net> & co: 3 replicas, 2 shards"
    assert any("5.50 MB" in (text or "") for text in words)


def test_of_many_replicas_the_first_are_drawn_and_the_rest_counted() -> None:
    words = [text.text for text in parts(plan_svg([(0, 8)], replicas=200, model="net"), "text")]
    assert [word for word in words if word and word.startswith("replica ")] == [
        f"replica {at}" for at in range(7)
    ]
    assert "193 more" in words


@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (8, 1), (2, 20)])
def test_nothing_is_drawn_outside_the_picture(replicas: int, shards: int) -> None:
    picture = plan_svg([(shard, 8) for shard in range(shards)], replicas=replicas, model="net")
    width = float(ElementTree.fromstring(picture).attrib["width"])
    for box in parts(picture, "rect"):
        left = float(box.attrib.get("x", 0))
        assert 0 <= left <= left + float(box.attrib["width"]) <= width
