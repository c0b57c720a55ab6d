"""What an example run shows, module by module.

Faults planted here by hand, each seen to fail a test: a tensor compared by identity alone · no walk over `grad_fn`.
"""

import collections
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from squall.model.stand_in import calls_wrapped
from squall.model.watch import Watcher

LIST: list[int] = []
TABLE = {"calls": {"number": 0}}
NUMBER = 0


def watched(model: nn.Module) -> dict[str, str]:
    watcher = Watcher(model)
    watcher.start()
    with calls_wrapped(model, watcher.wrap):
        model(torch.ones(2, 2))
    watcher.finish()
    return watcher.reasons


class Does(nn.Module):
    total = 0

    def __init__(self, what: Callable[["Does"], Any], **state: Any) -> None:
        super().__init__()
        self.what = what
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        self.what(self)
        return x * 2


def adds_to_global_number(module: Does) -> None:
    global NUMBER
    NUMBER += 1


def adds_to_class(module: Does) -> None:
    Does.total += 1


def helper() -> None:
    LIST.append(1)


def closure() -> Callable[[Does], None]:
    count = 0

    def inner(module: Does) -> None:
        nonlocal count
        count += 1

    return inner


class Record:
    def __init__(self) -> None:
        self.rows: list[int] = []


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Does(lambda m: setattr(m, "n", m.n + 1), n=0), "self.n"),
        (lambda: Does(lambda m: setattr(m, "fresh", 1)), "self.fresh"),
        (lambda: Does(lambda m: m.d["a"].append(1), d={"a": []}), "self.d"),
        (lambda: Does(lambda m: m.q.append(1), q=collections.deque([0], maxlen=1)), "self.q"),
        (lambda: Does(lambda m: m.s.add(1), s=set()), "self.s"),
        (lambda: Does(lambda m: m.r.rows.append(1), r=Record()), "self.r"),
        (lambda: Does(lambda m: m.t.add_(1), t=torch.zeros(1)), "self.t"),
        (lambda: Does(lambda m: setattr(m, "t", torch.zeros(1)), t=torch.zeros(1)), "self.t"),
        (lambda: Does(lambda m: m.a.__setitem__(0, 5), a=np.zeros(2)), "self.a"),
        (lambda: Does(lambda m: m.g.random(), g=random.Random(1)), "self.g"),
        (lambda: Does(lambda m: m.g.random(), g=np.random.default_rng(1)), "self.g"),
        (lambda: Does(lambda m: LIST.append(1)), "the global 'LIST'"),
        (lambda: Does(lambda m: helper()), "the global 'LIST'"),
        (lambda: Does(lambda m: TABLE["calls"].update(number=TABLE["calls"]["number"] + 1)), "'TABLE'"),
        (lambda: Does(adds_to_global_number), "the global 'NUMBER'"),
        (lambda: Does(adds_to_class), "Does.total"),
        (lambda: Does(closure()), "the outer variable 'count'"),
        (lambda: Does(lambda m: random.random()), "Python's or NumPy's random generator"),
        (lambda: Does(lambda m: np.random.rand()), "Python's or NumPy's random generator"),
    ],
)
def test_a_change_of_python_state_is_blamed_on_the_innermost_module(
    make: Callable[[], nn.Module], reason: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(make(), nn.ReLU()))
    reasons = watched(model)
    assert list(reasons) == ["1.0"]
    assert reason in reasons["1.0"]


def test_modules_that_only_compute_are_not_blamed() -> None:
    model = nn.Sequential(
        nn.Conv1d(2, 2, 1),
        nn.BatchNorm1d(2),
        nn.Dropout(0.5),
        Does(lambda m: m.constant["a"][0], constant={"a": [1]}),
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    )
    watcher = Watcher(model)
    watcher.start()
    with calls_wrapped(model, watcher.wrap):
        model(torch.ones(2, 2, 2))
    watcher.finish()
    assert watcher.reasons == {}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(x) + 1  # type: ignore[no-any-return]


class Hides(nn.Module):
    """Returns what is no tensor, so that only the module around it can be blamed."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Doubles()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.inside(x))


def test_a_custom_function_is_blamed_on_the_innermost_module_that_called_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Hides(), nn.ReLU(), nn.Linear(2, 2))
    assert watched(model) == {"1.inside": "its forward uses the custom autograd function 'Twice'"}


def test_wrapping_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    watched(model)
    assert not any("_call_impl" in vars(module) for module in model.modules())
