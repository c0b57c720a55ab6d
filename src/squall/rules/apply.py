"""One push applied to one slice, and one gradient copied out: the passes over memory of a run.

Both work in chunks that stay in a core's cache, so that what has just been written is copied on and checked for
finiteness without being read from memory again. The check is a sum: a finite sum proves that all terms are
finite; any other sum is looked at a second time, exactly, for finite numbers can overflow it.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
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
    """A slice and what the rule keeps beside it. `apply_` is the only writer, and writes in place.

    With one rule per tensor, rules that have a slot of the same name share its vector, each tensor using its own
    part. A slot is as long as the slice even if few of its tensors need it; what belongs to the others is zero. So
    a slice takes its own size times 1 + the number of different slot names among the rules of its tensors.

    Attributes:
        spec: which slice.
        params: its values, shape (S,), of the spec's `master_dtype`, as are the slots.
        slots: the rules' vectors by name, each of shape (S,).
        steps: how many updates each segment has had, shape (segments,), int64.
        minibatches: how many the slice had applied.
    """

    spec: SliceSpec
    params: Tensor
    slots: dict[str, Tensor]
    steps: NDArray[np.int64]
    minibatches: int
    # For speed: the dtype of gradients, and whether masters have another.
    _dtype: torch.dtype = field(init=False, repr=False)
    _is_low: bool = field(init=False, repr=False)
    # Of each segment, for speed: its tensor, and where it starts and stops in the slice.
    _tensors: NDArray[np.int64] = field(init=False, repr=False)
    _starts: NDArray[np.int64] = field(init=False, repr=False)
    _stops: NDArray[np.int64] = field(init=False, repr=False)
    _calls: "_Calls | None" = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        self._dtype = getattr(torch, self.spec.dtype)
        masters: torch.dtype = getattr(torch, self.spec.master_dtype)
        self._is_low = masters is not self._dtype
        _expect_vector(self.spec, "parameters of", self.params, masters)
        for name, slot in self.slots.items():
            _expect_vector(self.spec, f"slot {name!r} of", slot, masters)
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
        grad: shape (S,), contiguous, of the slice's dtype; only read. What it holds for absent tensors does not
            matter.
        absent: indices in the space's `tensors` that the push has no gradient for; other slices' do no harm.
        minibatches: how many the gradient is the sum of.
        out: shape (S,), of the slice's dtype; all of the slice's new values are written to it, rounded if need be,
            those of absent tensors too.
    Returns:
        None if the updated slice is finite in its own dtype, else the index of the first tensor with a value that
        is not.
    Raises:
        ConfigError: the rule's schedule returned something else than a rate. Nothing was changed.
        LocalProtocolError: a vector is not of the slice's size and dtype. Nothing was changed.
    """
    _expect_vector(state.spec, "gradient for", grad, state._dtype)
    if out is not None:
        _expect_vector(state.spec, "buffer for", out, state._dtype)
    calls = _calls_of(state, rule, absent)
    rates = [one.rate_at(state.minibatches) for one in calls.rules]

    first_bad: int | None = None
    outs = repeat(None) if out is None else _chunks(out)
    for at, chunk, gradient, there in zip(count(), calls.chunks, _chunks(grad), outs, strict=False):
        if state._is_low:
            gradient = gradient.float()
        for run in chunk.runs:
            part = gradient if run.part is None else gradient[run.part]
            step = int(state.steps[run.segment]) + 1
            run.rule.update_(run.params, part, run.slots, learning_rate=rates[run.which], step=step)
        written = chunk.params.to(state._dtype) if there is None else there.copy_(chunk.params)
        if first_bad is None and (bad := _first_not_finite(written)) is not None:
            first_bad = _tensor_at(state.spec, at * CHUNK + bad)

    state.steps += calls.present
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
    is_good = True
    for there, here in zip(_chunks(dst), _chunks(src), strict=True):
        _copy_(there, here, accumulate)
        is_good = is_good and is_finite(there)
    return is_good


def copy_gradient_(pieces: Sequence[Piece], grad: Tensor, *, accumulate: bool, check: bool = True) -> bool:
    """Copy a parameter's gradient into the slices' gradient vectors, or add it, and say whether it is finite.

    Args:
        pieces: of that parameter, from `squall.model.install.pieces_of`; their vectors are written.
        grad: of the parameter's shape, in any memory order; a sparse one counts as dense.
        accumulate: add to what is there, as for the second and later minibatches of a push.
        check: whether to look; else all counts as finite.
    """
    dense = grad if grad.layout is torch.strided else grad.to_dense()
    flat = dense.reshape(-1)
    verdict = True
    for piece in pieces:
        part = flat[piece.start : piece.stop]
        if check:
            verdict &= copy_and_check_(piece.vector, part, accumulate=accumulate)
        else:
            _copy_(piece.vector, part, accumulate)
    return verdict


def is_finite(vector: Tensor) -> bool:
    """Whether all values are finite.

    >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    return _first_not_finite(vector) is None


def _copy_(dst: Tensor, src: Tensor, accumulate: bool) -> None:
    if accumulate:
        dst.add_(src)
    else:
        dst.copy_(src)


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
    """Neighbouring elements of one chunk with the same rule and step: one call of the rule.

    Attributes:
        which: where the rule is in `_Calls.rules`.
        segment: one of the slice's that has this step.
        part: of the chunk; None: all of it.
        params, slots: the state's, of this part.
    """

    rule: Rule
    which: int
    segment: int
    part: slice | None
    params: Tensor
    slots: tuple[Tensor, ...]


class _Chunk(NamedTuple):
    """A chunk's parameters and its runs, without those of absent tensors."""

    params: Tensor
    runs: list[_Run]


class _Calls(NamedTuple):
    """What a push with these absent tensors calls on this slice.

    It is the same for the next push if the same tensors are absent: the steps of all others rise together, so that
    equal ones stay equal and different ones different.

    Attributes:
        present: of each segment 1 if it takes part, else 0, shape (segments,).
    """

    rule: Rule | RulePerTensor
    absent: frozenset[int]
    rules: tuple[Rule, ...]
    present: NDArray[np.int64]
    chunks: list[_Chunk]


def _calls_of(state: SliceState, rule: Rule | RulePerTensor, absent: frozenset[int]) -> _Calls:
    """What to call, computed anew if it is not what the last push called."""
    calls = state._calls
    if calls is None or calls.rule is not rule or calls.absent != absent:
        rules, which = _rules_of(rule, state)
        present = np.isin(state._tensors, list(absent), invert=True).astype(np.int64)
        chunks = [_Chunk(params, []) for params in _chunks(state.params)]
        for start, stop, at, segment in _runs(state, present, which):
            for number in range(start // CHUNK, (stop - 1) // CHUNK + 1):
                inside = slice(max(start, number * CHUNK), min(stop, (number + 1) * CHUNK))
                chunks[number].runs.append(_run(state, rules[at], at, segment, number * CHUNK, inside))
        state._calls = calls = _Calls(rule, absent, rules, present, chunks)
    return calls


def _rules_of(rule: Rule | RulePerTensor, state: SliceState) -> tuple[tuple[Rule, ...], NDArray[np.int64]]:
    """Rules, and of each segment which of them it has."""
    if isinstance(rule, Rule):
        return (rule,), np.zeros_like(state.steps)
    return rule.rules, rule.which_array[state._tensors]


def _runs(
    state: SliceState, present: NDArray[np.int64], which: NDArray[np.int64]
) -> Iterator[tuple[int, int, int, int]]:
    """Neighbouring segments with equal steps and rules joined: (start, stop, which rule, first segment)."""
    steps = np.where(present, state.steps, -1)  # what is absent joins nothing else
    is_first = (np.diff(steps, prepend=-2) != 0) | (np.diff(which, prepend=-1) != 0)
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(steps)) - 1
    columns = (state._starts[first], state._stops[last], which[first], first)
    for start, stop, rule, segment in zip(*(column.tolist() for column in columns), strict=True):
        if present[segment]:
            yield start, stop, rule, segment


def _run(state: SliceState, rule: Rule, which: int, segment: int, begin: int, inside: slice) -> _Run:
    """The call for a part of the slice that lies in the chunk which begins at `begin`."""
    is_whole = inside == slice(begin, min(begin + CHUNK, state.spec.size))
    return _Run(
        rule=rule,
        which=which,
        segment=segment,
        part=None if is_whole else slice(inside.start - begin, inside.stop - begin),
        params=state.params[inside],
        slots=tuple(state.slots[name][inside] for name in rule.slot_names),
    )


def _chunks(vector: Tensor) -> tuple[Tensor, ...]:
    return torch.split(vector, CHUNK) if vector.numel() > CHUNK else (vector,)


# Sums of few and harmless float16 numbers already overflow.
_SUMMED_IN = {torch.float16: torch.float32}


def _first_not_finite(chunk: Tensor) -> int | None:
    """Where the first value is that is not finite; None if all are."""
    if math.isfinite(chunk.sum(dtype=_SUMMED_IN.get(chunk.dtype)).item()):
        return None
    places = torch.isfinite(chunk).logical_not_().nonzero()
    return int(places[0]) if places.numel() else None


def _tensor_at(spec: SliceSpec, position: int) -> int:
    at = bisect_right(spec.segments, position, key=lambda segment: segment.start) - 1
    return spec.segments[at].tensor


def _expect_vector(spec: SliceSpec, what: str, vector: Tensor, dtype: torch.dtype) -> None:
    if vector.dtype is dtype and vector.shape == (spec.size,) and vector.is_contiguous():
        return
    raise LocalProtocolError(
        reason=f"{what} slice {spec.slice}: expected shape ({spec.size},), {_name(dtype)}, contiguous, but got "
        f"shape {tuple(vector.shape)}, {_name(vector.dtype)}, "
        f"{'contiguous' if vector.is_contiguous() else 'with gaps'}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
