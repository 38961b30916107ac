"""A small convolutional network for 8 × 8 digits."""

from __future__ import annotations

from torch import nn


def digits_cnn() -> nn.Module:
    """Two convolutions and a linear layer, 5,050 parameters; takes [B, 1, 8, 8], gives ten class scores."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),  # [B, 16, 4, 4]
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),  # [B, 256]
        nn.Linear(256, 10),
    )
