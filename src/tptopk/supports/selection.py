"""The k best of d coordinates, found by their k-th value.

No sort and no copy of all coordinates in one place: each value is mapped to an integer of the same order, the
k-th largest integer is found by halving its range and counting, and ties at it are taken in flat order. Thirty-two
passes over float32 scores, whatever d is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tptopk.privacy.oracle import refuse_oracles
from tptopk.supports.support import Support


def top_k(scores: Mapping[str, Tensor], k: int) -> Support:
    """The support of the k highest scores; equal scores are taken in the flat order of the parameters.

    NaN ranks below everything. Deterministic: the same scores give the same support on every machine.
    """
    refuse_oracles({"the ranking": scores})
    total = sum(score.numel() for score in scores.values())
    if not 0 <= k <= total:
        raise ValueError(f"k = {k} is not between 0 and d = {total}")
    keys = {name: _ordered_integers(score) for name, score in scores.items()}
    if k == 0 or k == total:
        return Support({name: torch.full_like(key, k == total, dtype=torch.bool) for name, key in keys.items()})
    threshold = _kth_largest(keys, k)
    masks = {name: key > threshold for name, key in keys.items()}
    missing = k - sum(int(mask.sum()) for mask in masks.values())
    for name, key in keys.items():  # ties, in flat order
        if missing == 0:
            break
        ties = torch.nonzero((key == threshold).reshape(-1))[:missing, 0]
        masks[name].view(-1)[ties] = True
        missing -= len(ties)
    return Support(masks)


def random_ranking(shapes: Mapping[str, Tensor], generator: np.random.Generator) -> dict[str, Tensor]:
    """A uniformly random order of all coordinates, as scores for `top_k`. Independent of any data.

    Scores are 63-bit integers: among 100 million coordinates two are equal once in two thousand rankings.
    """
    return {
        name: torch.from_numpy(generator.integers(0, 2**63, size=tuple(like.shape), dtype=np.int64)).to(like.device)
        for name, like in shapes.items()
    }


def _ordered_integers(values: Tensor) -> Tensor:
    """Integers in the order of the values: the bits of a float, with the negative half turned around."""
    if not values.is_floating_point():
        return values.contiguous().long()
    values = torch.nan_to_num(values.float() + 0.0, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)  # −0 becomes 0
    bits = values.contiguous().view(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _kth_largest(keys: Mapping[str, Tensor], k: int) -> int:
    """The largest t such that at least k keys are ≥ t."""
    present = [key for key in keys.values() if key.numel()]
    low = min(int(key.min()) for key in present)  # always holds
    high = max(int(key.max()) for key in present)
    while low < high:
        middle = low + (high - low + 1) // 2
        if sum(int((key >= middle).sum()) for key in present) >= k:
            low = middle
        else:
            high = middle - 1
    return low
