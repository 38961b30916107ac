"""The other wall: what was computed from data without privacy, to be looked at and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Oracle(Generic[T]):
    """A diagnostic of true gradients, outside every guarantee.

    It is neither a number nor a tensor: arithmetic with it fails, and supports, policies and `fit` refuse it by name.
    Whoever takes `value` out and steers training by it has left the guarantee.
    """

    value: T

    def __bool__(self) -> bool:
        raise TypeError("an oracle is neither true nor false: it is there to be looked at, not to decide by")

    def __repr__(self) -> str:
        return f"Oracle({self.value!r}, not private)"


def refuse_oracles(given: Mapping[str, object]) -> None:
    """Refuse an oracle among named arguments, or one level inside a mapping or sequence among them."""
    for name, value in given.items():
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        if isinstance(value, Oracle) or any(isinstance(part, Oracle) for part in inside):
            raise TypeError(
                f"{name} is an oracle: it was computed without privacy, to be looked at after the fact; training, scores and supports "
                "accept only what the mechanism has released"
            )
