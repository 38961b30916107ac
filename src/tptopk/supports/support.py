"""A support: the active coordinates of a model, one boolean mask per named parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from tptopk.privacy.oracle import refuse_oracles
from tptopk.privacy.refusal import Refusal


class Support:
    """An immutable set of coordinates of named parameters. d counts all of them, k the active ones.

    The parameters' order (the model's own) is the flat order; it matters only where ties are broken.
    """

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        refuse_oracles({"the support": masks})
        for name, mask in masks.items():
            if mask.dtype != torch.bool:
                raise TypeError(f"the mask of {name} is {mask.dtype}; a support holds booleans")
        self.masks = dict(masks)
        self._indices: dict[str, Tensor] = {}
        self._numbers: dict[str, Tensor] = {}
        self._flat: Tensor | None = None
        self._some: dict[tuple[str, ...], Tensor] = {}
        self._crossings: dict[str, tuple[Tensor | None, Tensor | None, bool]] = {}
        counts = torch.stack([mask.sum() for mask in masks.values()]).tolist() if masks else []
        self.sizes: dict[str, int] = dict(zip(masks, counts, strict=True))
        self.size: int = sum(counts)  # k
        self.total = sum(mask.numel() for mask in masks.values())  # d

    @classmethod
    def full(cls, model: nn.Module) -> Support:
        """Every trainable coordinate. Parameters with `requires_grad=False` are outside d."""
        return cls({name: torch.ones_like(p, dtype=torch.bool) for name, p in trainable(model).items()})

    @property
    def ratio(self) -> float:
        """ρ = k/d, the realised active ratio."""
        return self.size / self.total if self.total else 0.0

    @property
    def is_full(self) -> bool:
        return self.size == self.total

    def covers(self, name: str) -> bool:
        """Whether every coordinate of the parameter is active."""
        return self.sizes[name] == self.masks[name].numel()

    def __getitem__(self, name: str) -> Tensor:
        return self.masks[name]

    def indices(self, name: str) -> Tensor:
        """The active coordinates of a parameter as flat indices, in order; worked out once."""
        if name not in self._indices:
            self._indices[name] = torch.nonzero(self.masks[name].reshape(-1))[:, 0]
        return self._indices[name]

    def pick(self, name: str, values: Tensor) -> Tensor:
        """The active coordinates [B, k] of values [B, n] of a parameter; what is at the others does not matter."""
        return values.index_select(1, self.indices(name))

    def rows_and_columns(self, name: str) -> tuple[Tensor | None, Tensor | None, bool]:
        """Which rows and columns of a weight [out, …] hold active coordinates (None: all), and whether all they cross are active."""
        if name not in self._crossings:
            mask = self.masks[name].reshape(len(self.masks[name]), -1)
            rows, columns = mask.any(1), mask.any(0)
            is_product = bool((mask == torch.outer(rows, columns)).all())
            self._crossings[name] = (
                None if bool(rows.all()) else torch.nonzero(rows)[:, 0],
                None if bool(columns.all()) else torch.nonzero(columns)[:, 0],
                is_product,
            )
        return self._crossings[name]

    def as_numbers(self, name: str) -> Tensor:
        """The mask of a weight [out, …] where its active rows and columns cross, as ones and zeros; made once."""
        if name not in self._numbers:
            rows, columns, _ = self.rows_and_columns(name)
            mask = self.masks[name].reshape(len(self.masks[name]), -1)
            mask = mask if rows is None else mask.index_select(0, rows)
            self._numbers[name] = (mask if columns is None else mask.index_select(1, columns)).float()
        return self._numbers[name]

    @property
    def flat_indices(self) -> Tensor:
        """The active coordinates of the whole model, its parameters laid end to end in order; worked out once."""
        if self._flat is None:
            self._flat = torch.nonzero(torch.cat([mask.reshape(-1) for mask in self.masks.values()]))[:, 0]
        return self._flat

    def flat_indices_of(self, names: tuple[str, ...]) -> Tensor:
        """The active coordinates of some parameters, as places in the whole model laid end to end; worked out once."""
        if names not in self._some:
            starts, start = {}, 0
            for name, mask in self.masks.items():
                starts[name], start = start, start + mask.numel()
            self._some[names] = torch.cat([starts[name] + self.indices(name) for name in names])
        return self._some[names]

    def keep(self, name: str, values: Tensor) -> Tensor:
        """`values` with inactive coordinates set to zero, by selection: 0 × NaN would be NaN. Leading axes broadcast."""
        if self.covers(name):
            return values
        return torch.where(self.masks[name], values, torch.zeros((), dtype=values.dtype, device=values.device))

    def union(self, other: Support) -> Support:
        if self._shapes() != other._shapes():
            raise Refusal("the two supports are of different models")
        return Support({name: mask | other.masks[name].to(mask.device) for name, mask in self.masks.items()})

    def to(self, device: torch.device | str) -> Support:
        return Support({name: mask.to(device) for name, mask in self.masks.items()})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Support):
            return NotImplemented
        return self._shapes() == other._shapes() and all(
            torch.equal(mask, other.masks[name].to(mask.device)) for name, mask in self.masks.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Support(k={self.size}, d={self.total}, ratio={self.ratio:.4g})"

    def _shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(mask.shape)) for name, mask in self.masks.items()]

    def save(self, path: str | Path) -> None:
        """One bit a coordinate, in a safetensors file."""
        bits = {name: np.packbits(mask.cpu().numpy().reshape(-1)) for name, mask in self.masks.items()}
        save_file(bits, str(path), metadata={"tptopk.support": json.dumps(self._shapes())})

    @classmethod
    def load(cls, path: str | Path) -> Support:
        try:
            with safe_open(str(path), "numpy") as file:
                shapes = json.loads((file.metadata() or {})["tptopk.support"])
                masks = {}
                for name, shape in shapes:
                    count = int(np.prod(shape, dtype=np.int64))
                    packed = file.get_tensor(name)
                    if packed.size != -(-count // 8):
                        raise ValueError(f"{name} holds {packed.size} bytes for {count} coordinates")
                    bits = np.unpackbits(packed, count=count)
                    masks[str(name)] = torch.from_numpy(bits.astype(bool).reshape(shape))
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise Refusal(f"{path} is not a saved support: {error}") from error
        return cls(masks)


class Shifting(Support):
    """One support after another in the same tensors, for a computation that is recorded once and replayed on each.

    Its sizes are those of a full support and no shape tells which coordinates are active: they are not picked, the
    others are set to zero.
    """

    def __init__(self, like: Support) -> None:
        super().__init__({name: torch.ones_like(mask) for name, mask in like.masks.items()})
        self._numbers = {name: mask.float().flatten(1) for name, mask in self.masks.items() if mask.dim() > 1}
        self._now: Support | None = None

    def become(self, support: Support) -> None:
        if support is self._now:
            return
        for name, mask in self.masks.items():
            mask.copy_(support.masks[name])
            if name in self._numbers:
                self._numbers[name].copy_(mask.flatten(1))
        self._now = support

    def covers(self, name: str) -> bool:
        return False

    def indices(self, name: str) -> Tensor:
        mask = self.masks[name]
        return self._indices.setdefault(name, torch.arange(mask.numel(), device=mask.device))

    def pick(self, name: str, values: Tensor) -> Tensor:
        return self.keep(name, values.view(len(values), *self.masks[name].shape)).flatten(1)

    def rows_and_columns(self, name: str) -> tuple[Tensor | None, Tensor | None, bool]:
        return None, None, False

    def as_numbers(self, name: str) -> Tensor:
        return self._numbers[name]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The named parameters that private training may update, in the model's order; a tied one appears once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
