from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.gradients.test_rules import flat
from tptopk.gradients.clipping import clipped_sum
from tptopk.gradients.precision import clip_factors, computing_in, in_two, scaled, slack, to_tf32
from tptopk.gradients.products import ghost
from tptopk.privacy.refusal import Refusal
from tptopk.supports.support import Support

CPU = torch.device("cpu")


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**126, min_value=-(2.0**126)))
def test_tf32_keeps_eleven_bits_and_two_parts_keep_almost_all(value):
    exact = torch.tensor([value])
    rounded = to_tf32(exact)
    bits = rounded.view(torch.int32).item()
    assert bits & 0x1FFF == 0
    normal = abs(value) > 1e-30
    assert not normal or abs(rounded.item() - exact.item()) <= 2.0**-11 * abs(exact.item())
    high, low = in_two(exact)
    assert (high + low).item() == exact.item()
    assert not normal or abs((to_tf32(low) - low).item()) <= 2.0**-22 * abs(exact.item())


def test_what_is_not_finite_stays_so():
    cuda_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # adding to its bits would overflow
    bad = torch.cat([torch.tensor([math.inf, -math.inf, math.nan]), cuda_nan, -cuda_nan])
    assert not torch.isfinite(to_tf32(bad)).any()


@given(
    norm=st.floats(0, 1e6),
    rounding=st.floats(0, 1e3),
    clip=st.floats(1e-3, 1e3),
    give=st.sampled_from([0.0, 2e-3, 2e-2]),
)
def test_a_scaled_and_rounded_gradient_stays_within_the_clip(norm, rounding, clip, give):
    norms = torch.tensor([norm], dtype=torch.float64)
    factor = clip_factors(norms, torch.tensor([rounding], dtype=torch.float64), clip, give).item()
    assert 0 <= factor <= 1
    assert factor * norm * (1 + give) <= clip * (1 + 1e-12) or (
        factor == 1.0 and norm * (1 + give) <= clip * (1 + 1e-12)
    )
    assert factor * (norm + rounding) <= clip * (1 + 1e-12)


def test_a_gradient_that_is_not_finite_gets_no_weight():
    assert clip_factors(torch.tensor([math.nan, math.inf, 0.0]), 0.0, 1.0, 0.0).tolist() == [0.0, 0.0, 1.0]


def test_ghost_products_give_the_norm_and_the_most_it_can_be():
    g, x = torch.randn(3, 5, 4), torch.randn(3, 5, 6)
    inner, most = ghost(g @ g.transpose(1, 2), x @ x.transpose(1, 2))
    whole = torch.einsum("btp,btd->bpd", g, x).flatten(1)
    assert torch.allclose(inner, whole.norm(dim=1).double().square(), rtol=1e-4)
    assert torch.allclose(most.sqrt(), (g.norm(dim=2) * x.norm(dim=2)).sum(1).double(), rtol=1e-4)
    assert bool((inner <= most * (1 + 1e-6)).all())


def test_scaling_rounds_only_when_asked():
    values, weights = torch.randn(3, 4, 5), torch.tensor([0.1, 0.2, 0.3])
    plain = scaled(values, weights, rounded=False)
    assert torch.equal(plain, values * weights[:, None, None]) and torch.equal(
        scaled(values, weights, rounded=True), to_tf32(plain)
    )


def test_settings_are_put_back():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with pytest.raises(ZeroDivisionError), computing_in("tf32", torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
        1 / 0  # noqa: B018
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize(("precision", "give"), [("fp32", 0.0), ("tf32", 0.0), ("bf16", 2e-2)])
def test_on_a_cpu_only_bf16_gives_anything_away(precision, give):
    assert slack(precision, CPU) == give
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4))
    x, y = torch.randn(9, 6), torch.arange(9) % 4
    exact, found = (
        flat(clipped_sum(model, F.cross_entropy, (x, y), Support.full(model), 0.1, precision=p))
        for p in ("fp32", precision)
    )
    assert (found * (1 + give) - exact).norm() <= (2e-2 if precision == "bf16" else 1e-6) * exact.norm()


def test_an_unknown_precision_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(Refusal, match="did you mean 'bf16'"):
        clipped_sum(
            model,
            F.cross_entropy,
            (torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)),
            Support.full(model),
            1.0,
            precision="bf-16",
        )


@pytest.mark.parametrize("own", [False, True])
def test_weights_rounded_to_bfloat16_are_rounded_anew_in_every_pass(own):
    """Autocast remembers rounded weights while any autocast, also a disabled one, is open around it: a recorded graph
    would read the memory of weights long gone."""
    model = nn.Linear(4, 3)
    batch = torch.randn(5, 4), torch.randn(5, 3)

    def loss(model, batch):  # a model may bring its own autocast
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True if own else torch.is_autocast_enabled("cpu")):
            return ((model(batch[0]) - batch[1]) ** 2).float().sum(1)

    def total():
        return flat(clipped_sum(model, loss, batch, Support.full(model), 100.0, precision="fp32" if own else "bf16"))

    with computing_in("fp32", CPU):
        before = total()
        with torch.no_grad():
            model.weight.mul_(4.0)
        inside = total()
    assert torch.equal(inside, total()) and not torch.allclose(inside, before, rtol=0.1)
