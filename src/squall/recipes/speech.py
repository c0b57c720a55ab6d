"""The acoustic network of the paper, 41.8 million parameters, on generated frames of sound: the recipe for measuring speed.

A frame is `inputs` numbers (the paper: 11 frames of 40 log energies), a label one of `classes` states of sounds. Nobody
may hand the paper's recordings out, so a random network, the teacher, says what each random frame is. What can be
learned from it is the teacher; speed does not depend on it.

Source: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 5: four hidden layers of 2,560 sigmoid
units and a softmax over 8,192 states.
"""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

import squall

INPUTS, HIDDEN, LAYERS, CLASSES = 440, 2560, 4, 8192
BATCH_SIZE = 128
TEACHER_UNITS = 32
TEACHER_SHARPNESS = 3.0
CHUNK = 1024
"""Frames that the teacher labels at a time: its scores of all of them would be gigabytes."""


def speech(
    *,
    inputs: int = INPUTS,
    hidden: int = HIDDEN,
    layers: int = LAYERS,
    classes: int = CLASSES,
    train_frames: int = 12_800,
    test_frames: int = 1_280,
    learning_rate: float = 0.001,
    seed: int = 0,
) -> squall.Job:
    """Downpour SGD with Adagrad on two shards. A step takes about half a second on one core.

    Args:
        inputs, hidden, layers, classes: sizes of the network, see `network`.
        train_frames, test_frames: how many frames are generated.
        learning_rate: of Adagrad, whose first steps are that long in every weight; more than a thousandth throws
            2,560 inputs of a unit far off.
        seed: of frames and teacher.
    """
    x, y = frames(train_frames + test_frames, inputs=inputs, classes=classes, seed=seed)
    return squall.Job(
        partial(network, inputs=inputs, hidden=hidden, layers=layers, classes=classes),
        (x[:train_frames], y[:train_frames]),
        test=(x[train_frames:], y[train_frames:]),
        strategy=squall.Downpour(rule=squall.Adagrad(learning_rate=learning_rate)),
        replicas=2,
        shards=2,
        batch_size=BATCH_SIZE,
        epochs=3,
        threads=1,
    )


def small() -> squall.Job:
    """The same at a size that trains in seconds: 40 inputs, two layers of 128, 16 classes."""
    return speech(
        inputs=40, hidden=128, layers=2, classes=16, train_frames=6_400, test_frames=640, learning_rate=0.03
    )


def network(
    *, inputs: int = INPUTS, hidden: int = HIDDEN, layers: int = LAYERS, classes: int = CLASSES
) -> nn.Sequential:
    """`layers` layers of `hidden` sigmoid units, and a linear one that scores the classes.

    >>> with torch.device("meta"):
    ...     sum(parameter.numel() for parameter in network().parameters())
    41777152
    """
    widths = [inputs, *[hidden] * layers]
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), nn.Sigmoid()]
    return nn.Sequential(*parts, nn.Linear(widths[-1], classes))


def frames(count: int, *, inputs: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random frames, and what a random network of one hidden layer says that they are.

    Returns:
        frames, shape (count, inputs), normal; and labels, shape (count,), int64. The same for the same arguments.

    >>> x, y = frames(8, inputs=440, classes=8192, seed=0)
    >>> x.shape, y.shape
    (torch.Size([8, 440]), torch.Size([8]))
    """
    teacher = torch.Generator().manual_seed(seed)
    into = torch.randn(inputs, TEACHER_UNITS, generator=teacher) * TEACHER_SHARPNESS / inputs**0.5
    out_of = torch.randn(TEACHER_UNITS, classes, generator=teacher)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(count, inputs, generator=generator)
    y = torch.cat([((part @ into).tanh() @ out_of).argmax(dim=1) for part in torch.split(x, CHUNK)])
    return x, y
