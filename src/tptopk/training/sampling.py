"""Poisson sampling over any dataset of known length: every record flips its own coin at every step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from tptopk.gradients.examples import Batch, PerExampleLoss, batch_length, move, take, tensors_of
from tptopk.gradients.made_up import made_up
from tptopk.gradients.probe import same_in_both
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
        """Refuse a collate function under which one record's tensors depend on the records beside it.

        A made-up record is put into batches of 1, 2 and 9, first, in the middle and last, beside several others. Where the function draws at
        random, only batches are compared in which it draws the same numbers for the record. Tensors of different shapes are judged by
        `refuse_mixing_by_length`.
        """
        if self.tensors is not None or self._collate is default_collate:
            return
        one, *others = self._made_up_records(20)
        alone: Batch | None = None
        with same_dice() as again:

            def collated(records: list[Any]) -> tuple[Batch, Any]:
                """A batch, and where the generators are after it."""
                again()
                batch = self._collate([_copied(record) for record in records])
                if batch_length(batch) != len(records):
                    raise Refusal(
                        f"the collate function made {batch_length(batch)} examples of {len(records)} records; a record must stay one "
                        "example, or it would count more than once"
                    )
                return batch, _dice()

            def seen(place: int, beside: list[Any]) -> tuple[Batch, bool]:
                """The record's tensors, and whether anything was drawn."""
                again()
                before = _dice()
                batch, after = collated([*beside[:place], one, *beside[place:]])
                return take(batch, slice(place, place + 1)), after != before

            for place, count in ((0, 1), (0, 8), (4, 8), (8, 8)):
                first, draws = seen(place, others[:count])
                if _differ(first, seen(place, others[:count])[0]):
                    raise Refusal(
                        "the collate function does not give the same twice under one seed: it keeps state, or draws from a generator of its "
                        "own (use torch.rand, numpy.random or random), so that it cannot be tried out whether it mixes records"
                    )
                for start in (3, 6, 9, 11):
                    then = others[start : start + count]
                    if draws and place > 0 and collated(then[:place])[1] != collated(others[:place])[1]:
                        continue  # after other draws for the records before it, a record's own draws are others too
                    if _differ(first, seen(place, then)[0]):
                        raise Refusal(
                            "the collate function mixes records: one record's tensors change with the records beside it"
                        )
                if not draws:
                    alone = seen(0, [])[0] if alone is None else alone
                    if _differ(first, alone):
                        raise Refusal(
                            "the collate function mixes records: one record's tensors change with its place or with the number of records "
                            "beside it"
                        )

    def _made_up_records(self, count: int) -> list[Any]:
        """As the first record in structure alone; with ids below 10 and booleans of both kinds, if the collate function takes them."""
        record = self._dataset[0]
        many = [_made_up_record(record, seed, ids=10, truth=0.5) for seed in range(count)]
        try:
            self._collate_by_the_same_chance([_copied(one) for one in many])
        except Exception:
            return [_made_up_record(record, seed) for seed in range(count)]
        return many

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
        first = [_made_up_record(record, 0) for _ in range(2)]  # one for each call: a collate may take records apart
        try:
            short = self._collate_by_the_same_chance([first[0], alike])
            long = self._collate_by_the_same_chance([first[1], longer])
        except Exception:  # records of different lengths cannot be put together at all: none can lengthen another
            return None
        same = [t.shape for t in tensors_of(short)] == [t.shape for t in tensors_of(long)]
        return None if same else (short, long)

    def _collate_by_the_same_chance(self, records: list[Any]) -> Batch:
        """A collate function may draw (which tokens to mask, say): two calls differ by their records alone."""
        with same_dice() as again:
            again()
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


def _made_up_record(record: Any, seed: int, stretch: int = 1, ids: int = 2, truth: float = 0.0) -> Any:
    """A record of the same structure that is nobody's; with `stretch`, sequences that many times as long.

    Sequences are tensors, arrays, texts, and lists of numbers inside a record, such as a tokenizer's.
    """
    generator = np.random.default_rng(seed)

    def invent(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return [made_up(number, generator, ids=ids, truth=truth) for number in leaf] * stretch
        value = made_up(leaf, generator, ids=ids, truth=truth)
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


def _copied(record: Any) -> Any:
    """A record that the collate function may take apart."""
    return tree_map(
        lambda leaf: (
            leaf.clone() if isinstance(leaf, Tensor) else leaf.copy() if isinstance(leaf, np.ndarray) else leaf
        ),
        record,
    )


def _differ(a: Batch, b: Batch) -> bool:
    """Whether two batches hold other numbers in tensors of the same shape."""
    ours, theirs = tensors_of(a), tensors_of(b)
    if [t.dtype for t in ours] != [t.dtype for t in theirs]:
        return True
    pairs = zip(ours, theirs, strict=True)
    return any(x.shape == y.shape and not torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


def _dice() -> Any:
    """Where torch's, NumPy's and Python's own generators are."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), numpy[1].tobytes(), numpy[2:], random.getstate()


@contextmanager
def same_dice() -> Iterator[Callable[[], None]]:
    """A function that sets all usual generators to one seed; afterwards they are as they were."""
    python, numpy = random.getstate(), np.random.get_state()

    def again() -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    try:
        with torch.random.fork_rng():
            yield again
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


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
