"""Whether hooks follow a module rightly: found out at its first call in training, before anything is charged."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tptopk.gradients.examples import Batch, PerExampleLoss
from tptopk.gradients.made_up import EXAMPLES, working_maker
from tptopk.gradients.probe import choose_engine, refuse_mixing_in_batches
from tptopk.privacy.refusal import Refusal
from tptopk.training.checks import most_examples

RARE = 1e-9  # an empty batch less likely than this is not prepared for


def probe(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, sample_rate: float, dataset_size: int
) -> None:
    """Try the module on made-up examples of the first batch's shapes, before anything is charged, as `fit` does.

    The loss is the loop's and unknown here, so a weighted sum of each example's outputs stands for it.
    """
    leaves, structure = tree_flatten((args, kwargs))
    led = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size]
    if not led:
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise Refusal(
            f"a batch of {size} records was drawn and the module was given tensors of shapes {shapes}, none of which it leads; "
            "run the module on the batch that the loader gave, whole"
        )
    like = tuple(cast(Tensor, leaves[n]).detach() for n in led)
    losses = _outputs_as_losses(leaves, led, structure)
    with torch.random.fork_rng():
        try:
            choose_engine(module, losses, like, "capture")
        except Refusal as refusal:
            reason = str(refusal).split("\nengine=")[0]
            raise Refusal(f"{reason}\ntptopk.fit has other engines, for models that hooks cannot follow") from refusal
        usual = min(math.ceil(sample_rate * dataset_size), most_examples(like[0].device))
        refuse_mixing_in_batches(module, losses, like, usual)
        if (1 - sample_rate) ** dataset_size >= RARE:
            try:
                with torch.no_grad():
                    losses(module, working_maker(module, losses, like)(0, 0))
            except Exception as error:
                raise Refusal(
                    f"a batch of so few records may be empty, and the module fails on a batch of zero examples: {type(error).__name__}: "
                    f"{error}. Let it take tensors of length 0 (flatten(1) instead of view(len(x), -1)), or enlarge batch_size"
                ) from error


def _outputs_as_losses(leaves: list[Any], led: list[int], structure: Any) -> PerExampleLoss:
    chosen: list[int] = []  # of the outputs, those led by the example axis

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        examples, device = len(batch[0]), batch[0].device
        given = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for n, tensor in zip(led, batch, strict=True):
            given[n] = tensor
        args, kwargs = tree_unflatten(given, structure)
        outputs = [leaf for leaf in tree_flatten(model(*args, **kwargs))[0] if isinstance(leaf, Tensor)]
        if not chosen and examples == EXAMPLES:
            chosen.extend(n for n, o in enumerate(outputs) if o.is_floating_point() and o.shape[:1] == (examples,))
        if not chosen:
            raise Refusal(
                f"of {examples} examples the module made outputs of shapes {[tuple(o.shape) for o in outputs]}; one must be led "
                "by the example axis"
            )
        total = torch.zeros(examples, device=outputs[chosen[0]].device)
        for n in chosen:
            numbers = outputs[n].float().flatten(1) if outputs[n].dim() > 1 else outputs[n].float()[:, None]
            weights = torch.cos(torch.arange(1, numbers.shape[1] + 1, device=numbers.device))
            total = total + (numbers * weights).sum(1) / numbers.shape[1] ** 0.5
        return total

    return losses
