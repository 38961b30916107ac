"""Several processes that train one model, on torch.distributed: each makes the clipped sum of its share of the sample.

The first process owns everything that must exist once: the ledger, the run folder, the secret, the sample and the noise. Each step
it charges, draws one Poisson sample of the whole dataset and sends its indices; every process clips and sums a disjoint
share of them, never padded and possibly empty; the k active numbers of these sums are added up at the first process, which adds noise
once, divides, and sends the private gradient to all. The model is not wrapped, and all processes stay equal to the bit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tptopk.gradients.examples import tensors_of
from tptopk.gradients.traces import contents_of
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal, SaidElsewhere
from tptopk.training.sampling import Records, same_dice

COMPARED = 64  # records by which processes tell whether they hold the same


@contextmanager
def launched(device: str | None) -> Iterator[str | None]:
    """Under torchrun, the process group it asked for and this process's device; otherwise nothing changes.

    NCCL for CUDA devices, gloo otherwise.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield device
        return
    if device is not None and device.startswith("cuda"):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device is not None and device.startswith("cuda") else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


class Team:
    """The processes of the default process group; without one, a team of one that sends nothing."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.size: int = dist.get_world_size() if together else 1
        self.rank: int = dist.get_rank() if together else 0
        self.numbers_sent = 0  # to or from the first process, of gradients alone

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, indices: Tensor | None) -> Tensor:
        """This process's part of the indices that the first process drew."""
        if self.size == 1:
            assert indices is not None
            return indices
        count = torch.tensor([0 if indices is None else len(indices)])
        self._send(count)
        drawn = torch.empty(int(count), dtype=torch.long) if indices is None else indices
        self._send(drawn)
        return drawn[self.rank :: self.size]

    def sum_at_first(self, values: Tensor) -> Tensor:
        """The sum of all processes' values, at the first; at the others it means nothing. Sent as float32."""
        if self.size == 1:
            return values
        place = self._place(values.float())
        dist.reduce(place, dst=0)
        self.numbers_sent += values.numel()
        return place.to(values.device)

    def from_first(self, values: Tensor) -> Tensor:
        """The first process's values."""
        if self.size == 1:
            return values
        self.numbers_sent += values.numel()
        return self._send(values.contiguous())

    def equal_models(self, model: nn.Module) -> None:
        """Every process goes on with the first one's weights and buffers."""
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if self.size > 1:
                    tensor.copy_(self._send(tensor.detach().clone()))

    def number(self, value: int) -> int:
        """The first process's number."""
        shared = torch.tensor([value])
        return int(self._send(shared)) if self.size > 1 else value

    def refuse_other_plans(self, plan: Plan) -> None:
        text = plan.to_json().encode()
        length = self.number(len(text))
        ours = torch.frombuffer(bytearray(text.ljust(length)[:length]), dtype=torch.uint8)
        theirs = self._send(ours.clone()) if self.size > 1 else ours
        if len(text) != length or not torch.equal(ours, theirs):
            raise Refusal("the processes have different plans; give every one of them the same")

    def mark_of(self, records: Records) -> int:
        """Of what some records hold, evenly spread; -1 where they are drawn anew each time they are read."""
        if self.size == 1:
            return -1
        places = torch.linspace(0, len(records) - 1, min(len(records), COMPARED)).long()
        found = []
        with same_dice() as again:
            for _ in range(2):
                again()
                found.append(contents_of(tensors_of(records.fetch(places))))
        digest = hashlib.blake2b(repr(found[0]).encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big") if found[0] == found[1] else -1

    def refuse_other_records(self, mark: int) -> None:
        """A record that is another one's number in another process would count twice in one step, or more often than is charged."""
        theirs = self.number(mark)
        if -1 not in (mark, theirs) and mark != theirs:
            raise Refusal(
                "the processes hold different records, or the same in another order; whatever splits or shuffles them must be "
                "given the same seed in every process"
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """What one process refuses, all refuse, instead of waiting for it for ever; what several refuse, the first of them says."""
        problem: BaseException | None = None
        try:
            yield
        except BaseException as error:
            problem = error
        if self.size > 1:
            failed = torch.zeros(self.size, dtype=torch.long, device=self._device())
            failed[self.rank] = problem is not None
            dist.all_reduce(failed)
            speaker = int(failed.argmax())
            if bool(failed.any()) and problem is None:
                raise SaidElsewhere(f"process {speaker} of 0 to {self.size - 1} could not begin; see what it says")
            if isinstance(problem, Refusal) and speaker != self.rank:
                raise SaidElsewhere(str(problem)) from problem
        if problem is not None:
            raise problem

    def _send(self, values: Tensor) -> Tensor:
        """Broadcast from the first process; `values` has the right shape and type everywhere and is filled in place."""
        place = self._place(values)
        dist.broadcast(place, src=0)
        if place is not values:
            values.copy_(place)
        return values

    def _place(self, values: Tensor) -> Tensor:
        """The values where the backend can reach them."""
        return values.to(self._device())

    def _device(self) -> torch.device:
        if dist.get_backend() == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
