"""The networks that are measured, and what they are fed; both sides of a comparison make theirs here."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from squall.recipes import digits, speech

SMALL_EXAMPLES = 4096


@dataclass(frozen=True, kw_only=True)
class Net:
    """A network of one of the recipes.

    Attributes:
        recipe: "speech" or "digits".
        sizes: of the speech network: inputs, hidden, layers and classes.
        examples: how many are generated to learn from.
    """

    recipe: str
    examples: int
    sizes: dict[str, int]

    def build(self) -> nn.Module:
        """The network, with torch's own start values from seed 0."""
        torch.manual_seed(0)
        return digits.network() if self.recipe == "digits" else speech.network(**self.sizes)

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        if self.recipe == "speech":
            inputs, classes = self.sizes["inputs"], self.sizes["classes"]
            return speech.frames(self.examples, inputs=inputs, classes=classes, seed=0)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.examples, 784, generator=generator)
        return x, torch.randint(0, 10, (self.examples,), generator=generator)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


PAPER = {
    "inputs": speech.INPUTS,
    "hidden": speech.HIDDEN,
    "layers": speech.LAYERS,
    "classes": speech.CLASSES,
}
QUICK = {"inputs": 20, "hidden": 32, "layers": 2, "classes": 16}


def speech_net(*, quick: bool) -> Net:
    """The paper's network, or one that takes no time."""
    return Net(recipe="speech", examples=1024 if quick else 4096, sizes=QUICK if quick else PAPER)


def small_net() -> Net:
    """784-256-10, on random pixels."""
    return Net(recipe="digits", examples=SMALL_EXAMPLES, sizes={})
