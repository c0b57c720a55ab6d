"""The locally connected layer: windows over space like a convolution's, and filters that are cut with the places."""

from squall.model import layers
from squall.partition.call import Call
from squall.partition.rules.base import Rule, Words
from squall.partition.words import All, Same, Window

NAME = layers.LOCALLY_CONNECTED


class LocallyConnected(Rule):
    """``squall::locally_connected2d``. No filter is shared, so a partition needs those of its own places only."""

    def words(self, call: Call) -> tuple[Words, ...]:
        named = call.arguments()
        (high, wide), (down, right) = named["kernel"], named["stride"]
        value = (Same(0), All(), Window(2, high, down), Window(3, wide, right))
        return (value, (Same(2), Same(3), Same(1), All()), (Same(2), Same(3), Same(1)))[: len(call.inputs)]


def rules() -> dict[str, Rule]:
    """The rules of this file, by the op's name."""
    return {NAME: LocallyConnected()}
