"""What the support of a run holds at the end of its warm-up, beside noise alone and beside chance.

The run keeps some training records out. At the first step after the warm-up the true gradient is computed on them: an
oracle, outside the guarantee, which training never sees. The same true gradient judges supports of both scores.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tptopk.diagnostics import composition, energy_concentration, oracle_capture, proxy_signal, true_gradient
from tptopk.experiments.features import features
from tptopk.experiments.recipes import Recipe
from tptopk.experiments.reproduce import held_out, measures, network_for, plan_for, provenance, train_one
from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.plan import Plan
from tptopk.supports.scores import SCORES, score_named
from tptopk.supports.selection import top_k
from tptopk.supports.warmup import WarmUp

RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)


class AtTheSwitch:
    """Given every private gradient; at the first one after the warm-up it looks at the model and the held-out records."""

    def __init__(self, model: nn.Module, plan: Plan, x: torch.Tensor, y: torch.Tensor) -> None:
        self._model, self._batches = model, list(zip(torch.split(x, 500), torch.split(y, 500), strict=True))
        self.warmup = WarmUp(plan)
        self.gradient: Any = None

    def __call__(self, private: PrivateGradient) -> None:
        if private.phase == 0:
            self.warmup.add(private)
        elif self.gradient is None:
            self.gradient = true_gradient(self._model, self._batches, _loss)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    losses = F.cross_entropy(model(x.flatten(0, 1)), y.repeat_interleave(x.shape[1]), reduction="none")
    return losses.view(len(x), -1).mean(1)


def run_quality(r: Recipe, data_dir: str | None, device: str) -> list[dict[str, Any]]:
    """One run of a two-phase method, judged at its switch: one row for each score, told apart by their recipes."""
    made = features(r.dataset, data_dir, r.views, r.shift, r.records, device)
    train, kept = held_out(made, r.held_out)
    model = network_for(r, train[0], made.scale)
    watch = AtTheSwitch(model, plan_for(r, train[0], model), *kept)
    started = time.monotonic()
    run = train_one(r, train, model, on_private_gradient=watch)
    seconds = round(time.monotonic() - started, 2)
    rows = []
    for score in SCORES:
        support = top_k(score_named(score)(watch.warmup.scores()), run.plan.active_coordinates(run.support.total))
        seen = proxy_signal(watch.warmup, support.size, score=score)
        captured = oracle_capture(watch.gradient, support).value
        rows.append(
            {
                "dataset": r.dataset,
                "method": r.method,
                "target_epsilon": r.target_epsilon,
                "seed": r.seed,
                "score": score,
                "active_ratio": r.active_ratio,
                "active": support.size,
                "coordinates": support.total,
                "proxy": seen.value,
                "proxy_noise_only": seen.noise_only,
                "proxy_noise_only_std": seen.noise_only_std,
                "oracle": captured.share,
                "random": captured.random,
                "concentration": energy_concentration(watch.gradient, RATIOS).value,
                "composition": [asdict(layer) for layer in composition(support)],
                "held_out_accuracy": measures(run.model, *kept)["accuracy"],
                "seconds": seconds,
                **provenance(replace(r, score=score), run, device, made.digest),
            }
        )
    return rows
