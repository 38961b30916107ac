"""Whether an example's loss stays the same whatever the other examples of its batch are, and however many.

Clipping bounds a record's influence only then. Tried on made-up batches, also beside records a million times as large or not numbers at
all (a softmax made stable by the batch's maximum shows there and nowhere else), and with masks and labels that are to be ignored (as does a
loss that is divided by how many of them count in the whole batch), and with records that end in zeros, each from another place on, as
padding does (a model may cut its batch to the longest record, or sort it by length).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tptopk.gradients.examples import Batch, PerExampleLoss, beside, checked_losses, take, tensors_of
from tptopk.gradients.made_up import EXAMPLES, Maker, is_whole, losses_on
from tptopk.privacy.refusal import Refusal

IGNORED = (-100, -1, 255)  # labels that commonly mean: this one does not count
SIZES = (1e3, 1e6)  # of records that others must not notice
LARGE = 10**6  # a whole number that no class, but many an id or a count may be

MIXED = (
    "an example's loss depends on the other examples of its batch, so clipping one gradient does not bound one record's influence; "
    "make the model and the loss treat examples independently"
)


@torch.no_grad()
def refuse_mixing(model: nn.Module, loss: PerExampleLoss, make: Maker, trial: nn.Module) -> None:
    """An example's loss is the same whatever stands beside it, and however much; also beside masks and labels to ignore.

    What may be more than the model takes is tried on `trial` first: the model, or a copy of it on a CPU.
    """
    if _mixes(model, loss, make(0, EXAMPLES), make(1, EXAMPLES)):
        raise Refusal(MIXED)
    unusual = [_filled_with(value, make(1, EXAMPLES)) for value in (torch.nan, torch.inf)]
    for others in (*in_other_sizes(make(1, EXAMPLES)), *unusual):
        if _mixes_where_taken(model, loss, make(0, EXAMPLES), others):
            raise Refusal(
                MIXED + " (it shows beside very large records: a maximum or a norm that is taken over the whole batch "
                "must be taken over each example)"
            )
    for batch, others in zip(ending_in_zeros(make(0, EXAMPLES), 0), ending_in_zeros(make(1, EXAMPLES), 1), strict=True):
        if _mixes_where_taken(model, loss, batch, others):
            raise Refusal(
                MIXED
                + " (it shows where records end in zeros, as padded ones do: what is cut to the longest record of a "
                "batch must not change with its length)"
            )
    for batch, others in _with_masks_and_ignored(model, trial, loss, make):
        if _mixes_where_taken(model, loss, batch, others):
            raise Refusal(
                MIXED
                + " (it shows where masks or labels to ignore differ between records: a loss divided by the number of tokens that "
                "count must be divided by each example's own number, not by the batch's)"
            )


@torch.no_grad()
def refuse_mixing_among(model: nn.Module, loss: PerExampleLoss, make: Maker, examples: int) -> None:
    """The same of as many examples as a batch will have: a loss may compare them only where they are many."""
    batch, others = make(0, examples), make(1, examples)
    large = tree_map(lambda leaf: leaf * SIZES[0] if _is_filled(leaf) and _has_fractions(leaf) else leaf, others)
    place = torch.arange(examples, device=tensors_of(batch)[0].device) < examples // 2

    def first_half(beside_them: Batch) -> Tensor | None:
        """None where such values are more than the model or the loss takes."""
        whole = tree_map(lambda a, b: a if a is None else torch.where(beside(place, a), a, b), batch, beside_them)
        try:
            return held_fixed(loss, model, whole)[: examples // 2]
        except (torch.OutOfMemoryError, Refusal):
            raise
        except Exception:
            return None

    with deterministic(model, loss, make(0, EXAMPLES)):
        found = [half for half in map(first_half, (batch, others, large)) if half is not None]
    if any(not torch.allclose(found[0], half, rtol=1e-4, atol=1e-5, equal_nan=True) for half in found[1:]):
        raise Refusal(f"{MIXED} (it shows in a batch of {examples})")


class _NotTaken(Exception):
    """The model or the loss fails on such values."""


def _mixes_where_taken(model: nn.Module, loss: PerExampleLoss, batch: Batch, others: Batch) -> bool:
    """As `_mixes`, of examples that have a finite loss alone; where model or loss fail on the batch there is nothing to see.

    Only their own failure counts as one: an error of the comparison itself must not read as "does not mix".
    """

    def tried(model: nn.Module, batch: Batch) -> Tensor:
        try:
            losses = loss(model, batch)
        except Exception as error:
            raise _NotTaken from error
        return checked_losses(lambda *_: losses, model, batch)

    try:
        return _mixes(model, tried, batch, others, wherever_finite=True)
    except _NotTaken:
        return False


def _mixes(model: nn.Module, loss: PerExampleLoss, batch: Batch, others: Batch, wherever_finite: bool = False) -> bool:
    """Whether an example's loss changes with what stands beside it.

    With `wherever_finite` only examples are judged that have a finite loss when they are alone, and rounding is measured by the largest loss.
    """
    with deterministic(model, loss, batch):
        alone = torch.stack([_loss_alone(model, loss, batch, i, wherever_finite) for i in range(EXAMPLES)])
        judged = torch.isfinite(alone) if wherever_finite else torch.ones_like(alone, dtype=torch.bool)
        if not bool(judged.any()):
            return False
        slack = 1e-5 + (1e-4 * float(alone[judged].abs().max()) if wherever_finite else 0.0)

        def same(a: Tensor, b: Tensor) -> bool:
            return torch.allclose(a, b, rtol=1e-4, atol=slack)

        many = tree_map(lambda a, b: a if a is None else torch.cat([a, b, a[:1]]), batch, others)  # 17 examples
        for larger in (batch, many):
            if not same(held_fixed(loss, model, larger)[:EXAMPLES][judged], alone[judged]):
                return True
    here = held_fixed(loss, model, batch)
    for i in judged.nonzero().flatten().tolist()[: 2 if wherever_finite else EXAMPLES]:
        place = torch.arange(EXAMPLES, device=here.device) == i
        replaced = tree_map(lambda a, b: a if a is None else torch.where(beside(place, a), a, b), batch, others)  # noqa: B023
        if not same(held_fixed(loss, model, replaced)[i], here[i]):
            return True
    return False


def _loss_alone(model: nn.Module, loss: PerExampleLoss, batch: Batch, i: int, may_fail: bool) -> Tensor:
    try:
        return held_fixed(loss, model, take(batch, slice(i, i + 1)))[0]
    except _NotTaken:
        if not may_fail:
            raise
        return torch.full((), torch.nan, device=tensors_of(batch)[0].device)


def in_other_sizes(batch: Batch, unchanged: int = 0) -> list[Batch]:
    """The batch with numbers of other sizes from example `unchanged` on: in all of its tensors, and in each alone."""
    leaves, form = tree_flatten(batch)
    found = [n for n, leaf in enumerate(leaves) if _is_filled(leaf) and _has_fractions(leaf)]
    sets = [found] * (len(found) > 1) + [[n] for n in found]
    factors = torch.tensor([1.0 if n < unchanged else SIZES[n % len(SIZES)] for n in range(EXAMPLES)])

    def sized(leaf: Tensor) -> Tensor:
        return leaf * beside(factors.to(leaf.device, leaf.real.dtype), leaf)

    return [tree_unflatten([sized(v) if n in changed else v for n, v in enumerate(leaves)], form) for changed in sets]


def ending_in_zeros(batch: Batch, seed: int) -> list[Batch]:
    """The batch with zeros (and booleans turned round) from some place on, another in each example: along the second axis, and along the last."""
    leaves, form = tree_flatten(batch)
    found = []
    for axis in (1, -1):
        ended = [
            _ended(leaf, axis, seed) if _is_filled(leaf) and (axis == 1 or leaf.dim() > 2) else leaf for leaf in leaves
        ]
        if any(new is not old for new, old in zip(ended, leaves, strict=True)):
            found.append(tree_unflatten(ended, form))
    return found


def padded(model: nn.Module, trial: nn.Module, loss: PerExampleLoss, batch: Batch) -> list[Batch]:
    """The batch with records of different lengths, short and long ones in turn, in each way in which that is often said.

    By zeros; by an id or a number that stands for nothing, from some place on; by whole numbers that may be lengths. What `trial`, the model
    or a copy of it on a CPU, does not take, or gives no finite loss for, is left out.
    """
    leaves, form = tree_flatten(batch)
    found = ending_in_zeros(batch, 0)
    longest = max((max(leaf.shape[1:]) for leaf in leaves if _is_filled(leaf) and leaf.dim() > 1), default=1)
    for n, leaf in enumerate(leaves):
        if not _is_filled(leaf) or leaf.dtype == torch.bool:
            continue
        if leaf.dim() > 1:
            ends = [-1.0, torch.nan] if _has_fractions(leaf) else [*_labels_to_ignore(model, leaf), 1, 2, 3]
            changed = [_ended(leaf, axis, 0, end) for end in ends for axis in ((1, -1) if leaf.dim() > 2 else (1,))]
        elif is_whole(leaf.dtype):
            changed = [_lengths(len(leaf), longest, 0).to(leaf)]
        else:
            continue
        found += [tree_unflatten([*leaves[:n], new, *leaves[n + 1 :]], form) for new in changed if new is not leaf]
    return [each for each in found if _finite(trial, model, loss, each)]


def _lengths(examples: int, longest: int, seed: int) -> Tensor:
    """From 1 to `longest`: of every two examples the first is short and the second long."""
    order = np.random.default_rng(20 + seed)
    shares = np.linspace(0.0, 1.0, examples)
    short, long = order.permutation(shares[: (examples + 1) // 2]), order.permutation(shares[(examples + 1) // 2 :])
    shares[0::2], shares[1::2] = short, long
    return torch.as_tensor(1 + np.rint(shares * (longest - 1)).astype(int))


def _ended(leaf: Tensor, axis: int, seed: int, end: float | None = None) -> Tensor:
    """From some place on `end`, or zeros, or booleans turned round; the leaf itself where it has no such places."""
    if leaf.dim() < 2 or leaf.shape[axis] < 2:
        return leaf
    starts = _lengths(len(leaf), leaf.shape[axis], seed).to(leaf.device)
    places = torch.arange(leaf.shape[axis], device=leaf.device).view(-1, *[1] * (leaf.dim() - 1 - axis % leaf.dim()))
    other = ~leaf if leaf.dtype == torch.bool else torch.full_like(leaf, 0 if end is None else end)
    return torch.where(places >= beside(starts, leaf), other, leaf)


@torch.no_grad()
def _finite(trial: nn.Module, model: nn.Module, loss: PerExampleLoss, batch: Batch) -> bool:
    try:
        with torch.random.fork_rng():
            return bool(torch.isfinite(losses_on(trial, model, loss, batch)).all())
    except Exception:
        return False


def _filled_with(value: float, batch: Batch) -> Batch:
    return tree_map(
        lambda leaf: torch.full_like(leaf, value) if _is_filled(leaf) and _has_fractions(leaf) else leaf, batch
    )


def _has_fractions(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _labels_to_ignore(model: nn.Module, leaf: Tensor) -> list[int]:
    """Those in common use, and the last id of each embedding and the one it pads with, as far as the type holds them."""
    tables = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    own = [n for m in tables for n in (m.num_embeddings - 1, m.padding_idx) if n is not None]
    limits = torch.iinfo(leaf.dtype)
    return [label for label in dict.fromkeys((*IGNORED, *own)) if limits.min <= label <= limits.max]


def _with_masks_and_ignored(
    model: nn.Module, trial: nn.Module, loss: PerExampleLoss, make: Maker
) -> Iterator[tuple[Batch, Batch]]:
    """Pairs of made-up batches with booleans that differ from record to record, and with integers that are in part an ignored label.

    What the model or the loss fails on, such as an id that no embedding has, is left out.
    """
    leaves = tree_flatten(make(0, EXAMPLES))[0]
    masks = [n for n, leaf in enumerate(leaves) if _is_filled(leaf) and leaf.dtype == torch.bool]
    whole = [n for n, leaf in enumerate(leaves) if _is_filled(leaf) and is_whole(leaf.dtype)]

    def changed(
        pair: list[Batch], which: list[int], how: Callable[[Tensor, np.random.Generator], Tensor]
    ) -> list[Batch]:
        found = []
        for seed, batch in enumerate(pair):
            generator, (parts, form) = np.random.default_rng(10 + seed), tree_flatten(batch)
            parts = [how(part, generator) if n in which else part for n, part in enumerate(parts)]
            found.append(tree_unflatten(parts, form))
        return found

    def runs(pair: list[Batch]) -> bool:
        try:
            for batch in pair:
                losses_on(trial, model, loss, batch)
        except Exception:
            return False
        return True

    plain = [make(0, EXAMPLES), make(1, EXAMPLES)]
    masked = [changed(plain, masks, how) for how in (_scattered, _ending, _beginning)] if masks else []
    masked = [pair for pair in masked if runs(pair)]
    yield from ((batch, others) for batch, others in masked)
    for n in whole:
        largest = min(LARGE, torch.iinfo(leaves[n].dtype).max)
        large = changed(plain, [n], lambda leaf, generator: torch.full_like(leaf, largest))[1]  # noqa: B023
        if runs([large]):
            yield plain[0], large
    for base in [plain, *masked[:1]]:
        for n in whole:
            for label in _labels_to_ignore(model, leaves[n]):
                pair = changed(base, [n], lambda leaf, generator: _partly(label, leaf, generator))  # noqa: B023
                if runs(pair):
                    yield pair[0], pair[1]


def _is_filled(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.numel() > 0


def _scattered(leaf: Tensor, generator: np.random.Generator) -> Tensor:
    """Booleans, each by chance, of another share in each record; of several, one is true and one false."""
    drawn = generator.random((len(leaf), leaf[0].numel())) < generator.uniform(0.2, 0.8, (len(leaf), 1))
    for record in drawn if drawn.shape[1] > 1 else [drawn[:, 0]]:
        one, other = generator.choice(len(record), 2, replace=False)
        record[one], record[other] = True, False
    return torch.as_tensor(drawn).view(leaf.shape).to(leaf.device)


def _ending(leaf: Tensor, generator: np.random.Generator) -> Tensor:
    """Booleans that are true from somewhere on along the last axis, as those of padding."""
    if leaf.dim() == 1:
        return _scattered(leaf, generator)
    length = leaf.shape[-1]
    starts = generator.integers(1, max(2, length), (len(leaf), *[1] * (leaf.dim() - 1)))
    ending = np.broadcast_to(np.arange(length) >= starts, tuple(leaf.shape))
    return torch.as_tensor(ending.copy()).to(leaf.device)


def _beginning(leaf: Tensor, generator: np.random.Generator) -> Tensor:
    return ~_ending(leaf, generator)


def _partly(label: int, leaf: Tensor, generator: np.random.Generator) -> Tensor:
    return torch.where(_scattered(leaf, generator), torch.full_like(leaf, label), leaf)


def held_fixed(loss: PerExampleLoss, model: nn.Module, batch: Batch, seed: int = 0) -> Tensor:
    """Losses with torch's own randomness (dropout) held fixed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return loss(model, batch)


@contextmanager
def deterministic(model: nn.Module, loss: PerExampleLoss, batch: Batch) -> Iterator[None]:
    """As near to training mode as the model can be without chance: as it is, or without dropout, or in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    dropout = [
        m
        for m in modes
        if isinstance(m, nn.modules.dropout._DropoutNd) or isinstance(getattr(m, "dropout", None), float)
    ]
    try:
        for quiet in ([], dropout, list(modes)):
            for module in quiet:
                module.training = False
            with torch.no_grad():
                once, again = (held_fixed(loss, model, batch, seed=seed).nan_to_num() for seed in (1, 2))
                if torch.equal(once, again):
                    break
        yield
    finally:
        for module, training in modes.items():
            module.training = training
