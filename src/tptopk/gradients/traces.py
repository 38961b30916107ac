"""What outlives a call of the model or the loss: tensors, and numbers, texts, arrays and containers in plain attributes.

Whatever of it changes with the data carries the data past the mechanism. A running maximum, kept as a plain number, is enough.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, pairwise
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tptopk.gradients.examples import Batch, PerExampleLoss, take
from tptopk.gradients.made_up import EXAMPLES, Maker
from tptopk.gradients.mixing import in_other_sizes
from tptopk.privacy.refusal import Refusal

OWN = ("_parameters", "_buffers", "_modules")  # where a module keeps what it names itself
LONG = 10_000  # entries of a container from which on they are looked at all at once, where they are plain
PLAIN = {bool, int, float, complex, str, bytes, type(None)}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number
SMALL = 2**16  # numbers
DEEP = 12  # objects within objects that are looked into
Seen = dict[int, Any]  # id → what has it, held so that nothing else can have it meanwhile
# whose classes and functions keep nothing of the data
LIBRARIES = {"torch", "numpy", "transformers", "tptopk", *sys.stdlib_module_names}
READ = (Tensor, np.ndarray, list, dict, set, deque, bytearray, array, SimpleNamespace)  # by name, in a file
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

    Through `.data` a tensor is written to without a new version, so what it holds counts too. Whole numbers may count calls;
    what else they count is tried out before training.
    """
    lasting = lasting_tensors(model)
    contents = contents_of(lasting.values())
    tensors = [(n, id(t), t._version, content) for (n, t), content in zip(lasting.items(), contents, strict=True)]
    numbers = [
        (module_name, name, value)
        for module_name, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
    ]
    return [*tensors, *numbers]


@torch.no_grad()
def contents_of(tensors: Iterable[Tensor]) -> list[int]:
    """The sum of each tensor's bits, taken as whole numbers; in small ones each has a weight of its own, so that order counts."""
    sums: dict[torch.device, list[Tensor]] = {}
    order = []
    for tensor in tensors:
        of_device = sums.setdefault(tensor.device, [])
        order.append((tensor.device, len(of_device)))
        of_device.append(_sum_of_bits(tensor.detach()))
    found = {device: torch.stack(of_device).tolist() for device, of_device in sums.items()}
    return [found[device][place] for device, place in order]


def _sum_of_bits(plain: Tensor) -> Tensor:
    if plain.is_meta or plain.is_nested:  # holds nothing, or cannot be looked at as a whole
        return torch.zeros((), dtype=torch.int64, device="cpu" if plain.is_meta else plain.device)
    plain = plain.to_dense() if plain.layout != torch.strided else plain
    plain = plain.int_repr() if plain.is_quantized else plain.resolve_conj().resolve_neg()
    plain = (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous().view(-1)
    words = (plain.numel() * plain.element_size()) % 8 == 0 == (plain.storage_offset() * plain.element_size()) % 8
    bits = plain.view(torch.int64 if words else BITS[plain.element_size()])  # eight bytes at a time are quicker
    if 0 < len(bits) <= SMALL:
        bits = bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)
    return bits.sum(dtype=torch.int64)


class ModelChanged(RuntimeError):
    """The model holds what it must not: it may not be saved or released any more."""


@contextmanager
def unchanged(model: nn.Module, doing: str) -> Iterator[None]:
    """Fails if the model is changed meanwhile, also where that ended in another error: it would carry data past the mechanism."""
    before = versions_of(model)
    try:
        yield
    finally:
        refuse_changed(model, before, doing)


def refuse_changed(model: nn.Module, before: list[tuple[Hashable, ...]], doing: str) -> None:
    if versions_of(model) != before:
        raise ModelChanged(
            f"the model was changed while {doing}, which would carry data past the mechanism; the model in memory may hold "
            "records, and must not be saved or released"
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
    """Running the model forward and backward on other examples, on fewer of them and on very large ones leaves nothing behind.

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
            _forward_and_backward(model, loss, run())
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


def _forward_and_backward(model: nn.Module, loss: PerExampleLoss, batch: Batch) -> None:
    losses = loss(model, batch)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with suppress(RuntimeError):  # where backward fails no engine is right, which is said with its reason later
        torch.autograd.grad(losses.sum(), parameters, allow_unused=True)


class FirstBatch:
    """Made before the model is run for the first time; `refuse`, called after that, finds what its first batch has set.

    What is the same whatever that batch holds is a table that is made once, when it is first needed, and may be.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: t.detach().clone() for name, t in _saved(model).items()}
        self._fresh: nn.Module | None = None
        with suppress(Exception):  # some models cannot be copied
            self._fresh = copy.deepcopy(model)

    def refuse(self, loss: PerExampleLoss, one: Batch, another: Batch) -> None:
        now = _saved(self._model)
        changed = [n for n in now if n not in self._before or not _same(self._before[n], now[n])]
        if not changed:
            return
        both = []
        pair = [] if self._fresh is None else [copy.deepcopy(self._fresh), self._fresh]
        for fresh, batch in zip(pair, (one, another), strict=False):
            with torch.random.fork_rng():
                torch.manual_seed(0)  # a table may be drawn by chance
                loss(fresh, batch)
            both.append(_saved(fresh))
        for name in changed:
            if not both or any(name not in found for found in both):
                raise Refusal(
                    f"{name} is set by the first batch, and whether by what that holds cannot be told: the model cannot be copied, or the loss does not "
                    "run the model it is given. Fill it when the model is built"
                )
            never_run = name in self._before and _same(self._before[name], both[0][name])
            if never_run or not _same(both[0][name], both[1][name]):
                raise Refusal(
                    f"{name} is set by the first batch: it would carry data past the mechanism. A table that depends on no data is best made when the "
                    "model is built"
                )


def saved_contents(model: nn.Module) -> list[int]:
    return contents_of(_saved(model).values())


def _saved(model: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in lasting_tensors(model).items() if not name.startswith("attribute")}


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
        _keep_of_class(type(module), found, seen)
    _keep("the loss", loss, found, seen)
    return found


def _keep_of_class(kind: type, found: dict[str, Hashable], seen: Seen) -> None:
    """What a class holds for all its objects, and what its methods read by name; not of torch's own classes."""
    for one in kind.__mro__:
        if _is_library(one) or id(one) in seen:
            continue
        seen[id(one)] = one
        for name, value in vars(one).items():
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not name.startswith("__") or isinstance(value, FunctionType):
                _keep(f"class {one.__name__}.{name}", value, found, seen, 1)


def _is_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] in LIBRARIES


def _names_read(code: CodeType) -> Iterator[str]:
    """By a function and those within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_read(inner)


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
        found[where] = (id(value), value._version, *contents_of([value]))
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
        for name in dict.fromkeys(_names_read(value.__code__)):
            content = value.__globals__.get(name)
            if isinstance(content, type):
                _keep_of_class(content, found, seen)
            elif isinstance(content, (*READ, int, float)) or (
                isinstance(content, FunctionType) and not _is_library(content)
            ):
                _keep(f"{name}, which {where} reads", content, found, seen, depth + 1)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            _keep(f"{where}, {name}", content, found, seen, depth + 1)
    else:
        _keep_of_class(type(value), found, seen)
        slots = [n for kind in type(value).__mro__ for n in _names(getattr(kind, "__slots__", ())) if hasattr(value, n)]
        for name, item in [*getattr(value, "__dict__", {}).items(), *((n, getattr(value, n)) for n in slots)]:
            _keep(f"{where}.{name}", item, found, seen, depth + 1)


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return [slots] if isinstance(slots, str) else slots
