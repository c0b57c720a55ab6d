"""What a shard that was killed comes back with, as a user asks for it."""

from dataclasses import dataclass
from math import isfinite
from typing import Literal, TypeAlias

from squall.errors import ConfigError
from squall.keywords import named


@named
@dataclass(frozen=True)
class Interval:
    """Shards write their state down every so often; what is killed loses at most what came after.

    Args:
        seconds: between two snapshots of a shard, above 0. Writing one takes a while, which comes on top.

    Raises:
        ConfigError: it is no such number.

    >>> Interval(60)
    Interval(seconds=60)
    """

    seconds: float

    def __post_init__(self) -> None:
        value = self.seconds
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not isfinite(value) or value <= 0:
            raise ConfigError(
                subject="Interval(seconds=)", expected="a number above 0, of seconds", got=repr(value)
            )


Durability: TypeAlias = Literal["none", "ack"] | Interval


def check_durability(value: object) -> None:
    """Refuse what is no durability."""
    if value not in ("none", "ack") and not isinstance(value, Interval):
        raise ConfigError(
            subject="Job(durability=)",
            expected='"none", "ack" or squall.Interval(seconds)',
            got=repr(value),
        )


def mode_of(durability: Durability) -> float | str | None:
    """As shards are told: seconds, "ack", or None.

    >>> mode_of(Interval(2.5)), mode_of("ack"), mode_of("none")
    (2.5, 'ack', None)
    """
    if isinstance(durability, Interval):
        return float(durability.seconds)
    return None if durability == "none" else durability
