"""What `Trainer` draws its training batches from: Poisson samples of the train_dataset, by number."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Sampler

from tptopk.gradients.examples import Batch
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


class Draws:
    """Poisson samples by number, of one attempt at one run. No number is drawn twice, whoever asks."""

    def __init__(self, plan: Plan, *, secure_noise: bool = False) -> None:
        self.streams = Streams(run=secrets.token_hex(8), secure=secure_noise)
        self._sampler = PoissonSampler(plan.dataset_size, self.streams)
        self._plan, self._next = plan, 0

    def sample(self, number: int) -> tuple[Tensor, int]:
        """The sample of that number, or the next one that nobody has seen; and the number after it."""
        number = max(number, self._next)
        self._next = number + 1
        return self._sampler.sample(0, number, self._plan.phases[0].sample_rate), self._next


class PoissonBatches(Sampler[list[int]]):
    """The records of each step of an epoch: fresh Poisson samples of the whole dataset, any of which may be empty.

    Formal guarantees: each record is in a sample with probability `sample_rate`, independently of all else. Where `Trainer` resumes
    in the middle of an epoch it skips the batches before: their samples are drawn and thrown away unseen, so that each step gets
    the sample of its own number.
    """

    def __init__(self, draws: Draws, dataset: Any, plan: Plan, taken: Callable[[], int]) -> None:
        """`taken()`: how many steps of the plan have been taken."""
        self._draws, self._dataset, self._plan, self._taken = draws, dataset, plan, taken

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
            chosen, number = self._draws.sample(number)
            yield chosen.tolist()
