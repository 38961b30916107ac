"""Hooks of the user's module that stay with the module they were put on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Door:
    """A hook of the module: of a copied or pickled module it is another's, and does nothing."""

    def __init__(self, module: nn.Module, act: Callable[..., None]) -> None:
        self._module, self._act = module, act

    def __call__(self, module: nn.Module, *given: Any) -> None:
        if module is self._module:
            self._act(*given)

    def __deepcopy__(self, memo: object) -> Door:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return closed_door, ()


def closed_door() -> Callable[..., None]:
    return _nothing


def _nothing(*given: Any) -> None:
    return
