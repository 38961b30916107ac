"""What the engine's keywords may say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tptopk.gradients.precision import CLIPPINGS
from tptopk.integrations.opacus.criterion import check_criterion
from tptopk.privacy.refusal import Refusal, check_number


def check_keywords(
    *,
    batch_first: bool,
    loss_reduction: str,
    poisson_sampling: bool,
    clipping: str,
    noise_generator: object,
    grad_sample_mode: str,
    wrap_model: bool,
    rand_on_empty: bool,
    criterion: object,
) -> None:
    """Refuse what Opacus can do and this engine cannot, or must not."""
    for wrong, message in (
        (not batch_first, "batch_first=False: the module must take the example axis first; transpose inside it"),
        (loss_reduction not in ("mean", "sum"), f"loss_reduction is {loss_reduction!r}; it is 'mean' or 'sum'"),
        (not poisson_sampling, "poisson_sampling=False: the guarantee rests on Poisson sampling; leave it out"),
        (
            clipping not in CLIPPINGS,
            f"clipping is {clipping!r}; it is 'flat', or 'auto-s' for automatic clipping (per-layer and adaptive clipping are not "
            "offered)",
        ),
        (
            noise_generator is not None,
            "noise_generator: whoever knows its seed can subtract the noise; leave it out, or use tptopk.fit(seed=…) for experiments",
        ),
        (
            grad_sample_mode != "hooks",
            f"grad_sample_mode is {grad_sample_mode!r}; leave it out: norms are computed in the cheapest way layer by layer, ghost "
            "clipping among them",
        ),
        (
            not wrap_model,
            "wrap_model=False: the module is never wrapped; leave it out and use what make_private returns",
        ),
        (rand_on_empty, "rand_on_empty=True: an empty batch has no records and adds nothing but noise; leave it out"),
        (
            getattr(criterion, "reduction", loss_reduction) != loss_reduction,
            f"the criterion's reduction is {getattr(criterion, 'reduction', None)!r} and loss_reduction is {loss_reduction!r}; they "
            "must agree",
        ),
    ):
        if wrong:
            raise Refusal(message)
    check_criterion(criterion, loss_reduction)


def for_each_phase(name: str, value: float | Sequence[float], phases: int) -> list[float]:
    values = list(value) if isinstance(value, (list, tuple)) else [cast(float, value)] * phases
    if len(values) != phases:
        raise Refusal(f"{name} has {len(values)} values; the method has {phases} phase(s)")
    for number in values:
        if number == 0 and name == "noise_multiplier":
            raise Refusal("noise_multiplier is 0, which is not private; to see the loop run without noise, try 1e-6")
        check_number(name, number, above=0)
    return values
