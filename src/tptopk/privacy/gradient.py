"""The wall: what has passed the mechanism, and may be looked at freely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class PrivateGradient:
    """One step's clipped, noised and divided gradient sum, zero outside the support.

    Formal guarantees: made by `training/mechanism.py` alone (a test reads the source tree for it), after the
    step was charged. Whatever is computed from it without looking at the data again is post-processing and
    costs nothing. `noise_std` is ν = σC/B on every active coordinate, a public number.
    """

    values: Mapping[str, Tensor]
    noise_std: float
    phase: int
    step: int  # within the phase


def require_private(gradient: object) -> PrivateGradient:
    """Refuse anything that has not passed the mechanism."""
    if not isinstance(gradient, PrivateGradient):
        raise TypeError(
            f"expected a PrivateGradient, got {type(gradient).__name__}: only what the mechanism has released "
            "may be scored, logged or used to choose a support"
        )
    return gradient
