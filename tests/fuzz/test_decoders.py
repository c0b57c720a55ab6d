"""Any bytes, from a peer that is broken or means harm, or on a disk: every decoder takes or refuses them, and nothing else happens.

Faults planted by hand, each seen to fail a test here: a struct.error that is not turned into a refusal · a header whose
length is below its own size · a transfer that is written before its header is compared · a proof that is not compared · a
plan's bytes that are no text · a manifest that is sealed, and has no layout · a rule that is no JSON.
"""

import random
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from squall.wire.connection import CODEC
from tests.fuzz.examples import MESSAGES, example
from tests.fuzz.files import FILES
from tests.fuzz.targets import TARGETS, WIRE_SEEDS, mutant

EVERYTHING: dict[str, tuple[Callable[[bytes], object], Sequence[bytes]]] = FILES | {
    name: (target, WIRE_SEEDS) for name, target in TARGETS.items()
}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_is_among_what_is_varied_and_comes_back_as_it_was(kind: Any) -> None:
    assert CODEC.encode(example(kind)) in WIRE_SEEDS
    assert CODEC.decode(CODEC.encode(example(kind))) == example(kind)


@pytest.mark.parametrize("name", EVERYTHING)
def test_no_bytes_do_harm(name: str) -> None:
    fuzz(name, seed=sum(name.encode()), number=150)


@pytest.mark.nightly
@pytest.mark.parametrize("name", EVERYTHING)
def test_no_bytes_do_harm_for_long(name: str) -> None:
    fuzz(name, seed=random.randrange(1 << 32), seconds=60.0)


def fuzz(name: str, *, seed: int, seconds: float = 0.0, number: int = 0) -> None:
    """For so long, and so many times at least."""
    lots, (target, seeds) = random.Random(seed), EVERYTHING[name]
    for data in seeds:
        target(data)
    until = time.monotonic() + seconds
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = 0
    while count < number or time.monotonic() < until:
        data = mutant(lots, seeds)
        try:
            target(data)
        except Exception as error:
            raise AssertionError(
                f"{name} took {data!r} (seed {seed}, number {count}) badly: {error!r}"
            ) from error
        count += 1
    assert count > 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, (
        "[kB] something was allocated"
    )
