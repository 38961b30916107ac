"""What outlives a call of the model or the loss: tensors, and numbers, texts, arrays and containers in plain attributes.

Whatever of it changes with the data carries the data past the mechanism. A running maximum, kept as a plain number, is enough.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tptopk.gradients.examples import Batch, PerExampleLoss, take
from tptopk.gradients.mixing import EXAMPLES, Maker, in_other_sizes
from tptopk.privacy.refusal import Refusal

OWN = ("_parameters", "_buffers", "_modules")  # where a module keeps what it names itself
LONG = 10_000  # entries of a container from which on they are looked at all at once, where they are plain
PLAIN = {bool, int, float, complex, str, bytes, type(None)}
DEEP = 12  # objects within objects that are looked into
Seen = dict[int, Any]  # id → what has it, held so that nothing else can have it meanwhile
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


@contextmanager
def unchanged(model: nn.Module, doing: str) -> Iterator[None]:
    """Fails if the model is changed meanwhile: that would carry data past the mechanism."""
    before = versions_of(model)
    yield
    if versions_of(model) != before:
        raise RuntimeError(
            f"the model was changed while {doing}, which would carry data past the mechanism; nothing was released"
        )


def _tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and depth < DEEP:
        items = value.values() if isinstance(value, dict) else value
        if len(value) >= LONG and _are_plain(items):
            return  # a vocabulary
        for item in items:
            yield from _tensors_in(item, depth + 1)


def _are_plain(items: Collection[Any]) -> bool:
    """Whether these are numbers, texts and tuples of such, now; said at the speed of C, as it is asked at every batch."""
    kinds = set(map(type, items))
    if tuple in kinds:
        kinds = (kinds - {tuple}) | set(map(type, chain.from_iterable(item for item in items if type(item) is tuple)))
    return kinds <= PLAIN


def _same(before: Tensor, after: Tensor) -> bool:
    before, after = (t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in (before, after))
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    return torch.equal(before, after) or bool(torch.isclose(before, after, rtol=0, atol=0, equal_nan=True).all())


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
            if name not in tensors or name not in after or not _same(tensors[name], after[name]):
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
    seen: Seen = {id(tensor): tensor for tensor in lasting_tensors(model).values()}
    for module_name, module in model.named_modules():
        seen[id(module)] = module
        for name, value in vars(module).items():
            if name not in OWN:
                _keep(f"attribute {module_name}.{name}", value, found, seen)
    _keep("the loss", loss, found, seen)
    return found


def _keep(where: str, value: Any, found: dict[str, Hashable], seen: Seen, depth: int = 0) -> None:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        found[where] = repr(value) if isinstance(value, (float, complex)) else value
        return
    if isinstance(value, np.generic):
        found[where] = repr(value.item())
        return
    if isinstance(value, OPAQUE) or id(value) in seen or depth > DEEP:
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        found[where] = (id(value), value._version)
    elif isinstance(value, np.ndarray):
        found[where] = hashlib.sha256(np.ascontiguousarray(value).tobytes()).digest() if value.dtype != object else len(value)  # fmt: skip
    elif isinstance(value, torch.Generator):
        found[where] = bytes(value.get_state().tolist())
    elif isinstance(value, (bytearray, memoryview, array)):
        found[where] = bytes(value)
    elif isinstance(value, partial):
        _keep(where, (value.func, value.args, value.keywords), found, seen, depth + 1)
    elif isinstance(value, (set, frozenset)):
        found[where] = frozenset(map(repr, value))
    elif isinstance(value, (Mapping, list, tuple, deque)):
        found[f"the length of {where}"] = (len(value),)
        items = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
        if len(value) >= LONG and _are_plain([item for _, item in items]):
            found[where] = hashlib.sha256(repr(items).encode()).digest()
            return
        for key, item in items:
            _keep(f"{where}[{key!r}]" if isinstance(key, (int, str)) else f"{where}[…]", item, found, seen, depth + 1)
    elif isinstance(value, MethodType):
        _keep(where, value.__self__, found, seen, depth + 1)
    elif isinstance(value, FunctionType):
        _keep(f"{where}'s defaults", (value.__defaults__, value.__kwdefaults__), found, seen, depth + 1)
        _keep(f"{where}'s attributes", vars(value), found, seen, depth + 1)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            _keep(f"{where}, {name}", content, found, seen, depth + 1)
    else:
        slots = [n for kind in type(value).__mro__ for n in _names(getattr(kind, "__slots__", ())) if hasattr(value, n)]
        for name, item in [*getattr(value, "__dict__", {}).items(), *((n, getattr(value, n)) for n in slots)]:
            _keep(f"{where}.{name}", item, found, seen, depth + 1)


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return [slots] if isinstance(slots, str) else slots
