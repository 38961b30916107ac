"""Runs a recipe: data, features, network, plan and training, and what is measured of the last model."""

from __future__ import annotations

import math
import os
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

from tptopk.experiments.features import Features, features
from tptopk.experiments.recipes import PAPER, Recipe
from tptopk.models import networks
from tptopk.privacy import accounting, second_opinion
from tptopk.privacy.accounting import Segment
from tptopk.privacy.description import now
from tptopk.privacy.ledger import versions
from tptopk.privacy.methods import method_named
from tptopk.privacy.plan import Phase, Plan, PrivacyWarning
from tptopk.privacy.refusal import Refusal, nearest
from tptopk.privacy.statement import charged_segments
from tptopk.supports.advice import FEWEST_STEPS, advise
from tptopk.supports.warmup import WarmUp
from tptopk.training.annealing import Annealing
from tptopk.training.run import Run
from tptopk.training.standardize import Standardize
from tptopk.training.trainer import fit

Network = Callable[[int, tuple[int, ...]], nn.Module]  # (classes, shape of the features) → network
NETWORKS: dict[str, Network] = {
    "scatter-cnn": lambda classes, shape: networks.scatter_cnn(),
    "scatter-cnn-small": lambda classes, shape: networks.scatter_cnn_small(classes),
    "scatter-linear": lambda classes, shape: networks.scatter_linear(math.prod(shape), classes),
}

ASKING = 0.2  # of ε: what the questions of annealing may cost alone


def run_one(r: Recipe, data_dir: str | None, device: str) -> dict[str, Any]:
    """Train by one recipe and measure the last model."""
    made = features(r.dataset, data_dir, r.views, r.shift, r.records, device)
    train, measured = held_out(made, r.held_out)
    model = network_for(r, train[0], made.scale)
    plan = plan_for(r, train[0], model)
    warmup = WarmUp(plan) if r.method == "tp-topk" and r.variant == PAPER else None
    started = time.monotonic()
    run = train_one(r, train, model, on_private_gradient=warmup.add if warmup else None)
    seconds = time.monotonic() - started
    result: dict[str, Any] = {
        "dataset": r.dataset,
        "method": r.method,
        "target_epsilon": r.target_epsilon if plan.spec.private else None,
        "seed": r.seed,
        "variant": r.variant,
        **measures(run.model, *measured),
        **({"advice": _advice(warmup)} if warmup else {}),
        "active": run.support.size,
        "coordinates": run.support.total,
        "seconds": round(seconds, 2),
        **provenance(r, run, device, made.digest),
    }
    return result


def provenance(r: Recipe, run: Run, device: str, data: str) -> dict[str, Any]:
    """What every line of results says of its run: what it cost by each accountant, its plan and recipe, and on what it ran when."""
    private = run.plan.spec.private
    return {
        "epsilon": run.epsilon if private else None,
        "epsilon_rdp": run.plan.epsilon(accountant="rdp") if private else None,
        "epsilon_second_opinion": _second(run) if private else None,
        "plan": run.plan.to_dict(),
        "recipe": r.identity(),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
        "versions": versions(),
        "commit": commit(),
        "data": data,
        "ended": now(),
    }


def network_for(r: Recipe, x: Tensor, scale: Tensor) -> nn.Sequential:
    """Private channel statistics, then the recipe's network, as its seed makes it."""
    if r.network not in NETWORKS:
        raise Refusal(f"unknown network {r.network!r}{nearest(r.network, NETWORKS)}")
    torch.manual_seed(r.seed)
    classes = 2 if r.dataset == "pneumoniamnist" else 10
    return nn.Sequential(Standardize(scale), NETWORKS[r.network](classes, x.shape[2:])).to(x.device)


def train_one(r: Recipe, train: tuple[Tensor, Tensor], model: nn.Sequential, **options: Any) -> Run:
    x, y = train
    plan, layer = plan_for(r, x, model), _standardize(model)
    annealing = _annealing(r, len(x)) if r.annealed else None
    rates = [r.learning_rate, r.second_learning_rate or r.learning_rate][: len(plan.phases)]
    optimizer = torch.optim.SGD(model.parameters(), lr=r.learning_rate, momentum=r.momentum)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # seeded runs, and the non-private one, are meant here
        return fit(
            model, (x, y), plan, optimizer, loss=F.cross_entropy, learning_rates=rates, views=_stored,
            standardize=layer, clipping=r.clipping, score=r.score, ratio_schedule=r.ratio_schedule, ema=r.ema, annealing=annealing,
            seed=r.seed, **options,
        )  # fmt: skip


def plan_for(r: Recipe, x: Tensor, model: nn.Sequential) -> Plan:
    return planned(r, len(x), _standardize(model).queries(r.query_noise))


def _standardize(model: nn.Sequential) -> Standardize:
    layer = model[0]
    assert isinstance(layer, Standardize)
    return layer


def _advice(warmup: WarmUp) -> dict[str, Any] | None:
    """What `tptopk advise` would have said at the end of the warm-up; None where that was too short for any advice."""
    if warmup.steps < FEWEST_STEPS:
        return None
    advice = advise(warmup)
    return {"verdict": advice.verdict, "active_ratio": advice.active_ratio, "score": advice.score}


def _stored(inputs: Tensor) -> Tensor:
    """The views of a record are stored with it."""
    return inputs


def planned(r: Recipe, size: int, queries: tuple[Phase, ...]) -> Plan:
    """The recipe's plan. Methods with equal phases cost the same: their noise is worked out once."""
    spec = method_named(r.method)
    like = "non-private" if not spec.private else "tp-topk" if spec.warmup else "dp-sgd"
    plan = _calibrated(
        like, r.target_epsilon, r.delta, min(r.batch_size, size), size, r.epochs, r.warmup, r.warmup_budget, r.clip_norm,
        (*queries, *_questions(r, size)) if spec.private else (),
    )  # fmt: skip
    return replace(plan, method=r.method, active_ratio=r.active_ratio if spec.sparse else 1.0)


def _questions(r: Recipe, size: int) -> tuple[Phase, ...]:
    """What annealing asks of the data beside the gradients."""
    steps, rate = _steps(r, size)
    return _annealing(r, size).queries(steps, rate) if r.annealed else ()


def _steps(r: Recipe, size: int) -> tuple[int, float]:
    rate = min(r.batch_size, size) / size
    return max(1, round(r.epochs / rate)), rate


def _annealing(r: Recipe, size: int) -> Annealing:
    """Asks with so much noise that all questions alone would cost a fifth of ε."""
    return Annealing(noise_multiplier=_question_noise(ASKING * r.target_epsilon, r.delta, *_steps(r, size)))


@lru_cache(maxsize=64)
def _question_noise(epsilon: float, delta: float, steps: int, rate: float) -> float:
    return accounting.noise_for(epsilon, delta, "pld", Segment(0.0, rate, steps))


@lru_cache(maxsize=256)
def _calibrated(
    method: str, epsilon: float, delta: float, batch_size: int, size: int, epochs: float, warmup: float, budget: float | None,
    clip_norm: float, queries: tuple[Phase, ...],
) -> Plan:  # fmt: skip
    return Plan.calibrate(
        method, epsilon=epsilon, delta=delta, batch_size=batch_size, dataset_size=size, epochs=epochs, warmup=warmup,
        warmup_budget=budget, clip_norm=clip_norm, queries=queries,
    )  # fmt: skip


def held_out(made: Features, count: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(what is trained on), (what is measured): the test set, or the last `count` training records."""
    if not count:
        return (made.train, made.train_labels), (made.test, made.test_labels)
    x, y = made.train, made.train_labels
    return (x[:-count], y[:-count]), (x[-count:], y[-count:])


def measures(model: nn.Module, x: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy in percent; and for two classes what a clinician asks for."""
    chances = _chances(model, x)
    return {
        "accuracy": round(100 * float((chances.argmax(1) == labels).float().mean()), 3),
        **_binary(chances, labels),
    }


@torch.no_grad()
def _chances(model: nn.Module, x: Tensor) -> Tensor:
    """[N, classes] averaged over the views of an image, as training averages them."""
    model.eval()
    found = []
    for piece in torch.split(x, 2000):
        logits = model(piece.flatten(0, 1))
        found.append(logits.softmax(1).view(*piece.shape[:2], -1).mean(1))
    return torch.cat(found)


def _binary(chances: Tensor, labels: Tensor) -> dict[str, float]:
    """AUC, and at the fixed threshold of one half balanced accuracy, sensitivity and specificity, for two classes."""
    if chances.shape[1] != 2:
        return {}
    said, positive = chances[:, 1] > 0.5, labels == 1
    sensitivity = float(said[positive].float().mean())
    specificity = float((~said[~positive]).float().mean())
    rare_is_positive = int(positive.sum()) * 2 < len(labels)
    return {
        "auc": round(float(roc_auc_score(labels.cpu(), chances[:, 1].cpu())), 5),
        "balanced_accuracy": round((sensitivity + specificity) / 2, 5),
        "sensitivity": round(sensitivity, 5),
        "specificity": round(specificity, 5),
        "minority_recall": round(sensitivity if rare_is_positive else specificity, 5),
    }


@lru_cache(maxsize=256)
def _second_opinion(segments: tuple[Any, ...], delta: float) -> float:
    return second_opinion.epsilon(list(segments), delta)


def _second(run: Run) -> float:
    return _second_opinion(tuple(charged_segments(run.plan, run.facts)), run.plan.delta)


@lru_cache(maxsize=1)
def commit() -> str | None:
    """Of the source that is run, and whether its files differ from it; None where it is no checkout.

    Where the source was sent to another machine without its history, TPTOPK_COMMIT says which it is.
    """
    if told := os.environ.get("TPTOPK_COMMIT"):
        return told
    try:
        _git("ls-files", "--error-unmatch", __file__)  # a copy that lies in somebody's own repository is none of it
        changed = _git("status", "--porcelain", "--", str(Path(__file__).parents[1]))
        return _git("rev-parse", "--short=7", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    return done.stdout.strip()
