"""How much memory a clipped sum takes, found out on made-up examples, and the batch that a limit allows.

The peak of a batch of b examples is at most fixed + b · each: weights of the model and tables of the support do not
grow with the batch, and everything else (activations, output gradients, gradients written out) is kept for each
example. Both numbers are measured on two small batches: on CUDA by the allocator, on a CPU by counting the tensors
that are alive.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tptopk.privacy.refusal import Refusal

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
SMALL = 4  # examples in the first small batch; twice as many in the second
SPARE = 1.1  # libraries' own workspaces grow unevenly


@dataclass(frozen=True)
class MemoryBound:
    """Bytes that a clipped sum of b examples takes beyond what it finds: at most fixed + b · each."""

    fixed: int
    each: int

    def of(self, examples: int) -> int:
        return self.fixed + examples * self.each

    def largest_batch(self, limit: int) -> int:
        """As many examples as fit; refuses a limit that not one example fits."""
        if self.of(1) > limit:
            raise Refusal(
                f"memory_limit is {in_words(limit)}, and one example of this model takes {in_words(self.of(1))}; "
                "raise the limit or shrink the model"
            )
        return (limit - self.fixed) // max(1, self.each)


def memory_bound(step: Callable[[int], object], device: torch.device) -> MemoryBound:
    """The bound for `step(examples)`, a clipped sum of that many made-up examples."""
    step(SMALL)  # what is made once, such as a support's tables, is not counted
    small, large = (peak_bytes(lambda n=n: step(n), device) for n in (SMALL, 2 * SMALL))  # type: ignore[misc]
    each = max(0, large - small) / SMALL
    return MemoryBound(fixed=round(SPARE * max(0.0, small - SMALL * each)), each=round(SPARE * each))


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most memory that `step` took at any time beyond what it found."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    alive = _Alive()
    with alive:
        step()
    return alive.peak


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._known:
                    self._known[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._drop, key)
        self.peak = max(self.peak, self.now)
        return result

    def _drop(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


def parse_bytes(limit: int | str) -> int:
    """A number of bytes, or text such as "4GiB"."""
    if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
        return limit
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B)?\s*", str(limit))
    if isinstance(limit, str) and found and (found[2] or "") in UNITS and float(found[1]) > 0:
        return int(float(found[1]) * UNITS[found[2] or ""])
    raise Refusal(f"memory_limit is {limit!r}; it must be a number of bytes, or text such as '4GiB' or '500MB'")


def in_words(count: float) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if count >= UNITS[unit]:
            return f"{count / UNITS[unit]:.3g} {unit}"
    return f"{count:.0f} bytes"
