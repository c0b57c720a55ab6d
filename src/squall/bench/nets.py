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
        recipe: "speech", "digits", or "images", which no recipe has.
        sizes: of the speech network: inputs, hidden, layers and classes; of the convolutional one: side, maps, kernel.
        examples: how many are generated to learn from.
    """

    recipe: str
    examples: int
    sizes: dict[str, int]

    def build(self) -> nn.Module:
        """The network, with torch's own start values from seed 0."""
        torch.manual_seed(0)
        if self.recipe == "images":
            return convolutional(**self.sizes)
        return digits.network() if self.recipe == "digits" else speech.network(**self.sizes)

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        if self.recipe == "speech":
            inputs, classes = self.sizes["inputs"], self.sizes["classes"]
            return speech.frames(self.examples, inputs=inputs, classes=classes, seed=0)
        generator = torch.Generator().manual_seed(0)
        side = self.sizes.get("side")
        shape = (784,) if side is None else (3, side, side)
        x = torch.randn(self.examples, *shape, generator=generator)
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


IMAGES = {"side": 32, "maps": 64, "kernel": 5}
QUICK_IMAGES = {"side": 8, "maps": 4, "kernel": 3}


def images_net(*, quick: bool) -> Net:
    """Four convolutions and two linear layers: 163 million multiplications, 326 MFLOP, an example; or one that takes no time."""
    return Net(recipe="images", examples=512, sizes=QUICK_IMAGES if quick else IMAGES)


def convolutional(*, side: int, maps: int, kernel: int) -> nn.Module:
    """Two convolutions, pooling, two convolutions, pooling, two linear layers, with rectifiers, for images of three colours."""
    layers: list[nn.Module] = []
    before = 3
    for ends_in_pool in (False, True, False, True):
        layers += [nn.Conv2d(before, maps, kernel, padding=kernel // 2), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if ends_in_pool else []
        before = maps
    wide = maps * (side // 4) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(wide, 256), nn.ReLU(), nn.Linear(256, 10))


def small_net() -> Net:
    """784-256-10, on random pixels."""
    return Net(recipe="digits", examples=SMALL_EXAMPLES, sizes={})
