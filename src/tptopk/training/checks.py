"""What `fit` looks at before anything is charged: sizes, devices, rates, the test set, and how much memory a batch takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Subset

from tptopk.gradients.clipping import clipped_sum
from tptopk.gradients.examples import Batch, take
from tptopk.gradients.made_up import working_maker
from tptopk.gradients.memory import memory_bound
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal, check_number
from tptopk.supports.selection import top_k
from tptopk.supports.support import Shifting, Support, trainable
from tptopk.supports.warmup import WarmUp
from tptopk.training.evaluation import StrangeLabels, evaluate, refuse_strange_labels
from tptopk.training.sampling import Collate, Records

USUAL_MEMORY = 2**31  # bytes for one physical batch on a CPU; on a GPU half of what is free


def most_examples(device: torch.device) -> int:
    """Of one physical batch, unless asked for."""
    return 65536 if device.type == "cuda" else 512


def check_test_set(
    model: nn.Module, test_set: Any, loss: Callable[..., Tensor], collate: Collate | None, device: torch.device
) -> None:
    """Try the first test record, and look at all labels, before anything is charged."""
    records = Records(test_set, collate)
    if len(records) == 0:
        raise Refusal("the test set is empty")
    training = model.training
    try:
        model.eval()
        refuse_strange_labels(model, records, loss, device)
        evaluate(
            model,
            [test_set[0]] if records.tensors is None else take(records.tensors, slice(0, 1)),
            loss,
            collate=collate,
            device=device,
        )
    except StrangeLabels:
        raise
    except Exception as error:
        raise Refusal(f"the model or the loss failed on a test record: {type(error).__name__}: {error}") from error
    finally:
        model.train(training)


def check_rates(rates: Sequence[float] | None, plan: Plan, scheduler: LRScheduler | None) -> None:
    """Refuse learning rates or a scheduler that do not fit the plan."""
    scheduled = getattr(scheduler, "total_steps", plan.steps)
    if scheduled < plan.steps:
        raise Refusal(f"the scheduler ends after {scheduled} steps and the plan has {plan.steps}; give it plan.steps")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise Refusal(
            "ReduceLROnPlateau needs a metric, and none of the private data may be read; use a scheduler of steps"
        )
    if rates is None:
        return
    if scheduler is not None:
        raise Refusal("give either a scheduler or learning_rates, and not both")
    if len(rates) != len(plan.phases):
        raise Refusal(f"learning_rates has {len(rates)} values; the plan has {len(plan.phases)} phase(s)")
    for rate in rates:
        check_number("learning rate", rate, above=0)


def check_seed(seed: int | None) -> None:
    if seed is not None and not (isinstance(seed, int) and abs(seed) < 2**63):
        raise Refusal(f"seed is {seed!r}; it must be a whole number of at most 63 bits")


def check_length(records: Records, plan: Plan) -> None:
    found = len(records)
    if found == 0:
        raise Refusal("the dataset is empty")
    if found != plan.dataset_size:
        raise Refusal(
            f"the plan declares a dataset of {plan.dataset_size} {plan.unit}s and this one has {found}; the size is a public number of "
            "the plan and must be right throughout the run"
        )


def refuse_own_records(train_set: Any, test_set: Any) -> None:
    """Refuse to measure on the private records under the name of a test set."""

    def inputs(data: Any) -> Tensor | None:
        """The first tensor of records that are held in tensors."""
        while isinstance(data, Subset):
            data = data.dataset
        parts = data if isinstance(data, (tuple, list)) else getattr(data, "tensors", None)
        first = parts[0] if isinstance(parts, (tuple, list)) and parts else None
        return first if isinstance(first, Tensor) and first.layout == torch.strided and first.numel() else None

    def overlap(one: Tensor, other: Tensor) -> bool:
        if one.data_ptr() == other.data_ptr():
            return True
        if not (one.is_contiguous() and other.is_contiguous()):  # every second record, say
            return False
        ends = [t.data_ptr() + t.numel() * t.element_size() for t in (one, other)]
        return max(one.data_ptr(), other.data_ptr()) < min(ends) and one.device == other.device

    one, other = inputs(train_set), inputs(test_set)
    # two choices from one dataset may hold no record in common
    both_chosen = isinstance(train_set, Subset) and isinstance(test_set, Subset)
    if test_set is train_set or (one is not None and other is not None and not both_chosen and overlap(one, other)):
        raise Refusal(
            "test_set holds the records of train_set: what is measured on private records has no guarantee; give records that are "
            "kept apart, or leave test_set out"
        )


def settle_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        try:
            model.to(torch.device(device))
        except (RuntimeError, AssertionError) as error:  # torch raises either for a device that is not there
            raise Refusal(f"cannot use device {device!r}: {str(error).splitlines()[0]}") from error
    places = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(places) != 1:
        raise Refusal(f"the model's tensors are on {len(places)} devices; move the whole model to one")
    return places.pop()


def largest_batch(
    model: nn.Module,
    loss: Callable[[nn.Module, Batch], Tensor],
    like: Batch,
    plan: Plan,
    engine: str,
    precision: str,
    limit: int | None,
) -> int:
    """The most examples whose clipped sum stays within the limit, on all coordinates, on a mask and on as few as the plan's."""
    device = next(model.parameters()).device
    if limit is None:
        limit = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else USUAL_MEMORY
    make = working_maker(model, loss, like)
    supports = [Support.full(model)]
    if plan.spec.sparse:
        generator = torch.Generator().manual_seed(0)
        scores = {n: torch.rand(p.shape, generator=generator).to(device) for n, p in trainable(model).items()}
        supports.append(Shifting(supports[0]))
        supports.append(top_k(scores, plan.active_coordinates(sum(s.numel() for s in scores.values()))))
    bounds = [
        memory_bound(
            lambda n, support=support: clipped_sum(  # type: ignore[misc]
                model, loss, make(0, n), support, 1.0, engine=engine, precision=precision
            ),
            device,
        )
        for support in supports
    ]
    return min(bound.largest_batch(limit) for bound in bounds)


def check_warmup(warmup: WarmUp, plan: Plan) -> None:
    """Refuse a `WarmUp` that is not the empty one of a plan that begins with all of this one."""
    if not isinstance(warmup, WarmUp):
        raise Refusal(f"warmup is a {type(warmup).__name__}; give an empty tptopk.supports.warmup.WarmUp")
    if len(plan.phases) > 1:
        raise Refusal(f"warmup= is for a plan of one phase; this one of {plan.method} has {len(plan.phases)}")
    if warmup.steps:
        raise Refusal(f"warmup has taken in {warmup.steps} steps already; give an empty one")
    if (warmup.plan.phases[0], warmup.plan.dataset_size) != (plan.phases[0], plan.dataset_size):
        raise Refusal("warmup is of a plan that begins otherwise than this one")
