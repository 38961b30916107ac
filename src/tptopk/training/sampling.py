"""Poisson sampling over any dataset of known length: every record flips its own coin at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from tptopk.gradients.examples import Batch, PerExampleLoss, batch_length, move, take, tensors_of
from tptopk.gradients.probe import made_up, same_in_both
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
        self.tensors: Batch | None = None
        if collate is None and type(dataset) is TensorDataset:
            self.tensors = tuple(dataset.tensors)
        elif collate is None and _is_tensors(dataset):
            self.tensors = dataset
        elif isinstance(dataset, (tuple, list)) and dataset and all(isinstance(part, np.ndarray) for part in dataset):
            raise Refusal("these are NumPy arrays; make them tensors with torch.from_numpy, floats as float32")
        elif not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise Refusal(f"a {type(dataset).__name__} is no dataset: it needs len() and [], or must be tensors")
        self._collate = collate or default_collate

    def __len__(self) -> int:
        return batch_length(self.tensors) if self.tensors is not None else len(self._dataset)

    def refuse_mixing_collate(self) -> None:
        """Refuse a collate function under which one record's tensors depend on the records beside it."""
        if self.tensors is not None or self._collate is default_collate:
            return
        record = self._dataset[0]
        a, b, c = (_made_up_record(record, seed) for seed in range(3))
        first, second = (_first(self._collate_by_the_same_chance([a, other])) for other in (b, c))
        for x, y in zip(tensors_of(first), tensors_of(second), strict=True):
            if x.shape == y.shape and not torch.equal(x.nan_to_num(), y.nan_to_num()):
                raise Refusal(
                    "the collate function mixes records: the first record's tensors change with the second record"
                )

    def refuse_mixing_by_length(self, model: nn.Module, loss: PerExampleLoss, device: torch.device) -> None:
        """Refuse padding to the longest record of a batch where it changes another record's loss."""
        found = self.lengthened()
        if found is None:
            return
        short, long = (move(batch, device) for batch in found)
        try:
            same = same_in_both(model, loss, short, long)
        except Exception:  # a longer batch is more than the model takes
            same = False
        if not same:
            raise Refusal(
                "records are padded to the longest of their batch, and that changes the loss of the others: a long record would influence "
                "them past its clip. Pad every record to one public length, or mask the padding in the model"
            )

    def lengthened(self) -> tuple[Batch, Batch] | None:
        """Two made-up batches whose second records differ in length, if that changes the first record's shape too."""
        if self.tensors is not None:
            return None
        record = self._dataset[0]
        alike, longer = _made_up_record(record, 1), _made_up_record(record, 1, stretch=3)
        try:
            short, long = (
                self._collate_by_the_same_chance([_made_up_record(record, 0), other]) for other in (alike, longer)
            )
        except Exception:  # records of different lengths cannot be put together at all: none can lengthen another
            return None
        same = [t.shape for t in tensors_of(short)] == [t.shape for t in tensors_of(long)]
        return None if same else (short, long)

    def _collate_by_the_same_chance(self, records: list[Any]) -> Batch:
        """A collate function may draw (which tokens to mask, say): two calls differ by their records alone."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self._collate(records)

    def batch(self, indices: Tensor, device: torch.device) -> Batch:
        return move(self.fetch(indices), device)

    def fetch(self, indices: Tensor) -> Batch:
        if self.tensors is not None:
            return take(self.tensors, indices)
        batch = self._collate([self._dataset[i] for i in indices.tolist()])
        if batch_length(batch) != len(indices):
            raise Refusal(
                f"the collate function made {batch_length(batch)} examples of {len(indices)} records; a record must stay one example, "
                "or it would count more than once"
            )
        return batch


def _made_up_record(record: Any, seed: int, stretch: int = 1) -> Any:
    """A record of the same structure that is nobody's; with `stretch`, sequences that many times as long.

    Sequences are tensors, arrays, texts, and lists of numbers inside a record, such as a tokenizer's.
    """
    generator = np.random.default_rng(seed)

    def invent(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return [made_up(number, generator) for number in leaf] * stretch
        value = made_up(leaf, generator)
        if isinstance(value, str):
            return " ".join([value] * stretch)
        if isinstance(value, np.ndarray) and value.ndim > 0:
            return np.concatenate([value] * stretch)
        return torch.cat([value] * stretch) if isinstance(value, Tensor) and value.dim() > 0 else value

    if isinstance(record, Mapping):  # a tokenizer's mapping is no dict
        record = dict(record)
    return tree_map(invent, record, is_leaf=lambda part: part is not record and _is_list_of_numbers(part))


def _is_list_of_numbers(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and all(isinstance(number, (int, float)) for number in part)


def _first(batch: Batch) -> Batch:
    if batch_length(batch) != 2:
        raise Refusal(
            f"the collate function made {batch_length(batch)} examples of 2 records; a record must stay one example, or it would count more than once"
        )
    return take(batch, slice(0, 1))


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

    def __init__(self, size: int, streams: Streams, purpose: str = "sample") -> None:
        self._size, self._streams, self._purpose = size, streams, purpose

    def sample(self, phase: int, step: int, sample_rate: float) -> Tensor:
        """The indices of the step's records, in order.

        Instead of one coin for each record, the gaps between the records that win are drawn: runs of losing coins have
        geometric lengths, P(at least g) = (1 − q)^g, and a sample costs its own size instead of the dataset's.
        """
        if sample_rate == 1.0:
            return torch.arange(self._size)
        generator, per_record = self._streams.numpy(self._purpose, phase, step), -math.log1p(-sample_rate)
        expected = sample_rate * self._size
        draws, last, found = int(expected + 4 * expected**0.5) + 8, -1, []
        while last < self._size:
            losing = np.minimum(generator.standard_exponential(draws) / per_record, self._size)
            found.append(last + np.cumsum(1 + losing.astype(np.int64)))
            last = int(found[-1][-1])
        indices = np.concatenate(found)
        return torch.from_numpy(indices[indices < self._size])


def micro_batches(records: Records, indices: Tensor, size: int, device: torch.device) -> Iterator[Batch]:
    """The step's records in even physical batches of at most `size`, on the device; nothing when no record was drawn."""
    parts = -(-len(indices) // size)
    for n in range(parts):
        chosen = indices[n * len(indices) // parts : (n + 1) * len(indices) // parts]
        yield records.batch(chosen, device)
