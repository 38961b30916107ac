"""Scores: how much signal each coordinate seems to carry, from private gradients alone.

A score accumulates `PrivateGradient`s and nothing else. To add one, write a function from the paper's score to
another ranking and name it in `SCORES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tptopk.privacy.gradient import PrivateGradient, require_private
from tptopk.privacy.refusal import Refusal, nearest
from tptopk.supports.support import Support


class CoordinateScores:
    """The paper's score, over the steps in which a coordinate was active.

    a_p = (1/T_p) Σ_t (g̃²_{t,p} − ν_t²): the mean squared private gradient less the known noise variance, an
    unbiased estimate of the squared signal. T_p counts the steps with p active; in a dense warm-up that is T₁.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._seen: dict[str, Tensor] = {}

    def add(self, gradient: PrivateGradient, support: Support) -> None:
        """Take in one step. `support` is the one that the gradient was released on."""
        gradient = require_private(gradient)
        for name, value in gradient.values.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(value)
                self._seen[name] = torch.zeros_like(value, dtype=torch.int32)
            self._sums[name] += support.keep(name, value.square() - gradient.noise_std**2)
            self._seen[name] += support[name]

    def state(self) -> dict[str, Tensor]:
        return {f"sums/{n}": v for n, v in self._sums.items()} | {f"seen/{n}": v for n, v in self._seen.items()}

    def restore(self, sums: Mapping[str, Tensor], seen: Mapping[str, Tensor]) -> None:
        self._sums, self._seen = dict(sums), dict(seen)

    def seen(self) -> dict[str, Tensor]:
        """Which coordinates have been active at least once."""
        return {name: count > 0 for name, count in self._seen.items()}

    def values(self) -> dict[str, Tensor]:
        """a_p, zero where a coordinate was never active."""
        return {name: total / self._seen[name].clamp(min=1) for name, total in self._sums.items()}


def paper(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The paper's ranking: each coordinate by its own score."""
    return dict(scores)


def factored(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Row mean × column mean of each weight's scores, in the manner of Adafactor's second moments.

    A single coordinate's score is mostly noise at small ε; whole rows and columns are less so. A weight of
    shape [out, in, …] is read as a matrix with `out` rows. Negative means count as zero. The product is divided
    by the weight's overall mean, so that scores of different weights stay comparable. Vectors keep their own.
    """
    ranked = {}
    for name, score in scores.items():
        if score.dim() < 2:
            ranked[name] = score.clone()
            continue
        matrix = score.reshape(score.shape[0], -1)
        rows, columns = matrix.mean(1).clamp(min=0), matrix.mean(0).clamp(min=0)
        overall = matrix.mean().clamp(min=torch.finfo(score.dtype).tiny)
        ranked[name] = (torch.outer(rows, columns) / overall).nan_to_num(posinf=0.0).reshape(score.shape)
    return ranked


SCORES: dict[str, Callable[[Mapping[str, Tensor]], dict[str, Tensor]]] = {"paper": paper, "factored": factored}


def score_named(name: str) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    if name not in SCORES:
        raise Refusal(f"unknown score {name!r}{nearest(str(name), SCORES)}")
    return SCORES[name]
