"""Replacing what private training must refuse."""

from __future__ import annotations

import math

from torch import nn


def fix(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm by a GroupNorm of up to 32 groups, in place; return the model (or its replacement).

    The affine weights are kept; running statistics are dropped. Build the optimizer afterwards: the affine
    parameters are the same objects, but a model that *is* a BatchNorm comes back as another one.
    """
    if isinstance(model, nn.modules.batchnorm._BatchNorm) and not isinstance(
        model, nn.modules.instancenorm._InstanceNorm
    ):
        norm = nn.GroupNorm(math.gcd(32, model.num_features), model.num_features, eps=model.eps, affine=model.affine)
        if model.affine:
            norm.weight, norm.bias = model.weight, model.bias
        return norm.train(model.training)
    for name, child in model.named_children():
        setattr(model, name, fix(child))
    return model
