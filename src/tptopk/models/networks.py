"""Networks that private training is measured on: an MLP, CNNs, a wide ResNet, a vision transformer, a text classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp() -> nn.Module:
    """[B, 3, 32, 32] → 10; 1.7M parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def cnn() -> nn.Module:
    """The end-to-end CNN of the literature, 32-32-M-64-64-M-128-128-M with tanh; [B, 3, 32, 32] → 10; 550K parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.Tanh(),
        ]
        layers.append(nn.MaxPool2d(2))
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 10))


def scatter_cnn() -> nn.Module:
    """The CNN on scattering features of CIFAR-10; [B, 243, 8, 8] → 10; 187,210 parameters."""
    return nn.Sequential(
        nn.Conv2d(243, 64, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


def scatter_cnn_small(classes: int = 10) -> nn.Module:
    """The CNN on scattering features of 28 × 28 images; [B, 81, 7, 7] → classes; 33,066 parameters for ten."""
    return nn.Sequential(
        nn.Conv2d(81, 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def scatter_linear(features: int = 81 * 49, classes: int = 10) -> nn.Module:
    """One linear layer on scattering features."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


def table_linear(features: int, classes: int) -> nn.Module:
    """[B, features] → classes: logistic regression that starts at zero, as `TPTopKClassifier` builds it for tables."""
    last = nn.Linear(features, classes)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(last)


def table_mlp(features: int, classes: int, width: int = 64) -> nn.Module:
    """[B, features] → classes, for tables whose columns are scaled to [−1, 1]."""
    return nn.Sequential(
        nn.Linear(features, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes)
    )


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose kernels are brought to mean 0 and variance 1 / fan-in before they are used."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True, correction=0)
        scale = (variance * self.weight[0].numel() + 1e-4).rsqrt()
        result: Tensor = self._conv_forward(x, (self.weight - mean) * scale, self.bias)
        return result


class _Block(nn.Module):
    """A pre-activation residual block with GroupNorm."""

    def __init__(self, before: int, after: int, stride: int, conv: type[nn.Conv2d]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, before), nn.GroupNorm(16, after)
        self.conv1 = conv(before, after, 3, stride, 1, bias=False)
        self.conv2 = conv(after, after, 3, 1, 1, bias=False)
        self.skip = conv(before, after, 1, stride, bias=False) if before != after or stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        skip = x if self.skip is None else self.skip(h)
        return skip + self.conv2(F.relu(self.norm2(self.conv1(h))))  # type: ignore[no-any-return]


def wrn_16_4(standardized: bool = False) -> nn.Module:
    """Wide ResNet of depth 16 and width 4 with GroupNorm(16); [B, 3, 32, 32] → 10; 2.7M parameters.

    `standardized`: with weight standardisation, as its best published private results have it.
    """
    conv = StandardizedConv2d if standardized else nn.Conv2d
    blocks: list[nn.Module] = []
    channels = 16
    for width, stride in ((64, 1), (128, 2), (256, 2)):
        blocks += [_Block(channels, width, stride, conv), _Block(width, width, 1, conv)]
        channels = width
    return nn.Sequential(
        conv(3, 16, 3, padding=1, bias=False),
        *blocks,
        nn.GroupNorm(16, 256),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        q, k, v = self.mix(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, T, D/H]
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Pre-norm transformer on 4 × 4 patches; [B, 3, 32, 32] → 10; 64 tokens."""

    def __init__(self, depth: int = 8, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(3, width, 4, 4), nn.Embedding(64, width)
        self.attention = nn.ModuleList(_Attention(width, heads) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.grow = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.shrink = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # [B, 64, D]
        x = x + self.positions(torch.arange(64, device=x.device).expand(len(x), 64))
        for i, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * i](x))
            x = x + self.shrink[i](F.gelu(self.grow[i](self.norms[2 * i + 1](x))))
        return self.head(self.norms[-1](x.mean(1)))  # type: ignore[no-any-return]


def vit() -> nn.Module:
    """Eight layers of width 384; 14.3M parameters."""
    return VisionTransformer()


class BagOfWords(nn.Module):
    """A table of 50,000 words, their mean, and a small classifier; [B, 128] ids → 10."""

    def __init__(self, words: int = 50_000, width: int = 64) -> None:
        super().__init__()
        self.words, self.hidden, self.head = nn.Embedding(words, width), nn.Linear(width, 64), nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.words(ids).mean(1))))  # type: ignore[no-any-return]


def text() -> nn.Module:
    return BagOfWords()
