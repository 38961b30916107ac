"""A DataLoader of Poisson samples in place of the user's own, and the checks that it can be one."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from tptopk.gradients.examples import Batch, refuse_foreign_leaves
from tptopk.integrations.empty_batches import CollateOrEmpty
from tptopk.privacy.refusal import Refusal, check_count
from tptopk.training.sampling import Records


class Part(NamedTuple):
    """A physical batch: all of a Poisson sample, or a part of it."""

    sample: int  # place of the Poisson sample in the run's sequence of samples
    size: int  # records in it
    whole: int  # records in the sample
    first: bool
    last: bool


class Draws(Protocol):
    """Who draws samples and is told which of them the user's loop is given."""

    sample_rate: float
    dataset_size: int

    @property
    def unused(self) -> int:
        """Place of the first sample that no charge has been made for."""

    def sample(self, place: int) -> Tensor:
        """The records of the Poisson sample at this place of the sequence, the same whenever it is asked for."""

    def dice(self, purpose: str, *place: int) -> AbstractContextManager[None]:
        """While it is open, what anybody draws from a global generator comes from the run's secret."""

    def begin_pass(self) -> int:
        """A new pass over the loader; its number."""

    def given(self, part: Part, number: int) -> None:
        """The loop is about to be given this batch."""

    def end_pass(self, number: int) -> None:
        """The loop asked for one batch more than the pass has."""


def check_loader(loader: object) -> None:
    """Refuse a loader that samples in a way that Poisson sampling would silently replace."""
    if isinstance(loader, PoissonLoader):
        raise Refusal("this loader is a private one already: make_private is called once, with the script's own loader")
    if not isinstance(loader, DataLoader):
        raise Refusal(f"data_loader is a {type(loader).__name__}; it must be a torch.utils.data.DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise Refusal("an IterableDataset cannot be sampled record by record; give a loader of a map-style dataset")
    sampler = loader.sampler
    plain = type(sampler) in (RandomSampler, SequentialSampler) and type(loader.batch_sampler) is BatchSampler
    if isinstance(sampler, RandomSampler) and plain:
        plain = not sampler.replacement and sampler._num_samples is None
    if loader.batch_size is None and loader.batch_sampler is None:
        raise Refusal("the loader makes no batches (batch_size=None); give it a batch_size")
    if not plain:
        custom = loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else sampler
        raise Refusal(
            f"the loader has a sampler of its own ({type(custom).__name__}), and the guarantee rests on Poisson sampling of the "
            "whole dataset; leave the sampler out, and give a Subset where only some records should take part"
        )
    if len(loader) == 0:
        raise Refusal("the loader has no batch: its dataset is empty, or smaller than one batch with drop_last=True")


def check_collate(loader: DataLoader[Any]) -> Batch:
    """Refuse a collate function that lets one record into another's tensors; return an empty batch."""
    records = Records(loader.dataset, loader.collate_fn)
    records.refuse_mixing_collate()
    if records.lengthened() is not None:
        raise Refusal(
            "the collate function pads records to the longest of their batch: a long record would change the others' gradients "
            "past its own clip. Pad every record to one public length"
        )
    one = records.fetch(torch.zeros(1, dtype=torch.long))
    refuse_foreign_leaves(one)
    return tree_map(lambda leaf: leaf[:0].clone() if isinstance(leaf, Tensor) else leaf, one)


class _Parts(Sampler[list[int]]):
    """Poisson samples, each in even parts of at most `most` records; what was handed out waits in `queue`."""

    def __init__(self, draws: Draws, steps: int, most: int | None) -> None:
        self._draws, self._steps, self._most = draws, steps, most
        self.queue = deque[Part]()

    def __len__(self) -> int:
        """Batches of a pass; in parts, about as many as expected."""
        expected = self._draws.sample_rate * self._draws.dataset_size
        return self._steps if self._most is None else math.ceil(self._steps * max(1.0, expected / self._most))

    def __iter__(self) -> Iterator[list[int]]:
        self.queue.clear()
        first = self._draws.unused
        for place in range(first, first + self._steps):
            sample = self._draws.sample(place).tolist()
            parts = max(1, math.ceil(len(sample) / (self._most or max(1, len(sample)))))
            for n in range(parts):
                chosen = sample[n * len(sample) // parts : (n + 1) * len(sample) // parts]
                self.queue.append(Part(place, len(chosen), len(sample), n == 0, n == parts - 1))
                yield chosen


def by_secret_dice(batches: Iterator[Batch], dice: Callable[[int], AbstractContextManager[None]]) -> Iterator[Batch]:
    """The batches, each fetched under the n-th dice of the run: what datasets and collate functions draw is secret."""
    for number in count():
        with dice(number):
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


class PoissonLoader(DataLoader[Any]):
    """A DataLoader whose every batch is a Poisson sample of the whole dataset, and may be empty.

    Formal guarantees: each record is in a sample with probability `sample_rate`, independently of all else. The samples
    come from the run's own secret, whatever seed torch has, and form one sequence. A pass begins with the first that was
    neither stepped on nor charged: no loop gets a fresh sample in place of one that it looked at.
    """

    def __init__(
        self,
        like: DataLoader[Any],
        draws: Draws,
        collate: CollateOrEmpty,
        steps: int,
        most: int | None = None,
    ) -> None:
        self.draws, self.steps, self.sample_rate = draws, steps, draws.sample_rate
        self._parts = _Parts(draws, steps, most)
        super().__init__(
            like.dataset,
            batch_sampler=self._parts,
            collate_fn=collate,
            num_workers=like.num_workers,
            pin_memory=like.pin_memory,
            timeout=like.timeout,
            worker_init_fn=like.worker_init_fn,
            multiprocessing_context=like.multiprocessing_context,
            generator=torch.Generator().manual_seed(secrets.randbits(63)),  # of the workers' seeds, which decide crops
            prefetch_factor=like.prefetch_factor,
            persistent_workers=like.persistent_workers,
        )

    def in_parts(self, most: int) -> PoissonLoader:
        """The same samples in physical batches of at most `most` records."""
        check_count("max_physical_batch_size", most)
        collate = self.collate_fn
        assert isinstance(collate, CollateOrEmpty)
        return PoissonLoader(self, self.draws, collate, self.steps, most)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        found = len(self.dataset)  # type: ignore[arg-type]
        if found != self.draws.dataset_size:
            raise Refusal(
                f"the dataset had {self.draws.dataset_size} records when it was made private and has {found} now; its size is a "
                "public number of the plan and must be right throughout"
            )
        number = self.draws.begin_pass()
        for batch in by_secret_dice(super().__iter__(), lambda n: self.draws.dice("loader", number, n)):
            self.draws.given(self._parts.queue.popleft(), number)
            yield batch
        self.draws.end_pass(number)
