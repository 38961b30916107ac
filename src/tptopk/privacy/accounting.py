"""ε from noise, rate and steps. The only file that imports dp-accounting.

Every ε returned here is an upper bound for the composition of Poisson-subsampled Gaussian mechanisms of
sensitivity 1 under add/remove adjacency. Three accountants:

=============  ======================================================================================
``pld``        privacy loss distributions, discretised pessimistically (connect-the-dots): tight
``rdp``        Rényi DP (Mironov, Talwar, Zhang 2019), converted as in Canonne, Kamath, Steinke 2020
``rdp-paper``  the same Rényi costs with the classic conversion of the paper's privacy theorem:
               ε = min over α of Σ ε_α + log(1/δ)/(α − 1)
=============  ======================================================================================
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import rdp_privacy_accountant as rdp

from tptopk.privacy.refusal import Refusal, nearest

ACCOUNTANTS = ("pld", "rdp", "rdp-paper")
Orders = tuple[float, ...]
ORDERS: Orders = (*rdp.DEFAULT_RDP_ORDERS, 1024, 2048, 4096)  # the large ones for ε well below 0.05
FEW_ORDERS: Orders = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128, 256)  # whole ones are ten times faster
INTERVAL = 1e-4  # width of a PLD bucket, in units of privacy loss
RENYI_ROUNDING = 1e-14  # added to every ε_α: with enormous noise the computed divergence can come out below zero
ROUNDING_PER_STEP = 1e-15  # probability mass that the FFTs of a PLD may lose; seen: 3e-17 a step over 100,000 steps


def round_up(value: float, digits: int = 4) -> str:
    """For showing an ε: never below the computed one."""
    return f"{math.ceil(value * 10**digits) / 10**digits:.{digits}f}" if math.isfinite(value) else "∞"


class Segment(NamedTuple):
    """`steps` equal steps of a Poisson-subsampled Gaussian mechanism of sensitivity 1."""

    noise_multiplier: float
    sample_rate: float
    steps: int


def epsilon(segments: Sequence[Segment], delta: float, accountant: str = "pld") -> float:
    """An upper bound on ε of all segments composed, at the given δ.

    Formal guarantees: the composed mechanism, each step chosen with knowledge of all earlier outputs but with
    noise, rate and count fixed beforehand, is (ε, δ)-DP under add/remove adjacency. Infinite noise costs
    nothing; zero noise gives infinity; no steps give 0.
    """
    return _epsilon(_tidy(segments), delta, accountant, INTERVAL)


def renyi_cost(segments: Sequence[Segment], order: float) -> float:
    """Σ ε_α of all segments at one order α: what a filter with that order adds up."""
    return float(sum(s.steps * _step_costs(s.noise_multiplier, s.sample_rate, (order,))[0] for s in _tidy(segments)))


def renyi_room(epsilon: float, delta: float, order: float) -> float:
    """How much ε_α at order α converts to (ε, δ), by the conversion of `rdp`; negative if none does."""
    return epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)


def _tidy(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Equal segments merged, those that cost nothing dropped: the order of composition does not matter."""
    steps: dict[tuple[float, float], int] = {}
    for s in segments:
        if s.steps and not math.isinf(s.noise_multiplier):
            steps[s.noise_multiplier, s.sample_rate] = steps.get((s.noise_multiplier, s.sample_rate), 0) + s.steps
    return tuple(Segment(sigma, rate, count) for (sigma, rate), count in sorted(steps.items()))


@functools.lru_cache(maxsize=4096)
def _epsilon(segments: tuple[Segment, ...], delta: float, accountant: str, interval: float) -> float:
    if accountant not in ACCOUNTANTS:
        raise Refusal(f"unknown accountant {accountant!r}{nearest(str(accountant), ACCOUNTANTS)}")
    if not segments:
        return 0.0
    if any(s.noise_multiplier <= 0 for s in segments):
        return math.inf
    try:
        if accountant == "pld":
            return _pld_epsilon(segments, delta, interval)
        return _rdp_epsilon(segments, delta, classic=accountant == "rdp-paper")
    except (OverflowError, ZeroDivisionError):  # noise so small that ε does not fit in a float
        return math.inf


def _pld_epsilon(segments: tuple[Segment, ...], delta: float, interval: float) -> float:
    slack = ROUNDING_PER_STEP * (10 + sum(s.steps for s in segments))
    if slack > delta / 10:
        raise Refusal(
            f"delta is {delta:g}; over so many steps the pld accountant's arithmetic may round by {slack:.2g} of probability, "
            "which is not small beside it; use accountant='rdp'"
        )
    # A large ε does not need buckets of 1e-4, and a very large one would not fit in memory with them.
    large = max(1.0, _rdp_epsilon(segments, delta, classic=False) / 3.0)
    # in powers of two, so that segments composed before are found again
    interval *= 2.0 ** math.floor(math.log2(large))
    composed = functools.reduce(lambda a, b: a.compose(b), (_segment_pld(s, interval) for s in segments))
    return float(composed.get_epsilon_for_delta(delta - slack))


@functools.lru_cache(maxsize=64)
def _segment_pld(segment: Segment, interval: float) -> Any:
    return _step_pld(segment.noise_multiplier, segment.sample_rate, interval).self_compose(segment.steps)


@functools.lru_cache(maxsize=16)
def _step_pld(noise_multiplier: float, sample_rate: float, interval: float) -> Any:
    """Of one step: most of the work, and the same for every number of steps that a run has come to."""
    return pld.from_gaussian_mechanism(
        noise_multiplier,
        sampling_prob=sample_rate,
        value_discretization_interval=interval,
        pessimistic_estimate=True,
        use_connect_dots=True,
    )


def _rdp_epsilon(segments: tuple[Segment, ...], delta: float, *, classic: bool, orders: Orders = ORDERS) -> float:
    costs = sum(s.steps * _step_costs(s.noise_multiplier, s.sample_rate, orders) for s in segments)
    if classic:
        return float(np.min(costs + math.log(1 / delta) / (np.asarray(orders) - 1)))
    return float(rdp.compute_epsilon(orders, costs, delta)[0])


@functools.lru_cache(maxsize=1024)
def _step_costs(noise_multiplier: float, sample_rate: float, orders: Orders) -> np.ndarray[Any, Any]:
    """ε_α of one step at every order α; infinite where the series does not converge, which only raises ε."""
    accountant = rdp.RdpAccountant(orders)
    with _without_excluded_order_warnings():
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
        )
    return np.asarray(np.maximum(accountant._rdp, 0.0) + RENYI_ROUNDING)


@contextmanager
def _without_excluded_order_warnings() -> Iterator[None]:
    """dp-accounting warns for each Rényi order it leaves out; leaving one out only raises ε."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def noise_for(target: float, delta: float, accountant: str, segment: Segment, others: Sequence[Segment] = ()) -> float:
    """The noise multiplier at which `segment`, composed with `others`, costs `target`: never over, at most 0.1% under.

    `segment.noise_multiplier` is not read.
    """

    def cost(sigma: float, interval: float) -> float:
        return _epsilon(_tidy([*others, segment._replace(noise_multiplier=sigma)]), delta, accountant, interval)

    floor = epsilon(others, delta, accountant)
    if floor >= target:
        raise Refusal(f"the rest of the plan already costs ε = {floor:.4g} of {target:.4g}; nothing is left to spend")

    def roughly(sigma: float) -> float:  # never reported; finds the neighbourhood
        return _rdp_epsilon(
            _tidy([*others, segment._replace(noise_multiplier=sigma)]), delta, classic=False, orders=FEW_ORDERS
        )

    start = 1.0
    with contextlib.suppress(Refusal):  # so few orders cannot tell very small ε apart; then the search starts from 1
        start = _solve(roughly, target, start, tolerance=0.02, stride=0.1)
    if accountant == "pld":  # wide buckets come near ten times faster
        start = _solve(lambda sigma: cost(sigma, 10 * INTERVAL), target, start, tolerance=0.01, stride=0.05)
    return _solve(
        lambda sigma: cost(sigma, INTERVAL),
        target,
        start,
        tolerance=1e-3,
        stride=0.003 if accountant == "pld" else 0.03,
    )


def _solve(cost: Callable[[float], float], target: float, start: float, tolerance: float, stride: float) -> float:
    """σ with target·(1 − tolerance) ≤ cost(σ) ≤ target, for a falling `cost`: bracketed, then narrowed in log-log."""

    def excess(log_sigma: float) -> float:  # wanted: between −tolerance and 0
        spent = cost(math.exp(log_sigma))
        return math.log(spent / target) if spent > 0 else -math.inf

    def good(value: float) -> bool:
        return math.log1p(-tolerance) <= value <= 0.0

    low = high = math.log(start)  # at low too much is spent, at high too little
    low_excess = high_excess = excess(low)
    while low_excess <= 0 and not good(low_excess):
        high, high_excess, low, stride = low, low_excess, low - stride, 2 * stride
        if low < math.log(1e-4):
            raise Refusal(f"ε = {target:g} is more than this plan can spend with any noise; lower epsilon")
        low_excess = excess(low)
    while high_excess > 0:
        low, low_excess, high, stride = high, high_excess, high + stride, 2 * stride
        if high > math.log(1e7):
            raise Refusal(f"ε = {target:g} is out of reach for this plan; raise epsilon, or take fewer steps")
        high_excess = excess(high)
    for turn in range(200):
        for log_sigma, value in ((high, high_excess), (low, low_excess)):
            if good(value):
                return math.exp(log_sigma)
        middle = (low + high) / 2
        if turn % 2 == 0 and math.isfinite(low_excess) and math.isfinite(high_excess):
            share = (low_excess + tolerance / 2) / (low_excess - high_excess)
            middle = low + min(max(share, 0.01), 0.99) * (high - low)
        value = excess(middle)
        if value > 0:
            low, low_excess = middle, value
        else:
            high, high_excess = middle, value
    raise Refusal(f"could not find the noise for ε = {target:g} to within {tolerance:.1%}")
