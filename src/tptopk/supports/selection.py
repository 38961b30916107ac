"""The k best of d coordinates, found by their k-th value.

No sort and no copy of all coordinates in one place: each value is mapped to an integer of the same order, the
k-th largest integer is found sixteen bits at a time by counting how often each digit occurs, and ties at it are taken in
flat order. Two passes over float32 scores, whatever d is, and one number waited for in each.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tptopk.privacy.oracle import refuse_oracles
from tptopk.supports.support import Support

DIGIT = 16  # bits looked at in one pass
PIECE = 2**22  # coordinates looked at at once, which bounds the memory of a pass


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
    threshold, missing = _kth_largest(keys, k)
    masks = {name: key > threshold for name, key in keys.items()}
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


def _kth_largest(keys: Mapping[str, Tensor], k: int) -> tuple[int, int]:
    """The k-th largest key, and how many keys equal to it are among the k largest."""
    whole = [piece for key in keys.values() for piece in torch.split(key.reshape(-1), PIECE)]
    bits = 64 if any(piece.dtype == torch.int64 for piece in whole) else 32
    found, missing = 0, k  # the digits of the k-th key so far, as a signed number; how many of its rank are below
    for shift in range(bits - DIGIT, -1, -DIGIT):
        first = shift == bits - DIGIT  # the sign is in its digit, and no key is out yet
        # the last: keys that are out already
        counts = torch.zeros(2**DIGIT + 1, dtype=torch.int64, device=whole[0].device)
        for piece in whole:
            upper = piece.long() >> shift
            digit = upper + 2 ** (DIGIT - 1) if first else upper & (2**DIGIT - 1)
            if not first:
                digit = torch.where(upper >> DIGIT == found, digit, 2**DIGIT)
            counts.index_add_(0, digit, torch.ones_like(digit))
        at_least = counts[:-1].flip(0).cumsum(0).cpu()  # [n] keys whose digit is among the n + 1 highest
        place = int(torch.searchsorted(at_least, missing))
        missing -= int(at_least[place - 1]) if place else 0
        digit_of_it = 2**DIGIT - 1 - place
        found = digit_of_it - 2 ** (DIGIT - 1) if first else found << DIGIT | digit_of_it
    return found, missing
