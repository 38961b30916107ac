"""Batches of Poisson samples, which may hold no record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from tptopk.gradients.examples import Batch, tensors_of
from tptopk.privacy.refusal import Refusal


class CollateOrEmpty:
    """The user's collate function; of no records, a batch of the same structure with no rows."""

    def __init__(self, collate: Callable[[list[Any]], Batch], empty: Batch) -> None:
        self._collate, self._empty = collate, empty

    def __call__(self, records: list[Any]) -> Batch:
        if not records:
            return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self._empty)
        batch = self._collate(records)
        if any(t.dim() == 0 or len(t) != len(records) for t in tensors_of(batch)):
            raise Refusal(
                f"the collate function made tensors of shapes {[tuple(t.shape) for t in tensors_of(batch)]} of {len(records)} "
                "records; a record must stay one row, or it would count more than once"
            )
        return batch
