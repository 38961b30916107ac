"""What `Trainer` draws its training batches from: Poisson samples of the train_dataset, by number."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info
from transformers import TrainingArguments

from tptopk.gradients.examples import Batch
from tptopk.integrations.empty_batches import CollateOrEmpty
from tptopk.privacy.plan import Plan
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.training.sampling import PoissonSampler


class AsDictionary:
    """A collate function whose batches are plain dictionaries; a tokenizer's are not, and could not be cut by example."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, records: list[Any]) -> Batch:
        batch = self._collate(records)
        return dict(batch) if isinstance(batch, Mapping) else batch


class Samples:
    """Poisson samples by number, of one attempt at one run. No number is drawn twice, whoever asks."""

    def __init__(self, plan: Plan, *, secure_noise: bool = False) -> None:
        self.streams = Streams(run=secrets.token_hex(8), secure=secure_noise)
        self._sampler = PoissonSampler(plan.dataset_size, self.streams)
        self._plan, self._next = plan, 0

    def numbered(self, number: int) -> tuple[Tensor, int]:
        """The sample of that number, or the next one that nobody has seen; and the number after it."""
        number = max(number, self._next)
        self._next = number + 1
        return self._sampler.sample(0, number, self._plan.sample_rate), self._next


class Numbers(Dataset[int]):
    """The places of a dataset, so that whoever copies the loader to skip batches copies `Fetch` with it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, place: int) -> int:
        return place


class Fetch:
    """Places → a batch. What records and the collate function draw comes from the run's secret, and moves no other generator.

    A worker draws from its own, whose seed comes from a generator that is secret too.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Batch], streams: Streams) -> None:
        self._dataset, self._collate, self._number = dataset, collate, 0
        self._streams: Streams | None = streams

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_streams": None}  # a worker that is started anew gets no secret

    def __call__(self, places: list[int]) -> Batch:
        if get_worker_info() is not None or self._streams is None:
            return self._fetched(places)
        self._number += 1
        with self._streams.dice(torch.device("cpu"), "loader", self._number):
            return self._fetched(places)

    def _fetched(self, places: list[int]) -> Batch:
        return self._collate([self._dataset[place] for place in places])


class PoissonBatches(Sampler[list[int]]):
    """The records of each step of an epoch: fresh Poisson samples of the whole dataset, any of which may be empty.

    Formal guarantees: each record is in a sample with probability `sample_rate`, independently of all else. Where `Trainer` resumes
    in the middle of an epoch it skips the batches before: their samples are drawn and thrown away unseen, so that each step gets
    the sample of its own number.
    """

    def __init__(self, samples: Samples, dataset: Any, plan: Plan, taken: Callable[[], int]) -> None:
        """`taken()`: how many steps of the plan have been taken."""
        self._samples, self._dataset, self._plan, self._taken = samples, dataset, plan, taken

    def __len__(self) -> int:
        return self._plan.phases[0].steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        number = self._taken() - self._taken() % len(self)
        for _ in range(len(self)):
            if len(self._dataset) != self._plan.dataset_size:
                raise Refusal(
                    f"the train_dataset had {self._plan.dataset_size} records and has {len(self._dataset)} now; its size is a public number "
                    "of the plan and must be right throughout"
                )
            chosen, number = self._samples.numbered(number)
            yield chosen.tolist()


def poisson_loader(
    dataset: Any,
    collate: CollateOrEmpty,
    samples: Samples,
    plan: Plan,
    taken: Callable[[], int],
    args: TrainingArguments,
) -> DataLoader[Any]:
    """A DataLoader of Poisson samples, with the workers and the memory that the arguments ask for."""
    return DataLoader(
        Numbers(dataset),
        batch_sampler=PoissonBatches(samples, dataset, plan, taken),
        collate_fn=Fetch(dataset, collate, samples.streams),
        generator=torch.Generator().manual_seed(secrets.randbits(63)),  # of the workers' seeds
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
    )
