"""What partitions send one another, from regions alone: the producer's region, cut with the consumer's need."""

from collections.abc import Mapping, Sequence

from squall.partition.regions import AnyRegion, uncovered

Transfers = dict[tuple[int, int], tuple[AnyRegion, ...]]


def united(regions: Sequence[AnyRegion]) -> tuple[AnyRegion, ...]:
    """The union of regions of one value, as disjoint ones: what several ops of a partition need of it, once.

    >>> from squall.partition.regions import Region
    >>> united([Region.of((9,), (0, 4)), Region.of((9,), (2, 6))])
    (Region[0:4] of (9,), Region[4:6] of (9,))
    """
    found: list[AnyRegion] = []
    for region in regions:
        found += uncovered(region, found)
    return tuple(found)


def transfers(owners: Sequence[AnyRegion], wanted: Sequence[Sequence[AnyRegion]]) -> Transfers:
    """Which regions of one value travel from whom to whom, in one forward pass.

    Each element is sent once to each partition that needs it, however many of its ops do. Backward, gradients of the
    same regions travel the other way, summed before they are sent.

    Args:
        owners: what each partition computes of the value: disjoint regions.
        wanted: for each partition, what its ops need of it.

    Returns:
        (sender, receiver) -> disjoint regions, none of them empty.

    >>> from squall.partition.regions import Region
    >>> halves = [Region.of((8,), (0, 4)), Region.of((8,), (4, 8))]
    >>> transfers(halves, [[Region.of((8,), (0, 5))], [Region.of((8,), (3, 8))]])
    {(1, 0): (Region[4:5] of (8,),), (0, 1): (Region[3:4] of (8,),)}
    """
    found: Transfers = {}
    for receiver, needs in enumerate(wanted):
        for sender, owned in enumerate(owners):
            parts = tuple(part for need in united(needs) if not (part := need & owned).is_empty)
            if parts and sender != receiver:
                found[sender, receiver] = parts
    return found


def count(sent: Mapping[tuple[int, int], Sequence[AnyRegion]]) -> int:
    """How many elements travel in all."""
    return sum(part.size for parts in sent.values() for part in parts)
