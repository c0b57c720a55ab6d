"""What a model is fed: sources, readers, and an order that anyone can recompute.

Importing this package does not import torch; the first minibatch does.
"""

from squall.data.digits import digits
from squall.data.minibatches import Minibatches
from squall.data.order import order, seed_for
from squall.data.read import read
from squall.data.source import DatasetSource, Loading, Source, TensorSource, as_source

__all__ = [
    "DatasetSource",
    "Loading",
    "Minibatches",
    "Source",
    "TensorSource",
    "as_source",
    "digits",
    "order",
    "read",
    "seed_for",
]
