"""Attacks on our own code: lower bounds on ε from what it releases, to stand beside the ε that it claims.

An audit can show that a claim is wrong, never that it is right. Three of them:

===================  ===========================================================================================================
`audit_mechanism`    one released step of each phase at its worst case: nearly tight, so it sees small mistakes
`audit_run`          the whole of `fit`, many short runs with and without one record: sees what single steps hide
`one_run_audit`      one real training run with many planted records (Steinke, Nasr and Jagielski 2023); in `planted.py`
===================  ===========================================================================================================

What to look at (which score, which threshold) is chosen on a pilot, and the bounds are computed on observations
that had no part in the choice. A bound is above the ε of correct code with probability `error_rate` at most. Of many
bounds at 5% some will be; so the first two give their verdict by bounds of its own, at an error rate of `ALARM_RATE` or
less. The third gives it at `error_rate`: its δ term, 2mδ, leaves no room for a much smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special  # type: ignore[import-untyped]
from torch import Tensor, nn

from tptopk.experiments.lower_bounds import Values, clopper_pearson_bound, gdp_bound
from tptopk.gradients.examples import Batch
from tptopk.privacy import accounting
from tptopk.privacy.accounting import Segment
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.plan import Plan
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal, check_count, check_number
from tptopk.supports.selection import top_k
from tptopk.supports.support import Support
from tptopk.training.mechanism import Mechanism
from tptopk.training.run import StepRecord
from tptopk.training.trainer import fit

BLOCKS = 250  # canaries of one released step, each with coordinates of its own
ALARM_RATE = 1e-4  # how often a verdict may call correct code broken, for each bound
PILOT = 10_000  # observations on which `audit_mechanism` chooses; not among those it counts
LARGE = 1e3  # norm of a canary's gradient, in clipping norms
COORDINATES, CANARY = 32, 4  # of the model of `audit_run`, and of them the canary's

Coins: TypeAlias = NDArray[np.bool_]  # whether the record was there


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found. `present` and `absent` are the scores with and without the record that were counted."""

    name: str
    claimed: float  # ε
    delta: float
    bounds: Mapping[str, float]  # method → ε is at least this
    sure: Mapping[str, float]  # the same at the verdict's error rate; the verdict goes by these
    observations: int  # counted, with and without the record together
    error_rate: float  # of each bound
    verdict_rate: float
    score: str
    thresholds: tuple[float, float] | None  # the record is guessed absent up to the first, present above the second
    present: Values = field(repr=False)
    absent: Values = field(repr=False)

    @property
    def verdict(self) -> str:
        """`consistent`, or `BROKEN` and why."""
        method, bound = max(self.sure.items(), key=lambda item: item[1])
        if bound <= self.claimed:
            return "consistent"
        return (
            f"BROKEN: ε is at least {bound:.3g} ({method}, {self.score}, error rate {self.verdict_rate:g}), "
            f"and {self.claimed:.3g} is claimed"
        )


# ---- Choosing what to look at ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """A score, its sign, and the two thresholds between which no guess is made; chosen on the pilot alone."""

    promise: float  # the bound to be expected
    score: str
    sign: float  # scores are taken so that the record raises them
    low: float  # "not there" at or below
    high: float  # "there" above


def _choose(name: str, scores: Values, coins: Coins, trials: int, delta: float, error_rate: float) -> _Choice:
    """The thresholds that promise the best bound on so many trials, were the scores normal and luck a little bad."""
    sign = 1.0 if scores[coins].mean() >= scores[~coins].mean() else -1.0
    scores = sign * scores
    present, absent = scores[coins], scores[~coins]
    middle = (present.mean() + absent.mean()) / 2
    widths = np.linspace(0, np.abs(scores - middle).max(), 101)[:-1]
    nowhere = np.full_like(widths, np.inf)
    low = np.concatenate([middle - widths, -nowhere, middle - widths])  # guesses of both kinds, of one, of the other
    high = np.concatenate([middle + widths, middle + widths, nowhere])
    tiny = 1e-9 + 1e-6 * float(np.abs(scores).max())

    def guessed(side: Values) -> tuple[Values, Values]:  # rates of "there" and "not there"
        spread = side.std() + tiny
        return special.ndtr((side.mean() - high) / spread), special.ndtr((low - side.mean()) / spread)

    (there, missed), (alarm, not_there) = guessed(present), guessed(absent)
    right, wrong = trials / 2 * (there + not_there), trials / 2 * (missed + alarm)
    wrong = np.minimum(wrong + np.sqrt(wrong), trials - right)
    promises = clopper_pearson_bound(right, right + wrong, trials, delta, error_rate)
    best = int(promises.argmax())
    return _Choice(float(promises[best]), name, sign, float(low[best]), float(high[best]))


def _judge(
    name: str,
    claimed: float,
    delta: float,
    error_rate: float,
    scores: Mapping[str, Values],
    coins: Coins,
    pilot: int,
    *,
    gaussian: bool,
) -> Audit:
    """Choose on the first `pilot` trials of every score, bound on the others of the chosen one."""
    trials = len(coins) - pilot
    choices = [_choose(s, scores[s][:pilot], coins[:pilot], trials, delta, error_rate) for s in scores]
    choice = max(choices, key=lambda c: c.promise)
    chosen, coins = choice.sign * scores[choice.score][pilot:], coins[pilot:]
    present, absent = chosen[coins], chosen[~coins]
    there, not_there = chosen > choice.high, chosen <= choice.low
    right, made = (there & coins).sum() + (not_there & ~coins).sum(), (there | not_there).sum()

    def bounds(rate: float) -> dict[str, float]:
        found = {"Gaussian DP": gdp_bound(present, absent, delta, rate)} if gaussian else {}
        return {**found, "Clopper-Pearson": float(clopper_pearson_bound(right, made, trials, delta, rate))}

    verdict_rate = min(error_rate, ALARM_RATE)
    return Audit(
        name,
        claimed,
        delta,
        bounds(error_rate),
        bounds(verdict_rate),
        trials,
        error_rate,
        verdict_rate,
        choice.score,
        (choice.low, choice.high),
        present,
        absent,
    )


# ---- One step at its worst case --------------------------------------------------------------------------------------


def audit_mechanism(
    plan: Plan, *, observations: int = 20_000, error_rate: float = 0.05, seed: int | None = None
) -> list[Audit]:
    """Each phase's `Mechanism.private_gradient`, audited at one step on which the record is certainly drawn (q = 1).

    The claim is ε of one step with the phase's noise multiplier and no sampling, at the plan's δ; sampling and
    composition, which turn it into the plan's ε, are not looked at here. `observations` are a side, on average: a fair
    coin says for each whether its record is there.

    A canary is a record whose gradient is far longer than C and lies in a block of coordinates of its own, some
    of them in the support. Its score is the released gradient along the canary's direction, times B/C: N(1, σ²) with
    the record and N(0, σ²) with the record zeroed out. The other score takes off the step before, in which all
    canaries are zero: worse for an attacker, unless noise is used twice.

    One released step gives `BLOCKS` observations. They are independent: noise is, between coordinates and between
    steps; and as each canary is clipped by its own norm and adds to its own block alone, no canary moves the score
    of another, so each score has the same distribution as were all other canaries absent. Code that breaks this
    is broken.
    """
    _check(plan, error_rate)
    check_count("observations", observations)
    total = PILOT + 2 * observations
    rounds = -(-total // BLOCKS)
    certain = replace(
        plan,
        phases=tuple(replace(phase, sample_rate=1.0, steps=2 * rounds) for phase in plan.phases),
        queries=(),
        target_epsilon=None,
    )
    model = nn.Linear(max(2, math.ceil(1 / plan.active_ratio)), BLOCKS, bias=False)  # a row of the weight is a block
    mechanism = Mechanism(model, _row_gradient, certain, Ledger(certain), Streams("audit", seed=seed))
    generator = np.random.default_rng(seed)
    rows = torch.arange(BLOCKS)
    audits = []
    for index, phase in enumerate(certain.phases):
        support = Support.full(model)
        if plan.spec.sparse and not (plan.spec.warmup and index == 0):
            support = _support_with_every_block(model, plan.active_coordinates(support.total))
        direction = support["weight"] / support["weight"].sum(1, keepdim=True).sqrt()  # [BLOCKS, width]
        canaries = torch.full((BLOCKS, model.in_features), LARGE * phase.clip_norm)
        unit = phase.clip_norm / certain.expected_batch_size(phase)  # C/B
        coins = generator.random((rounds, BLOCKS)) < 0.5
        before, after = np.empty(coins.shape), np.empty(coins.shape)
        for number in range(rounds):
            for step, scores, shown in (
                (2 * number, before, torch.zeros(BLOCKS, 1)),
                (2 * number + 1, after, torch.from_numpy(coins[number])[:, None]),
            ):
                private = mechanism.private_gradient([(shown * canaries, rows)], support, index, step)
                scores[number] = (private.values["weight"] * direction).sum(1).numpy() / unit
        found = {"the step": after, "the step less the one before": after - before}
        audits.append(
            _judge(
                f"one step of phase {index + 1}" + (f" ({phase.name})" if phase.name else ""),
                accounting.epsilon([Segment(phase.noise_multiplier, 1.0, 1)], plan.delta),
                plan.delta,
                error_rate,
                {name: scores.reshape(-1)[:total] for name, scores in found.items()},
                coins.reshape(-1)[:total],
                PILOT,
                gaussian=True,
            )
        )
    return audits


def _row_gradient(model: nn.Module, batch: Batch) -> Tensor:
    """A loss whose gradient is x in row r of the weight, for a record (x, r)."""
    x, row = batch
    return model(x).gather(1, row[:, None])[:, 0]  # type: ignore[no-any-return]


def _support_with_every_block(model: nn.Linear, k: int) -> Support:
    """k coordinates: the first of every block, the others scattered."""
    scores = torch.rand(model.weight.shape, generator=torch.Generator().manual_seed(0))
    scores[:, 0] = 2.0
    return top_k({"weight": scores}, k)


def _check(plan: Plan, error_rate: float) -> None:
    check_number("error_rate", error_rate, above=0, below=0.5)
    if not plan.spec.private:
        raise Refusal(f"{plan.method} claims no privacy; there is nothing to audit")


# ---- Many whole runs -------------------------------------------------------------------------------------------------


def run_plan(epsilon: float = 2.0, delta: float = 1e-5) -> Plan:
    """A plan short enough for hundreds of runs: two warm-up steps and three sparse ones, on 16 of 20 records each."""
    return Plan.calibrate(
        "tp-topk", epsilon=epsilon, delta=delta, batch_size=16, dataset_size=20, steps=5,
        active_ratio=0.5, warmup=0.4, warmup_budget=0.5, accountant="rdp",
    )  # fmt: skip


def audit_run(plan: Plan, *, runs: int = 400, error_rate: float = 0.05, seed: int | None = None) -> Audit:
    """`fit` on `plan`, `runs` times: by a fair coin with a canary record, or with that record zeroed out.

    The model has 32 coordinates and a gradient that does not depend on them. The canary's is far longer than C and
    lies on four coordinates that no other record touches. Scored are the update along the canary's direction, whole and
    by phase, how many of the canary's coordinates are in the final support, the size of that support, and the norms of
    the private gradients. One half of the runs chooses score and threshold, the other gives the bound. From 400 runs the
    verdict can find ε above 3 at best, so plans that claim more are never found broken: this audit finds gross mistakes
    anywhere in `fit`, the other one small ones in a step.
    """
    _check(plan, error_rate)
    if runs < 40:
        raise Refusal(f"runs is {runs}; fewer than 40 show nothing")
    coins = np.random.default_rng(seed).random(runs) < 0.5
    found = [
        _one_run(plan, bool(present), None if seed is None else 1_000_003 * seed + number)
        for number, present in enumerate(coins)
    ]
    return _judge(
        f"whole run ({plan.method})",
        plan.epsilon(),
        plan.delta,
        error_rate,
        {name: np.array([scores[name] for scores in found]) for name in found[0]},
        coins,
        runs // 2,
        gaussian=False,
    )


def _one_run(plan: Plan, present: bool, seed: int | None) -> dict[str, float]:
    gradients = torch.zeros(plan.dataset_size, COORDINATES)
    clip = min(phase.clip_norm for phase in plan.phases)
    others = torch.arange(1, plan.dataset_size)
    gradients[others, CANARY + others % (COORDINATES - CANARY)] = clip / 2
    if present:
        gradients[0, :CANARY] = LARGE * max(phase.clip_norm for phase in plan.phases)
    model = nn.Linear(COORDINATES, 1, bias=False)
    nn.init.zeros_(model.weight)
    moved: dict[bool, float] = {}  # is it past the first phase? → how far the weights lie along the canary by then

    def look(record: StepRecord) -> None:
        moved[record.phase > 0] = -float(model.weight.detach()[0, :CANARY].sum())

    run = fit(
        model,
        (gradients,),
        plan,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=_inner_product,
        precision="fp32",
        micro_batch_size=plan.dataset_size,
        seed=seed,
        on_step=look,
    )
    norms = [record.gradient_norm or 0.0 for record in run.history]
    first = plan.phases[0].steps
    return {
        "update along the canary": moved.get(True, moved[False]),
        "update along the canary, first phase": moved[False],
        "update along the canary, later": moved.get(True, moved[False]) - moved[False],
        "canary's coordinates in the support": float(run.support["weight"][0, :CANARY].sum()),
        "support size": float(run.support.size),
        "gradient norms, first phase": sum(norms[:first]),
        "gradient norms, later": sum(norms[first:]),
    }


def _inner_product(model: nn.Module, batch: Batch) -> Tensor:
    """A loss whose gradient is the record itself."""
    return model(batch[0])[:, 0]  # type: ignore[no-any-return]
