"""One push applied to one slice, and one gradient copied out: the passes over memory of a run.

Both work in chunks that stay in a core's cache, so that what has just been written is copied on and checked for
finiteness without being read from memory again. The check is a sum: a finite sum proves that all terms are
finite; any other sum is looked at a second time, exactly, for finite numbers can overflow it.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squall.errors import LocalProtocolError
from squall.model.install import Piece
from squall.model.layout import SliceSpec
from squall.rules.patterns import RulePerTensor
from squall.rules.rule import Rule

CHUNK = 262_144
"""Elements worked on at a time: large against the price of a call (some 16 microseconds), small against the cache.

Measured on 42 million float32 (Adagrad, written through and checked) against one fused pass and one copy: 1.5
times as long with 65,536, 1.3 with 131,072, 1.15 with 262,144 and hardly less with more.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class SliceState:
    """A slice and what the rule keeps beside it. `apply_` is the only writer.

    With one rule per tensor, rules that have a slot of the same name share its vector, each tensor using its own
    part. A slot is as long as the slice even if few of its tensors need it; what belongs to the others is zero. So
    a slice takes its own size times 1 + the number of different slot names among the rules of its tensors.

    Attributes:
        spec: which slice.
        params: its values, shape (S,).
        slots: the rules' vectors by name, each of shape (S,).
        steps: how many updates each segment has had, shape (segments,), int64.
        minibatches: how many the slice had applied.
    """

    spec: SliceSpec
    params: Tensor
    slots: dict[str, Tensor]
    steps: NDArray[np.int64]
    minibatches: int
    # Of each segment, for speed: its tensor, and where it starts and stops in the slice.
    _tensors: NDArray[np.int64] = field(init=False, repr=False)
    _starts: NDArray[np.int64] = field(init=False, repr=False)
    _stops: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _expect_vector(f"parameters of slice {self.spec.slice}", self.params, self.spec)
        for name, slot in self.slots.items():
            _expect_vector(f"slot {name!r} of slice {self.spec.slice}", slot, self.spec)
        segments = self.spec.segments
        if self.steps.shape != (len(segments),):
            raise LocalProtocolError(
                reason=f"steps of slice {self.spec.slice}: expected one for each of its {len(segments)} "
                f"segments, but got shape {self.steps.shape}"
            )
        self._tensors = np.array([segment.tensor for segment in segments], dtype=np.int64)
        self._starts = np.array([segment.start for segment in segments], dtype=np.int64)
        self._stops = np.array([segment.stop for segment in segments], dtype=np.int64)

    @classmethod
    def create(cls, spec: SliceSpec, params: Tensor, rule: Rule | RulePerTensor) -> "SliceState":
        """The state before any update. `params` is kept, not copied, and will be written.

        >>> from squall.rules.sgd import Sgd
        >>> from squall.slices import Range
        >>> from squall.model.layout import Segment
        >>> segments = (Segment(tensor=0, tensor_range=Range(0, 2), start=0),)
        >>> spec = SliceSpec(
        ...     slice=0, shard=0, partition=0, dtype="float32", start=0, stop=2, segments=segments
        ... )
        >>> rule = Sgd(learning_rate=0.5)
        >>> state = SliceState.create(spec, torch.zeros(2), rule)
        >>> apply_(state, rule, torch.tensor([2.0, 4.0]), minibatches=1)
        >>> state.params, state.steps, state.minibatches
        (tensor([-1., -2.]), array([1]), 1)
        """
        slots = (
            {name: rule.init_slot(name, params) for name in rule.slot_names}
            if isinstance(rule, Rule)
            else _slots_per_tensor(spec, params, rule)
        )
        steps = np.zeros(len(spec.segments), dtype=np.int64)
        return cls(spec=spec, params=params, slots=slots, steps=steps, minibatches=0)


@torch.no_grad()
def apply_(
    state: SliceState,
    rule: Rule | RulePerTensor,
    grad: Tensor,
    *,
    absent: frozenset[int] = frozenset(),
    minibatches: int,
    out: Tensor | None = None,
) -> int | None:
    """Apply one push to one slice, and write the new values through.

    The rule runs per tensor: a segment whose tensor is absent keeps its values, slots and step. Neighbours with
    the same rule and equal steps are one run, so that the usual push is one pass, however many tensors there are.

    Args:
        state: written; the whole push is applied even if the outcome is not finite.
        rule: the same one that the state was created with.
        grad: shape (S,), contiguous; only read. What it holds for absent tensors does not matter.
        absent: indices in the space's `tensors` that the push has no gradient for; other slices' do no harm.
        minibatches: how many the gradient is the sum of.
        out: shape (S,); all of the slice's new values are written to it, those of absent tensors too.
    Returns:
        None if the updated slice is finite, else the index of the first tensor with a value that is not.
    Raises:
        ConfigError: the rule's schedule returned something else than a rate. Nothing was changed.
        LocalProtocolError: a vector is not of the slice's size and dtype. Nothing was changed.
    """
    _expect_vector(f"gradient for slice {state.spec.slice}", grad, state.spec)
    if out is not None:
        _expect_vector(f"buffer for slice {state.spec.slice}", out, state.spec)
    rules, which = _rules_of(rule, state)
    rates = [one.rate_at(state.minibatches) for one in rules]
    present = ~np.isin(state._tensors, list(absent)) if absent else np.ones(len(state.steps), dtype=np.bool_)
    steps = np.where(present, state.steps + 1, 0)

    vectors = (state.params, grad, *state.slots.values())
    chunks = zip(*(torch.split(vector, CHUNK) for vector in vectors), strict=True)
    outs = torch.split(out, CHUNK) if out is not None else None
    first_bad: int | None = None
    for number, ((params, gradient, *slots), runs) in enumerate(
        zip(chunks, _runs_by_chunk(state, steps, which), strict=True)
    ):
        named = dict(zip(state.slots, slots, strict=True))
        for run in runs:
            _update_(rules[run.rule], params, gradient, named, run, learning_rate=rates[run.rule])
        if outs is not None:
            outs[number].copy_(params)
        if first_bad is None and (at := _first_not_finite(params)) is not None:
            first_bad = _tensor_at(state.spec, number * CHUNK + at)

    state.steps += present
    state.minibatches += minibatches
    return first_bad


def copy_and_check_(dst: Tensor, src: Tensor, *, accumulate: bool) -> bool:
    """Copy a vector, or add it, and say whether all of what is now in `dst` is finite.

    Args:
        dst: shape (N,); written to the end even if it is not finite.
        src: shape (N,).
        accumulate: add to `dst` instead of overwriting it.

    >>> total = torch.zeros(2)
    >>> copy_and_check_(total, torch.tensor([1.0, 2.0]), accumulate=True)
    True
    >>> copy_and_check_(total, torch.tensor([1.0, float("inf")]), accumulate=True), total
    (False, tensor([2., inf]))
    """
    is_finite = True
    for there, here in zip(_chunks(dst), _chunks(src), strict=True):
        if accumulate:
            there.add_(here)
        else:
            there.copy_(here)
        is_finite = is_finite and _first_not_finite(there) is None
    return is_finite


@torch.no_grad()
def copy_gradient_(pieces: Sequence[Piece], grad: Tensor, *, accumulate: bool) -> bool:
    """Copy a parameter's gradient into the slices' gradient vectors, or add it, and say whether it is finite.

    Args:
        pieces: of that parameter, from `squall.model.install.pieces_of`; their vectors are written.
        grad: of the parameter's shape, in any memory order; a sparse one counts as dense.
        accumulate: add to what is there, as for the second and later minibatches of a push.
    """
    dense = grad if grad.layout is torch.strided else grad.to_dense()
    flat = dense.reshape(-1)
    verdicts = [
        copy_and_check_(piece.vector, flat[piece.start : piece.stop], accumulate=accumulate)
        for piece in pieces
    ]
    return all(verdicts)


def _slots_per_tensor(spec: SliceSpec, params: Tensor, rules: RulePerTensor) -> dict[str, Tensor]:
    slots: dict[str, Tensor] = {}
    for segment in spec.segments:
        own, part = rules.rule_of(segment.tensor), slice(segment.start, segment.stop)
        for name in own.slot_names:
            if name not in slots:
                slots[name] = torch.zeros_like(params)
            slots[name][part] = own.init_slot(name, params[part])
    return slots


class _Run(NamedTuple):
    """Neighbouring elements with the same rule and step, from `start` to before `stop`; `rule` is an index."""

    start: int
    stop: int
    step: int
    rule: int


def _rules_of(rule: Rule | RulePerTensor, state: SliceState) -> tuple[tuple[Rule, ...], NDArray[np.int64]]:
    """Rules, and of each segment which of them it has."""
    if isinstance(rule, Rule):
        return (rule,), np.zeros_like(state.steps)
    return rule.rules, rule.which_array[state._tensors]


def _runs_by_chunk(state: SliceState, steps: NDArray[np.int64], which: NDArray[np.int64]) -> list[list[_Run]]:
    """The runs in each chunk, counted from the chunk's begin; no absent ones."""
    by_chunk: list[list[_Run]] = [[] for _ in range(-(-state.spec.size // CHUNK))]
    for start, stop, step, rule in _runs(state, steps, which):
        for number in range(start // CHUNK, (stop - 1) // CHUNK + 1):
            begin = number * CHUNK
            by_chunk[number].append(_Run(max(start - begin, 0), min(stop - begin, CHUNK), step, rule))
    return by_chunk


def _runs(
    state: SliceState, steps: NDArray[np.int64], which: NDArray[np.int64]
) -> list[tuple[int, int, int, int]]:
    """Neighbouring segments with equal steps and rules joined, as in `_Run`; step 0 means absent."""
    is_first = (np.diff(steps, prepend=-1) != 0) | (np.diff(which, prepend=-1) != 0)
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(steps)) - 1
    bounds = zip(
        state._starts[first].tolist(),
        state._stops[last].tolist(),
        steps[first].tolist(),
        which[first].tolist(),
        strict=True,
    )
    return [run for run in bounds if run[2]]


def _update_(
    rule: Rule, params: Tensor, grad: Tensor, named: Mapping[str, Tensor], run: _Run, *, learning_rate: float
) -> None:
    """Carry out one run of a chunk, given the chunk's part of every vector."""
    vectors = (params, grad, *(named[name] for name in rule.slot_names))
    if run.stop - run.start < params.numel():
        vectors = tuple(vector[run.start : run.stop] for vector in vectors)
    params, grad, *slots = vectors
    rule.update_(params, grad, tuple(slots), learning_rate=learning_rate, step=run.step)


def _chunks(vector: Tensor) -> tuple[Tensor, ...]:
    return torch.split(vector, CHUNK) if vector.numel() > CHUNK else (vector,)


def _first_not_finite(chunk: Tensor) -> int | None:
    """Where the first value is that is not finite; None if all are."""
    if math.isfinite(chunk.sum().item()):
        return None
    places = torch.isfinite(chunk).logical_not_().nonzero()
    return int(places[0]) if places.numel() else None


def _tensor_at(spec: SliceSpec, position: int) -> int:
    at = bisect_right(spec.segments, position, key=lambda segment: segment.start) - 1
    return spec.segments[at].tensor


def _expect_vector(what: str, vector: Tensor, spec: SliceSpec) -> None:
    got = (tuple(vector.shape), str(vector.dtype).removeprefix("torch."), vector.is_contiguous())
    if got != ((spec.size,), spec.dtype, True):
        raise LocalProtocolError(
            reason=f"{what}: expected shape ({spec.size},), {spec.dtype}, contiguous, but got shape {got[0]}, "
            f"{got[1]}, {'contiguous' if got[2] else 'with gaps'}"
        )
