"""Sizes that torch follows symbolically, written as functions of the batch size."""

from functools import reduce
from typing import Any

import sympy

from squall.model.graph import BATCH, Extent

_PAIRS = {
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "IntTrueDiv": "truediv",
    "FloatTrueDiv": "truediv",
    "Mod": "mod",
    "PythonMod": "mod",
    "PowByNatural": "pow",
    "FloatPow": "pow",
    "Pow": "pow",
}
_MANY = {"Add": "add", "Mul": "mul", "Max": "max", "Min": "min"}
_SAME = {"ToFloat", "Identity"}


def extent_of(number: Any, symbol: Any) -> Extent | int | float | None:
    """A symbolic number of torch as a plain one or an `Extent`; None if more than the batch decides it.

    Args:
        number: a SymInt or SymFloat.
        symbol: sympy's symbol of the batch size; None if nothing varies.
    """
    form = _form(number.node.expr, symbol)
    return Extent(form) if isinstance(form, tuple) or form == BATCH else form


def _form(expr: Any, symbol: Any) -> Any:
    if expr == symbol:
        return BATCH
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Float):
        return float(expr)
    if isinstance(expr, sympy.Rational):
        return ("truediv", int(expr.p), int(expr.q))
    name = type(expr).__name__
    parts = [_form(part, symbol) for part in expr.args]
    if not parts or any(part is None for part in parts):
        return None
    if name in _SAME:
        return parts[0]
    if name == "OpaqueUnaryFn_sqrt":
        return ("pow", parts[0], 0.5)
    if name in _MANY:
        # sympy puts numbers first; people write them last in a sum.
        ordered = parts[::-1] if name == "Add" else parts
        return reduce(lambda left, right: (_MANY[name], left, right), ordered)
    return (_PAIRS[name], *parts) if name in _PAIRS and len(parts) == 2 else None
