"""Small networks, at least one for every layer rule, each with a way to make a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


class Pooled(nn.Module):
    """A body, then the mean over everything but batch and features, then a linear head of three classes."""

    def __init__(self, body: nn.Module, features: int, axis: int = -1, pick: int | None = None) -> None:
        super().__init__()
        self.body, self.head, self.axis, self.pick = body, nn.Linear(features, 3), axis, pick

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = y if self.pick is None else y[self.pick]
        y = y.movedim(self.axis, -1).reshape(len(x), -1, y.shape[self.axis]).square().mean(1)
        return self.head(torch.tanh(y))


class SelfAttention(nn.Module):
    def __init__(self, batch_first: bool, mask: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.register_buffer(
            "mask", torch.triu(torch.ones(5, 5, dtype=torch.bool), 1) if mask else None, persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 8]
        y = x if self.attention.batch_first else x.transpose(0, 1)
        y = self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        return y if self.attention.batch_first else y.transpose(0, 1)


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=3, vdim=3)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x, x[..., :3], x[..., 3:6], key_padding_mask=x[..., 0] > 1.5)
        return out * weights.square().mean((1, 2))[:, None, None]


class Recurrent(nn.Module):
    """Uses every output of a recurrent layer; time first when `batch_first` is off."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 4]
        out, state = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        out = out if self.layer.batch_first else out.transpose(0, 1)
        hidden = state[1] if isinstance(state, tuple) else state
        return out + hidden.mean((0, 2))[:, None, None]


class Transformer(nn.Module):
    """A block written out by hand from layers that Opacus knows too."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 16), nn.Linear(16, width)
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        x = x + self.shrink(F.gelu(self.grow(x)))
        return self.head(x.mean(1))


class Twice(nn.Module):
    """One layer used twice, and an in-place activation on its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.layer(x))
        return self.head(torch.tanh_(self.layer(x)).mean(1))


class Tied(nn.Module):
    """An embedding whose table is also the weight of the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.tokens(ids)).mean(1))[:, :3]


class BarePosition(nn.Module):
    """A position table that is a bare parameter of the model: no rule, so vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.position, self.head = nn.Embedding(11, 6), nn.Parameter(torch.randn(5, 6)), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(ids) + self.position).mean(1))


def normal(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def ids(length: int, vocabulary: int = 11) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(0, vocabulary, (batch, length))


def convolution(layer: Callable[[], nn.Module], channels: int, *space: int, act: bool = False) -> Case:
    def body() -> nn.Module:
        return Pooled(nn.Sequential(layer(), nn.ReLU(inplace=True)) if act else layer(), channels, axis=1)

    return Case(body, normal(*space))


CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), normal(5)),
    "linear without bias": Case(
        lambda: nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(inplace=True), nn.Linear(4, 3)), normal(5)
    ),
    "linear on a sequence": Case(lambda: Pooled(nn.Linear(5, 4), 4), normal(7, 5)),
    "linear on a grid": Case(lambda: Pooled(nn.Linear(5, 4), 4), normal(2, 3, 5)),
    "conv1d": convolution(lambda: nn.Conv1d(3, 4, 3, padding=1), 4, 3, 8),
    "conv1d stride dilation": convolution(
        lambda: nn.Conv1d(4, 6, 2, stride=2, dilation=2, groups=2, padding=1), 6, 4, 9
    ),
    "conv2d": convolution(lambda: nn.Conv2d(2, 4, 3, padding=1), 4, 2, 6, 5, act=True),
    "conv2d all options": convolution(
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2), groups=2, bias=False),
        6,
        4,
        7,
        6,
    ),
    "conv2d depthwise": convolution(lambda: nn.Conv2d(4, 4, 3, groups=4, padding="same", dilation=2), 4, 4, 6, 6),
    "conv2d same even kernel": convolution(lambda: nn.Conv2d(2, 3, 4, padding="same"), 3, 2, 6, 6),
    "conv2d circular": convolution(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), 3, 2, 5, 5),
    "conv2d reflect": convolution(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect", stride=2), 3, 2, 5, 6),
    "conv3d": convolution(lambda: nn.Conv3d(2, 4, 2, stride=2, padding=1, groups=2), 4, 2, 4, 3, 5),
    "embedding": Case(lambda: Pooled(nn.Embedding(11, 4), 4), ids(6)),
    "embedding padded": Case(lambda: Pooled(nn.Embedding(11, 4, padding_idx=1), 4), ids(6)),
    "layer norm": Case(lambda: Pooled(nn.LayerNorm(5), 5), normal(4, 5)),
    "layer norm flat": Case(lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)), normal(5)),
    "layer norm on two axes": Case(lambda: Pooled(nn.LayerNorm((4, 5), bias=False), 5), normal(4, 5)),
    "group norm": Case(lambda: Pooled(nn.GroupNorm(2, 4), 4, axis=1), normal(4, 3, 3)),
    "rms norm": Case(lambda: Pooled(nn.RMSNorm(5), 5), normal(4, 5)),
    # Flattened at once: torch 2.13's own gradient of instance norm is wrong on a CPU for a single example whose output
    # gradient lies channels-last in memory.
    "instance norm": Case(
        lambda: nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(36, 3)), normal(4, 3, 3)
    ),
    "instance norm 1d": Case(
        lambda: nn.Sequential(nn.InstanceNorm1d(4, affine=True), nn.Flatten(), nn.Linear(24, 3)), normal(4, 6)
    ),
    "attention": Case(lambda: Pooled(SelfAttention(True, mask=True), 8), normal(5, 8)),
    "attention time first": Case(lambda: Pooled(SelfAttention(False), 8), normal(4, 8)),
    "attention of three inputs": Case(lambda: Pooled(CrossAttention(), 8), normal(5, 8)),
    "rnn": Case(lambda: Pooled(Recurrent(nn.RNN(4, 3, batch_first=True)), 3), normal(5, 4)),
    "gru": Case(lambda: Pooled(Recurrent(nn.GRU(4, 3, 2, bidirectional=True)), 6), normal(5, 4)),
    "lstm": Case(lambda: Pooled(Recurrent(nn.LSTM(4, 3, 2, batch_first=True, proj_size=2)), 2), normal(5, 4)),
    "transformer": Case(Transformer, ids(5)),
    "used twice, in place": Case(Twice, normal(4, 6)),
    "tied": Case(Tied, ids(5)),
}


def make(name: str, seed: int, batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    case = CASES[name]
    return case.model(), (case.inputs(batch), torch.randint(0, 3, (batch,)))


class LateMean(nn.Module):
    """Behaves until it is armed; then keeps a statistic of its data, by a way that leaves no new version or by one that does."""

    def __init__(self, layer: nn.Module, written: str) -> None:
        super().__init__()
        self.layer, self.armed, self.written = layer, False, written
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.armed and self.written == "data":
            self.mean.data = x.detach().mean(0)
        elif self.armed:
            self.mean.copy_(x.detach().mean(0))
        return self.layer(x)
