"""Which models this process has trained, by `fit` or by an integration: their weights carry what that cost.

A run without privacy is among them: its cost is the greatest of all.
"""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

TRAINED: WeakSet[nn.Module] = WeakSet()


def was_trained(model: nn.Module) -> bool:
    """The model, or a part of it."""
    return any(part in TRAINED for part in model.modules())
