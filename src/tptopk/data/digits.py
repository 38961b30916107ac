"""scikit-learn's handwritten digits: 1,797 images of 8 × 8, embedded in the package, no download."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor

TRAINING, TEST = 1437, 360

Pair = tuple[Tensor, Tensor]


def digits() -> tuple[Pair, Pair]:
    """(training, test), each (images [N, 1, 8, 8] in [0, 1], labels [N]), split once for all by a fixed shuffle.

    Pixels are divided by 16, the largest value the format allows: a public constant, not a statistic of the data.
    """
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, test = order[:TRAINING], order[TRAINING:]
    return (images[training], labels[training]), (images[test], labels[test])
