"""Words against a plain loop over output indices and taps."""

import random

from squall.partition.indices import Indices
from squall.partition.regions import Region
from squall.partition.words import Adaptive, Groups, Modulo, Spread, Window
from tests.partition.test_regions import some_indices


def region(axis: Indices, size: int) -> Region:
    return Region((size,), (axis,))


def test_a_window_reads_what_a_loop_over_its_taps_reads() -> None:
    rng = random.Random(1)
    for _ in range(500):
        size, outs, kernel, stride = (rng.randint(1, most) for most in (12, 9, 4, 4))
        padding, dilation = rng.randint(-3, 4), rng.randint(1, 3)
        axis = some_indices(rng, outs)
        word = Window(0, kernel, stride, padding, dilation)
        looped = {o * stride - padding + tap * dilation for o in axis for tap in range(kernel)}
        assert set(word.reads(region(axis, outs), size)) == {at for at in looped if 0 <= at < size}
        if axis.size and axis.is_span:
            span = word.frame(region(axis, outs), size)
            covered = range(span.indices.start - span.before, span.indices.stop + span.after)
            assert span.indices.covers(word.reads(region(axis, outs), size))
            assert span.before + span.indices.size + span.after == max(looped) - min(looped) + 1
            assert span.indices.size == 0 or (covered.start, covered.stop) == (min(looped), max(looped) + 1)


def test_a_spread_window_reads_every_input_that_reaches_the_output() -> None:
    rng = random.Random(2)
    for _ in range(500):
        size, outs, kernel, stride = (rng.randint(1, most) for most in (8, 12, 4, 4))
        padding, dilation = rng.randint(0, 3), rng.randint(1, 3)
        axis = some_indices(rng, outs)
        looped = {
            i
            for i in range(size)
            for tap in range(kernel)
            if i * stride - padding + tap * dilation in set(axis)
        }
        assert set(Spread(0, kernel, stride, padding, dilation).reads(region(axis, outs), size)) == looped


def test_adaptive_windows_cover_the_input_as_torch_documents() -> None:
    for size in range(1, 9):
        for outs in range(1, 9):
            word = Adaptive(0, outs)
            for at in range(outs):
                first, last = int(at * size / outs), -int(-(at + 1) * size // outs)
                assert word.window(at, size) == (first, last)
            assert Adaptive(0, outs).reads(region(Indices.span(0, outs), outs), size) == Indices.span(0, size)


def test_groups_and_places_in_a_group_are_read_one_by_one() -> None:
    rng = random.Random(3)
    for _ in range(200):
        groups, per_out, per_in = (rng.randint(1, 4) for _ in range(3))
        outs = groups * per_out
        axis = some_indices(rng, outs)
        mine = region(axis, outs)
        ins = {o // per_out * per_in + at for o in axis for at in range(per_in)}
        assert set(Groups(0, per_out, per_in).reads(mine, groups * per_in)) == ins
        assert set(Modulo(0, per_out).reads(mine, per_out)) == {o % per_out for o in axis}
