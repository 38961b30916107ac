"""What outlives a call of the model or the loss: tensors, and numbers, texts, arrays and containers in plain attributes.

Whatever of it changes with the data carries the data past the mechanism. A running maximum, kept as a plain number, is enough.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tptopk.gradients.examples import Batch, PerExampleLoss, take
from tptopk.gradients.mixing import EXAMPLES, Maker, in_other_sizes
from tptopk.privacy.refusal import Refusal

OWN = ("_parameters", "_buffers", "_modules")  # where a module keeps what it names itself
LONG = 10_000  # entries of a container from which on its length alone is looked at
DEEP = 12  # objects within objects that are looked into
OPAQUE = (type, ModuleType, BuiltinFunctionType, torch.device, torch.dtype)


def lasting_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that outlives a call of the model: parameters, buffers, and tensors in plain attributes."""
    found = {f"parameter {n}": p for n, p in model.named_parameters()} | {
        f"buffer {n}": b for n, b in model.named_buffers()
    }
    for module_name, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OWN:
                for n, leaf in enumerate(_tensors_in(value)):
                    found[f"attribute {module_name}.{name}[{n}]"] = leaf
    return found


def versions_of(model: nn.Module) -> list[tuple[Hashable, ...]]:
    """Changes whenever a tensor of the model is written to, replaced, added or dropped, or a number with a fraction changes.

    Whole numbers may count calls; what else they count is tried out before training.
    """
    tensors = [(name, id(tensor), tensor._version) for name, tensor in lasting_tensors(model).items()]
    numbers = [
        (module_name, name, value)
        for module_name, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
    ]
    return [*tensors, *numbers]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def refuse_traces(model: nn.Module, loss: PerExampleLoss, make: Maker) -> None:
    """Running the model on other examples, on fewer of them and on very large ones leaves nothing behind.

    A whole number that grows by the same at each call counts the calls, and may. The first call must have been made:
    it fills caches that are filled once.
    """
    runs: list[Callable[[], Batch]] = [
        lambda: make(1, EXAMPLES),
        lambda: take(make(2, EXAMPLES), slice(0, EXAMPLES - 3)),
        *(lambda batch=batch: batch for batch in in_other_sizes(make(3, EXAMPLES))),
    ]
    tensors = {name: t.detach().clone() for name, t in lasting_tensors(model).items()}
    values = [kept(model, loss)]
    for number, run in enumerate(runs):
        try:
            loss(model, run())
        except Exception:
            if number == 0:
                raise
            continue  # such values, or so few, are more than the model or the loss takes
        after = lasting_tensors(model)
        for name in tensors.keys() | after.keys():
            if name not in tensors or name not in after or not torch.equal(tensors[name], after[name].detach()):
                raise Refusal(f"{name} changes when the model is run: it would carry data past the mechanism")
        values.append(kept(model, loss))
    for name in dict.fromkeys(name for found in values for name in found):
        seen = [found.get(name) for found in values]
        if any(value != seen[0] for value in seen) and not _counts(seen):
            raise Refusal(f"{name} changes when the model is run: it would carry data past the mechanism")


def _counts(seen: list[Hashable]) -> bool:
    numbers = [value for value in seen if isinstance(value, int) and not isinstance(value, bool)]
    return len(numbers) == len(seen) and len({b - a for a, b in pairwise(numbers)}) == 1


def kept(model: nn.Module, loss: Callable[..., Any]) -> dict[str, Hashable]:
    """Where → what is kept there, in a form that can be compared: of all but the model's tensors."""
    found: dict[str, Hashable] = {}
    seen = {id(tensor) for tensor in lasting_tensors(model).values()}
    for module_name, module in model.named_modules():
        seen.add(id(module))
        for name, value in vars(module).items():
            if name not in OWN:
                _keep(f"attribute {module_name}.{name}", value, found, seen)
    _keep("the loss", loss, found, seen)
    return found


def _keep(where: str, value: Any, found: dict[str, Hashable], seen: set[int], depth: int = 0) -> None:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        found[where] = repr(value) if isinstance(value, (float, complex)) else value
        return
    if isinstance(value, OPAQUE) or id(value) in seen or depth > DEEP:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        found[where] = (id(value), value._version)
    elif isinstance(value, np.ndarray):
        found[where] = hashlib.sha256(np.ascontiguousarray(value).tobytes()).digest() if value.dtype != object else len(value)  # fmt: skip
    elif isinstance(value, torch.Generator):
        found[where] = bytes(value.get_state().tolist())
    elif isinstance(value, (set, frozenset)):
        found[where] = frozenset(map(repr, value)) if len(value) < LONG else len(value)
    elif isinstance(value, (Mapping, list, tuple, deque)):
        found[f"the length of {where}"] = (len(value),)
        if len(value) < LONG:
            items = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
            for key, item in items:
                _keep(
                    f"{where}[{key!r}]" if isinstance(key, (int, str)) else f"{where}[…]", item, found, seen, depth + 1
                )
    elif isinstance(value, MethodType):
        _keep(where, value.__self__, found, seen, depth + 1)
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            _keep(f"{where}, {name}", content, found, seen, depth + 1)
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            _keep(f"{where}.{name}", item, found, seen, depth + 1)
