"""Small models of many kinds, each with an example call: what capture and cutting must get right."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  as everybody calls it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Example:
    """A model and how it is called.

    Attributes:
        make: returns the model.
        call: for a number of examples, the arguments of a call.
        smallest: the least number of examples that the model itself takes in training.
        is_slow: left to the nightly run.
    """

    make: Callable[[], nn.Module]
    call: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    smallest: int = 1
    is_slow: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return self.make()

    def inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(100 + batch)
        return self.call(batch)


def images(channels: int, size: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda batch: ((torch.randn(batch, channels, size, size),), {})


def vectors(*sizes: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda batch: (tuple(torch.randn(batch, size) for size in sizes), {})


def words(length: int, vocabulary: int = 20) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda batch: ((torch.randint(0, vocabulary, (batch, length)),), {})


class Call(nn.Module):
    """A function as a module, as people put into nn.Sequential."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(inplace=True), nn.Linear(16, 5), nn.LogSoftmax(dim=-1))


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 5, padding=2), nn.Conv2d(4, 6, 5)
        self.fc1, self.fc2 = nn.Linear(6 * 5 * 5, 20), nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.tanh(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        return self.fc2(F.relu(self.fc1(x)))


def alexnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=2),
        nn.ReLU(inplace=True),
        nn.LocalResponseNorm(5, alpha=1e-2, k=2.0),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(32, 5),
    )


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.down is None else self.down(x)
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += skip
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True))
        self.body = nn.Sequential(Block(4, 4, 1), Block(4, 8, 2))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.body(self.stem(x))), 1))


class LocallyConnected(nn.Module):
    """Every place of the picture has a filter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(36, 4, 2 * 9) / 5)
        self.bias = nn.Parameter(torch.zeros(4, 36))
        self.out = nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 3)
        y = torch.einsum("bkl,lok->bol", patches, self.weight) + self.bias
        return self.out(torch.relu(y).reshape(x.shape[0], -1))


class DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
        )
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.mlp[2].p if self.training else 0.0
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, blocks: int = 1, width: int = 16, vocabulary: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(8, width) / 10)
        self.blocks = nn.Sequential(*(DecoderBlock(width, 2) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Encoder(nn.Module):
    """torch's own transformer layers, with a mask of padding given by keyword."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(20, 16)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 1, 16))
        self.out = nn.Linear(16, 3)

    def forward(self, tokens: Tensor, *, padding: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers(self.embedding(tokens), src_key_padding_mask=padding)
        query = self.query.expand(x.shape[0], -1, -1)
        pooled, weights = self.attention(query, x, x, key_padding_mask=padding)
        return self.out(pooled.squeeze(1)), weights


def tokens_and_padding(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    lengths = torch.randint(2, 6, (batch, 1))
    return (torch.randint(0, 20, (batch, 6)),), {"padding": torch.arange(6)[None] >= lengths}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.gru = nn.GRU(12, 5)
        self.out = nn.Linear(5, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        y, (_, cell) = self.lstm(self.embedding(tokens))
        y, _ = self.gru(y.transpose(0, 1))
        return self.out(torch.relu(y)).transpose(0, 1), cell.sum(0)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.norm, self.out = nn.GroupNorm(2, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.leaky_relu(self.down1(x), 0.1)
        low = F.elu(self.down2(F.avg_pool2d(high, 2)))
        up = F.interpolate(self.up(low), size=high.shape[-2:], mode="bilinear", align_corners=False)
        return self.out(self.norm(torch.cat([high, up], dim=1)))


class Siamese(nn.Module):
    """One network on two inputs of a dict; a dict with nested results; a temperature and centred features."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, pair: dict[str, Tensor], scale: float = 1.0) -> dict[str, Any]:
        left, right = (F.normalize(self.net(pair[side]), dim=-1) for side in ("left", "right"))
        similar = left @ right.t() * self.temperature * scale  # every example against every other
        return {
            "similar": similar,
            "parts": [left, (right, None)],
            "mean": similar.sum() / left.shape[0] ** 2,
        }


def pair(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ({"left": torch.randn(batch, 6), "right": torch.randn(batch, 6)},), {"scale": 0.5}


@dataclass
class Prediction:
    logits: Tensor
    hidden: list[Tensor]
    name: str = "prediction"


class WithDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: Tensor) -> Prediction:
        hidden = []
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
            hidden.append(x)
        return Prediction(logits=x * 2, hidden=hidden)


class Functional(nn.Module):
    """Ops without modules, on bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterDict({"a": torch.randn(6, 4, 2), "b": torch.randn(2)})

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.einsum("bi,ijk->bjk", x, self.w["a"])
        z = F.softplus(z) * torch.exp(-self.w["b"]) + y.unsqueeze(-1) ** 2
        top, _ = z.topk(2, dim=1)
        low, high = z.chunk(2, dim=1)
        z = torch.stack([low, high.flip(1)]).movedim(0, 1).clamp(min=0.1).log()
        return z.sum(dim=(1, 2)), top.amax(-1)


class Masked(nn.Module):
    """A mixture of two experts, and memory written through views."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("queue", torch.zeros(3, 6))
        self.register_buffer("calls", torch.tensor(0))
        self.scale = torch.tensor(0.5)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        mixed = torch.where(x.mean(-1, keepdim=True) > 0, gates[:, :1] * self.a(x), gates[:, 1:] * self.b(x))
        out = torch.zeros_like(mixed)
        out[:, :3] = mixed[:, 3:]
        out[:, 3:] += mixed[:, :3] * self.scale
        out[out < -1] = -1.0
        out.t()[2] *= 3
        with torch.no_grad():
            self.queue[1] = out.mean(0)
            self.calls += 1
        return out.masked_fill(x > 2, 0.0) + self.queue.mean() + torch.tensor(1.5)


class Averaged(nn.Module):
    """A buffer that forward sets anew, and one that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("largest", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        torch.maximum(self.largest, y.detach().amax(0), out=self.largest)
        return (y - self.mean) / (1 + self.largest)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.spectral(torch.relu(self.weight_normed(x)))


def lambdas() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        Call(lambda x: x * torch.sigmoid(x)),
        Call(lambda x: x.view(x.shape[0] * 2, -1)),
        nn.Linear(4, 3),
        Call(lambda x: x.unflatten(0, (-1, 2)).mean(1)),
    )


class Frozen(nn.Module):
    """A trained head on frozen features, of which a part is not even differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.features.requires_grad_(False)
        self.teacher, self.head, self.unused = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        with torch.no_grad():
            target = self.teacher(h).softmax(-1)
        return self.head(h) * target + self.teacher(h).detach()


class Shared(nn.Module):
    """One module called twice, parameters under two names, and a layer that only the gradient of one reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.again = self.layer
        self.other = nn.Linear(6, 6)
        self.other.bias = self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.relu(self.again(torch.relu(self.layer(x)))) + x)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.sigmoid(x) * 3  # not the derivative: a trace would be seen to differ


class OwnBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Swish.apply(x)  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Its result depends on how often it was called, which torch.export would fix."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * (1.0 + 1.0 / self.count)


def with_own_backward() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), OwnBackward(), nn.Linear(6, 2))


def counting() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Counting(), nn.Linear(6, 2))


class HigherOrder(nn.Module):
    """Checkpointed and hooked parts."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.ReLU())
        self.first = nn.Linear(6, 6)
        self.hooked = nn.Linear(6, 6)
        self.hooked.register_forward_hook(lambda module, args, result: result * 2)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, self.first(x), use_reentrant=False)
        return self.hooked(y)


def compiled() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself, when its compiler is first imported
        return nn.Sequential(nn.Linear(6, 6), torch.compile(nn.Linear(6, 6)), nn.ReLU())


class Noisy(nn.Module):
    """Several draws in a row; one of them is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5, inplace=True)
        self.channels, self.alpha = nn.Dropout1d(0.4), nn.AlphaDropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        y = self.linear(x + 0.1 * torch.randn_like(x))
        y = self.dropout(y) * torch.bernoulli(torch.full((x.shape[0], 1), 0.8))
        y = self.channels(y.unsqueeze(1)).squeeze(1)
        return self.alpha(y) + torch.empty(x.shape[0], 1).uniform_(0, 0.1)


class Cells(nn.Module):
    """An unrolled loop over time, of fixed length."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 4)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return self.out(h)


class SecondDimension(nn.Module):
    """The examples lie in the second dimension, as torch's recurrent layers like it; the first input has none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        t, b, d = x.shape
        y = self.linear(x.reshape(t * b, d)).view(t, b, d)
        return torch.einsum("st,tbd->bsd", mask, y).flatten(0, 1)


def second_dimension(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.tril(torch.ones(3, 3)), torch.randn(3, batch, 4)), {}


EXAMPLES: dict[str, Example] = {
    "mlp": Example(mlp, vectors(12)),
    "lenet": Example(LeNet, images(1, 28)),
    "alexnet": Example(alexnet, images(3, 19)),
    "resnet": Example(ResNet, images(3, 8), smallest=2),
    "locally_connected": Example(LocallyConnected, images(2, 8)),
    "decoder": Example(Decoder, words(8)),
    "encoder": Example(Encoder, tokens_and_padding),
    "tagger": Example(Tagger, words(5)),
    "unet": Example(UNet, images(1, 8)),
    "siamese": Example(Siamese, pair),
    "dataclass": Example(WithDataclass, vectors(6)),
    "functional": Example(Functional, vectors(6, 4)),
    "masked": Example(Masked, vectors(6)),
    "averaged": Example(Averaged, vectors(6)),
    "normalised": Example(Normalised, vectors(6)),
    "lambdas": Example(lambdas, vectors(6)),
    "frozen": Example(Frozen, vectors(6), smallest=2),
    "shared": Example(Shared, vectors(6)),
    "own_backward": Example(with_own_backward, vectors(6)),
    "counting": Example(counting, vectors(6)),
    "higher_order": Example(HigherOrder, vectors(6)),
    "compiled": Example(compiled, vectors(6), is_slow=True),
    "noisy": Example(Noisy, vectors(6)),
    "cells": Example(Cells, lambda batch: ((torch.randn(batch, 3, 3),), {})),
}
