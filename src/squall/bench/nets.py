"""The networks that are measured, and what they are fed; both sides of a comparison make theirs here."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from squall.model.layers import L2Pool2d, LocalContrastNorm2d, LocallyConnected2d
from squall.recipes import digits, speech

SMALL_EXAMPLES = 4096


@dataclass(frozen=True, kw_only=True)
class Net:
    """A network of one of the recipes.

    Attributes:
        recipe: "speech", "digits", or a name of `MADE_HERE`, which no recipe has.
        sizes: of the speech network: inputs, hidden, layers and classes; of those made here: side, maps and, of one, kernel.
        examples: how many are generated to learn from.
    """

    recipe: str
    examples: int
    sizes: dict[str, int]

    def build(self) -> nn.Module:
        """The network, with torch's own start values from seed 0."""
        torch.manual_seed(0)
        if self.recipe in MADE_HERE:
            return MADE_HERE[self.recipe](**self.sizes)
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


def convolutional(*, side: int, maps: int, kernel: int) -> nn.Sequential:
    """Two convolutions, pooling, two convolutions, pooling, two linear layers, with rectifiers, for images of three colours."""
    layers: list[nn.Module] = []
    before = 3
    for ends_in_pool in (False, True, False, True):
        layers += [nn.Conv2d(before, maps, kernel, padding=kernel // 2), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if ends_in_pool else []
        before = maps
    wide = maps * (side // 4) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(wide, 256), nn.ReLU(), nn.Linear(256, 10))


DEEP_IMAGES = {"side": 32, "maps": 64}
QUICK_DEEP_IMAGES = {"side": 8, "maps": 4}


def deep_images_net(*, quick: bool) -> Net:
    """Seven convolutions and two linear layers: 190 million multiplications, 381 MFLOP, an example; or one that takes no time.

    No layer has more than a fifth of the work, so that whole layers can be shared out evenly.
    """
    return Net(recipe="deep images", examples=512, sizes=QUICK_DEEP_IMAGES if quick else DEEP_IMAGES)


def deep(*, side: int, maps: int) -> nn.Sequential:
    """Convolutions three by three: two of so many maps, two of twice, three of four times as many, each row pooled."""
    layers: list[nn.Module] = []
    before = 3
    for wide, num_layers in ((maps, 2), (2 * maps, 2), (4 * maps, 3)):
        for _ in range(num_layers):
            layers += [nn.Conv2d(before, wide, 3, padding=1), nn.ReLU()]
            before = wide
        layers.append(nn.MaxPool2d(2))
    flat = before * (side // 8) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 256), nn.ReLU(), nn.Linear(256, 10))


UNSHARED_IMAGES = {"side": 64, "maps": 8}
QUICK_UNSHARED_IMAGES = {"side": 32, "maps": 2}


def unshared_images_net(*, quick: bool) -> Net:
    """The paper's vision net in small: two locally connected layers with L2 pooling and local contrast normalisation."""
    sizes = QUICK_UNSHARED_IMAGES if quick else UNSHARED_IMAGES
    return Net(recipe="unshared images", examples=512, sizes=sizes)


def unshared(*, side: int, maps: int) -> nn.Sequential:
    """Filters nine wide in steps of two, then twice as many five wide; each place has its own."""
    layers: list[nn.Module] = []
    before = 3
    for outs, kernel, stride in ((maps, 9, 2), (2 * maps, 5, 1)):
        layers.append(LocallyConnected2d(before, outs, size=(side, side), kernel=kernel, stride=stride))
        layers += [L2Pool2d(3, stride=1), LocalContrastNorm2d(5)]
        side, before = (side - kernel) // stride + 1 - 2, outs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * side**2, 10))


MADE_HERE: Mapping[str, Callable[..., nn.Sequential]] = {
    "images": convolutional,
    "deep images": deep,
    "unshared images": unshared,
}


def small_net() -> Net:
    """784-256-10, on random pixels."""
    return Net(recipe="digits", examples=SMALL_EXAMPLES, sizes={})
