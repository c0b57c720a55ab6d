"""Symbolic sizes as functions of the batch, with sympy's own evaluation as the oracle.

Fault planted here by hand, seen to fail a test: sums and products of three terms cut to two.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, IntTrueDiv, Max, Mod

from squall.model.graph import Extent
from squall.model.sizes import extent_of

S = sympy.Symbol("s", positive=True, integer=True)


def number(expr: Any) -> Any:
    """What torch's SymInt shows of an expression."""
    return SimpleNamespace(node=SimpleNamespace(expr=expr))


@pytest.mark.parametrize(
    "expr",
    [
        S,
        3 * S + 1,
        S**2 + S + 7,
        6 * S * (S + 1),
        FloorDiv(S + 1, 2),
        FloorDiv(S, 2) + Mod(S, 2),
        IntTrueDiv(1, S),
        Max(S, 4),
    ],
)
@pytest.mark.parametrize("batch", [5, 8])
def test_a_size_is_what_sympy_says_it_is(expr: Any, batch: int) -> None:
    found = extent_of(number(expr), S)
    assert isinstance(found, Extent)
    assert found.at(batch) == pytest.approx(float(expr.subs(S, batch)))


def test_a_number_is_a_number_and_what_values_decide_is_none() -> None:
    assert extent_of(number(sympy.Integer(6)), S) == 6
    assert extent_of(number(sympy.Symbol("u0") + S), S) is None
