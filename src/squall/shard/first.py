"""Slices as they are before any update: cut from whole tensors, of which there is one at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from squall.model.layout import Layout, SliceSpec
from squall.rules.apply import SliceState
from squall.rules.patterns import RulePerTensor
from squall.rules.rule import Rule


def first_states(
    layout: Layout, specs: Sequence[SliceSpec], rule: Rule | RulePerTensor, value: Callable[[str], Tensor]
) -> list[SliceState]:
    """The states of some slices, in memory of their own.

    Args:
        value: name of a parameter -> its values, whole.
    """
    vectors = [torch.empty(spec.size, dtype=getattr(torch, spec.master_dtype)) for spec in specs]
    wanted = sorted({segment.tensor for spec in specs for segment in spec.segments})
    for tensor in wanted:
        described = layout.space.tensors[tensor]
        flat = described.of(value(described.name)).reshape(-1)
        for spec, vector in zip(specs, vectors, strict=True):
            for segment in spec.segments:
                if segment.tensor == tensor:
                    piece = flat[segment.tensor_range.start : segment.tensor_range.stop]
                    vector[segment.start : segment.stop].copy_(piece)
    return [SliceState.create(spec, vector, rule) for spec, vector in zip(specs, vectors, strict=True)]
