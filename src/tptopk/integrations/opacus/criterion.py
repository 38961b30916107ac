"""Whether a criterion gives each example a loss of its own: found out by trying it on made-up outputs and targets."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tptopk.privacy.refusal import Refusal

CLASSES = (*range(2, 11), 20, 100, 1000)  # tried where no weight tells how many there are
EXAMPLES, POSITIONS = 12, 11  # unlike those, so that no axis is taken for another
TORCHS_IGNORED = -100  # torch's default: that a criterion has it does not say that a target is ever ignored


def check_criterion(criterion: Any, reduction: str) -> None:
    """Refuse a criterion whose loss of a batch is not the mean (or sum) of the losses that its examples have alone.

    ==========================================  ===============================================================
    the criterion                               what happens
    ==========================================  ===============================================================
    takes classes as targets                    refused unless its examples are apart in whatever it takes
    takes numbers alone as targets              refused if its examples are apart in no shape that it takes
    takes nothing that is tried                 refused if it has a weight or an `ignore_index`, and is a mean
    has torch's own `ignore_index`, −100        tried without that target: nobody knows whether it is ever used
    ==========================================  ===============================================================
    """
    if criterion is None:
        return
    weight, ignored = getattr(criterion, "weight", None), getattr(criterion, "ignore_index", TORCHS_IGNORED)
    device = weight.device if isinstance(weight, Tensor) else torch.device("cpu")
    of_classes = [_apart(criterion, reduction, device, *batch) for batch in _classes(weight, ignored)]
    of_numbers = [_apart(criterion, reduction, device, *batch) for batch in _numbers(weight)]
    if {*of_classes, *of_numbers} == {None}:
        fine = reduction == "sum" or (weight is None and ignored == TORCHS_IGNORED)
    else:
        fine = False not in of_classes and (True in of_classes or True in of_numbers)
    if not fine:
        raise Refusal(
            f"criterion is {getattr(criterion, '__name__', type(criterion).__name__)}, whose {reduction} over a batch is not that of "
            "its examples' own losses (class weights or an ignored target are in a mean's divisor): one record would move the "
            "gradients of others past its own clip. Average by yourself, in the loop and for criterion=: lambda outputs, "
            f"targets: cross_entropy(outputs, targets, weight=…, reduction='none').{reduction}()"
        )


def _classes(weight: Any, ignored: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores and classes; those of the least and the greatest weight and the one to ignore are among them."""
    weighted = _weighs_classes(weight)
    ends = [int(weight.argmin()), int(weight.argmax())] if weighted else []
    special = [*ends, *([ignored] if ignored != TORCHS_IGNORED else [])]
    for classes in [len(weight)] if weighted else CLASSES:
        examples = EXAMPLES + (classes == EXAMPLES)
        found = torch.tensor([*special, *(n % classes for n in range(examples))][:examples])
        rows = torch.stack([found.roll(n // 2) for n in range(POSITIONS)], 1)  # [examples, positions]
        yield _scores(examples, classes), found
        yield _scores(examples, classes, POSITIONS), rows
        yield _scores(examples, POSITIONS, classes), rows


def _numbers(weight: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs and targets between 0 and 1."""
    yield _scores(EXAMPLES), 1 - _scores(EXAMPLES).sqrt()
    yield _scores(EXAMPLES, 1), 1 - _scores(EXAMPLES).sqrt()
    for width in [len(weight)] if _weighs_classes(weight) else (1, *CLASSES):
        yield _scores(EXAMPLES, width), 1 - _scores(EXAMPLES, width).sqrt()


def _weighs_classes(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.dim() == 1 and len(weight) > 1


def _scores(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).mul(0.9).add(0.05)


@torch.no_grad()
def _apart(criterion: Any, reduction: str, device: torch.device, outputs: Tensor, targets: Tensor) -> bool | None:
    """Whether the batch's loss is the mean or sum of each example's alone; None: the criterion does not take them."""
    outputs, targets = outputs.to(device), targets.to(device)
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of shapes that do not belong together
            tried = copy.deepcopy(criterion)  # it may keep state
            whole = tried(outputs, targets)
            alone = torch.stack([tried(outputs[n : n + 1], targets[n : n + 1]) for n in range(len(outputs))])
    except Exception:
        return None
    if whole.dim() > 0 or bool(whole.isnan()):
        return None
    return bool(torch.isclose(whole, alone.mean() if reduction == "mean" else alone.sum(), rtol=1e-5, atol=1e-7))
