"""Scaled dot-product attention: heads and examples are independent, queries share keys and values."""

import math

import torch
from torch import Tensor

from squall.partition.call import Call
from squall.partition.indices import Indices
from squall.partition.masks import Draw
from squall.partition.regions import AnyRegion, Region
from squall.partition.rules.base import ExactRule, Kernel, Rule, Words, caller
from squall.partition.rules.elementwise import broadcast, dropped
from squall.partition.words import All, Same


class Attention(ExactRule):
    """``scaled_dot_product_attention``; inputs: query, key, value, perhaps a mask.

    A causal query needs only the keys up to its own place. Dropout's mask is a function of example, head, query and
    key, and does not depend on the cut.
    """

    def applies(self, call: Call) -> bool:
        query, key, value = (spec.shape[:-2] for spec in call.inputs[:3])
        return not call.arguments()["enable_gqa"] and query == key == value == call.shape[:-2]

    def words(self, call: Call) -> tuple[Words, ...]:
        rank = len(call.shape)
        ahead = tuple(Same(at) for at in range(rank - 2))
        words: list[Words] = [
            (*ahead, Same(rank - 2), All()),
            (*ahead, All(), All()),
            (*ahead, All(), Same(rank - 1)),
        ]
        for mask in call.inputs[3:]:
            scores = (*call.shape[:-1], call.inputs[1].shape[-2])
            words.append((*broadcast(mask, scores)[:-1], All()))
        return tuple(words)

    def needs(self, call: Call, out: Region) -> tuple[AnyRegion, ...]:
        query, key, value, *mask = super().needs(call, out)
        seen = self._seen(call, out)
        return query, *(each.bounding().replace(len(call.shape) - 2, seen) for each in (key, value)), *mask

    def _seen(self, call: Call, out: Region) -> Indices:
        """The keys that some query of the region attends to."""
        count = call.inputs[1].shape[-2]
        return Indices.span(0, min(out.axes[-2].stop, count) if call.arguments()["is_causal"] else count)

    def kernel(self, call: Call, out: Region) -> Kernel:
        named, seen = call.arguments(), self._seen(call, out)
        allowed = _causal(out.axes[-2], seen) if named["is_causal"] else None
        if named["dropout_p"] > 0:
            scores = Region((*call.shape[:-1], call.inputs[1].shape[-2]), (*out.axes[:-1], seen))
            return _with_dropout(call, scores, allowed)
        if allowed is None:
            run = caller(call, is_causal=False)
            return lambda tensors, draw: run(tensors)
        attend = torch.nn.functional.scaled_dot_product_attention
        scale = named["scale"]
        return lambda tensors, draw: attend(
            tensors[0], tensors[1], tensors[2], attn_mask=allowed, scale=scale
        )


def _causal(queries: Indices, keys: Indices) -> Tensor | None:
    """Which keys each query may see; None if it is all of them."""
    allowed = torch.tensor(list(keys)) <= torch.tensor(list(queries))[:, None]
    return None if bool(allowed.all()) else allowed


def _with_dropout(call: Call, scores: Region, allowed: Tensor | None) -> Kernel:
    named = call.arguments()
    scale = named["scale"] or 1 / math.sqrt(call.inputs[0].shape[-1])

    def run(tensors: list[Tensor], draw: Draw) -> Tensor:
        query, key, value, *mask = tensors
        logits = query @ key.transpose(-2, -1) * scale
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -math.inf)
        for each in mask:
            logits = logits.masked_fill(~each, -math.inf) if each.dtype == torch.bool else logits + each
        weights = dropped(logits.softmax(-1), scores, named["dropout_p"], draw, call)
        return weights @ value

    return run


def rules() -> dict[str, Rule]:
    """The rules of this file, by the op's name."""
    return {"scaled_dot_product_attention": Attention()}
