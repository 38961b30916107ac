"""Poisson sampling over any dataset of known length: every record flips its own coin at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from tptopk.gradients.examples import Batch, batch_length, move, take
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal

Collate = Callable[[list[Any]], Batch]


class Records:
    """A dataset whose records are fetched by index: tensors, a TensorDataset, or anything with len() and []."""

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        if isinstance(dataset, IterableDataset):
            raise Refusal("an IterableDataset cannot be sampled record by record; give a map-style dataset or tensors")
        if isinstance(dataset, torch.utils.data.DataLoader):
            raise Refusal(
                "give the dataset itself, not a DataLoader: the guarantee rests on the library's own Poisson sampling"
            )
        self._dataset = dataset
        self._tensors: Batch | None = None
        if collate is None and isinstance(dataset, TensorDataset):
            self._tensors = tuple(dataset.tensors)
        elif collate is None and _is_tensors(dataset):
            self._tensors = dataset
        elif not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise Refusal(f"a {type(dataset).__name__} is no dataset: it needs len() and [], or must be tensors")
        self._collate = collate or default_collate

    def __len__(self) -> int:
        return batch_length(self._tensors) if self._tensors is not None else len(self._dataset)

    def fetch(self, indices: Tensor) -> Batch:
        if self._tensors is not None:
            return take(self._tensors, indices)
        return self._collate([self._dataset[i] for i in indices.tolist()])


def _is_tensors(dataset: Any) -> bool:
    return isinstance(dataset, Tensor) or (
        isinstance(dataset, (tuple, list)) and len(dataset) > 0 and all(isinstance(leaf, Tensor) for leaf in dataset)
    )


class PoissonSampler:
    """Which records take part in a step.

    Formal guarantees: each of the `size` records is included independently with probability `sample_rate`, afresh
    at each step, from a stream that no other step or purpose shares. The number of records drawn is random and
    may be zero.
    """

    def __init__(self, size: int, streams: Streams) -> None:
        self._size, self._streams = size, streams

    def sample(self, phase: int, step: int, sample_rate: float) -> Tensor:
        """The indices of the step's records, in order."""
        coins = self._streams.numpy("sample", phase, step).random(self._size)
        return torch.from_numpy(np.flatnonzero(coins < sample_rate))


def micro_batches(records: Records, indices: Tensor, size: int, device: torch.device) -> Iterator[Batch]:
    """The step's records in physical batches of at most `size`, on the device; nothing when no record was drawn."""
    for start in range(0, len(indices), size):
        yield move(records.fetch(indices[start : start + size]), device)
