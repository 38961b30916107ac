"""Examples that are nobody's: of the data's shapes and types, with values that the model runs on; and weights to try them at."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tptopk.gradients.examples import Batch, PerExampleLoss, checked_losses, move, tensors_of
from tptopk.privacy.refusal import Refusal
from tptopk.supports.support import trainable

EXAMPLES = 8  # of a made-up batch
IDS = (10, 2, 1)  # of how many the made-up whole numbers are, the more the better

Maker = Callable[[int, int], Batch]  # (seed, number of examples) → made-up batch


def made_up(
    value: Any,
    generator: np.random.Generator,
    positive: bool = False,
    ids: int = 2,
    examples: int | None = None,
    truth: float = 0.0,
) -> Any:
    """A value of the same shape and type that is nobody's: normal (or positive) numbers, ids below `ids`, booleans true at the rate `truth`."""
    if isinstance(value, (bool, np.bool_)):
        return bool(generator.random() < truth)
    if isinstance(value, (int, np.integer)):
        return int(generator.integers(ids))
    if isinstance(value, (float, np.floating)):
        return float(generator.standard_normal())
    if isinstance(value, str):
        return "ab"[generator.integers(2)]
    if isinstance(value, np.ndarray):
        return made_up(torch.from_numpy(value), generator, positive, ids, truth=truth).numpy()
    if not isinstance(value, Tensor):
        return value
    shape = tuple(value.shape) if examples is None else (examples, *value.shape[1:])
    drawn: np.ndarray[Any, Any]
    if value.dtype == torch.bool:
        drawn = generator.random(shape) < truth
    elif value.is_floating_point() or value.is_complex():
        drawn = generator.uniform(0.1, 1.0, shape) if positive else generator.standard_normal(shape)
    else:
        drawn = generator.integers(0, ids, shape)
    return torch.as_tensor(drawn).to(value.dtype).to(value.device)


def working_maker(model: nn.Module, loss: PerExampleLoss, like: Batch) -> Maker:
    """The richest made-up values that the model runs on with finite losses: normal inputs and many ids, if it can be.

    A label that is no class has a loss of zero and shows nothing, so values with losses that are mostly zero come last.
    """
    problem: Exception | None = None
    poor: Maker | None = None
    # A mask is true where something counts, or where it does not.
    truths = (0.0, 1.0) if any(t.dtype == torch.bool for t in tensors_of(like)) else (0.0,)
    trial = on_cpu(model)
    leaves, form = tree_flatten(like)
    whole = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and is_whole(leaf.dtype)]

    def maker(positive: bool, bounds: list[int], truth: float) -> Maker:
        """`bounds`: below which the whole numbers of each leaf are."""

        def make(seed: int, examples: int) -> Batch:
            generator = np.random.default_rng(seed)
            drawn = [made_up(leaf, generator, positive, ids, examples, truth) for leaf, ids in zip(leaves, bounds, strict=True)]  # fmt: skip
            return tree_unflatten(drawn, form)

        return make

    def losses_of(make: Maker) -> Tensor:
        with torch.no_grad():
            return losses_on(trial, model, loss, make(0, EXAMPLES))

    def takes(make: Maker, losses: int) -> bool:
        """Whether the model runs on these with finite losses, of which so many are not zero."""
        try:
            found = losses_of(make)
        except Exception:
            return False
        return bool(torch.isfinite(found).all()) and int((found != 0).sum()) >= losses

    def richest(positive: bool, bounds: list[int], truth: float, losses: int) -> Maker:
        """With more ids in each leaf that takes more, whatever others take: texts of many words though there are two classes."""
        for n in whole:
            for ids in IDS[: IDS.index(bounds[n])]:
                more = [*bounds[:n], ids, *bounds[n + 1 :]]
                if takes(maker(positive, more, truth), losses):
                    bounds = more
                    break
        return maker(positive, bounds, truth)

    for positive in (False, True):
        for ids, truth in itertools.product(IDS, truths):
            bounds = [ids] * len(leaves)
            try:
                losses = losses_of(maker(positive, bounds, truth))
                if bool(torch.isfinite(losses).all()):
                    if int((losses != 0).sum()) > EXAMPLES // 2:
                        return richest(positive, bounds, truth, int((losses != 0).sum()))
                    poor = poor or maker(positive, bounds, truth)
                problem = problem or ArithmeticError("its losses are not finite")
            except Refusal:
                raise
            except Exception as error:
                problem = error
    if poor is not None:
        return poor
    shapes = [tuple(t.shape[1:]) for t in tensors_of(like)]
    raise Refusal(
        f"the model or the loss failed on made-up examples of the data's shapes {shapes}: {type(problem).__name__}: {problem}"
        + _channels_first(model, shapes[0] if shapes else ())
    ) from problem


def on_cpu(model: nn.Module) -> nn.Module:
    """An id out of range is an error on a CPU but the end of the process's GPU context, so ids are tried on a CPU."""
    return copy.deepcopy(model).cpu() if any(p.is_cuda for p in model.parameters()) else model


def losses_on(trial: nn.Module, model: nn.Module, loss: PerExampleLoss, batch: Batch) -> Tensor:
    """Of `trial`, which is the model or its copy on a CPU."""
    return checked_losses(loss, trial, batch if trial is model else move(batch, next(trial.parameters()).device))


def is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _channels_first(model: nn.Module, shape: tuple[int, ...]) -> str:
    """What to do where the first layer is a convolution, and images of `shape` have no channel or have it last."""
    layers = ((name, m) for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None)
    name, layer = next(layers, ("", model))
    if not isinstance(layer, nn.Conv2d):
        return ""
    takes = f"; layer {name!r} (Conv2d) takes images as ({layer.in_channels}, height, width) and these are {shape}: "
    if len(shape) == 2 and layer.in_channels == 1:
        return takes + "x[:, None] adds the channel"
    if len(shape) == 3 and shape[2] == layer.in_channels != shape[0]:
        return takes + "put the channels first, by numpy.moveaxis(x, -1, 1)"
    return ""


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Move the weights off special values (zeros hide what they multiply), and put everything back afterwards."""
    state = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    generator = np.random.default_rng(2)
    try:
        with torch.no_grad():
            for p in trainable(model).values():
                p.add_(
                    torch.as_tensor(0.05 * generator.standard_normal(tuple(p.shape)), dtype=p.dtype, device=p.device)
                )
        yield
    finally:
        with torch.no_grad():
            for tensor, before in state:
                tensor.copy_(before)
