"""The networks that nothing else builds: their sizes, what their layers compute, and their per-example gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tptopk.gradients.clipping import clipped_sum
from tptopk.gradients.probe import choose_engine
from tptopk.gradients.reference import reference_clipped_sum
from tptopk.models.networks import StandardizedConv2d, table_mlp, wrn_16_4
from tptopk.supports.support import Support


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def assert_gradients_equal_the_reference(model: nn.Module, inputs: torch.Tensor, engine: str) -> None:
    """Of two examples, each alone: with and without being clipped."""
    support, labels = Support.full(model), torch.arange(len(inputs))
    assert choose_engine(model, F.cross_entropy, (inputs, labels)) == engine

    def loss(m, b):
        return F.cross_entropy(m(b[0]), b[1], reduction="none")

    for one in ((inputs[:1], labels[:1]), (inputs[1:], labels[1:])):
        for clip_norm in (1e3, 0.1):
            fast = clipped_sum(model, F.cross_entropy, one, support, clip_norm, engine=engine).values
            slow = reference_clipped_sum(model, loss, one, support, clip_norm)
            for name, truth in slow.items():
                torch.testing.assert_close(fast[name], truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("standardized", [False, True])
def test_a_wide_resnet_has_its_published_size_depth_and_groups(standardized):
    model = wrn_16_4(standardized=standardized)
    assert parameters(model) == 2_748_890  # 2.7M
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 16 == 6 * 2 + 4  # the first, two in each of six blocks, three shortcuts
    assert all(isinstance(c, StandardizedConv2d) == standardized for c in convolutions)
    widths = [c.out_channels for c in convolutions if c.kernel_size == (3, 3)]
    assert sorted(set(widths)) == [16, 64, 128, 256] and all(a <= b for a, b in pairwise(widths))
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 13 and {m.num_groups for m in norms} == {16}
    with torch.no_grad():
        assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
        assert model[:-4](torch.rand(1, 3, 32, 32)).shape == (1, 256, 8, 8)


def test_standardised_kernels_have_mean_0_and_variance_1_over_fan_in():
    """The kernel that is used, read off the responses to one input at a time; there is no gain."""
    torch.manual_seed(0)
    layer = StandardizedConv2d(5, 7, 3, bias=False)
    with torch.no_grad():
        layer.weight.mul_(torch.rand(7, 1, 1, 1) + 0.5).add_(torch.randn(7, 1, 1, 1))
        used = layer(torch.eye(45).reshape(45, 5, 3, 3)).reshape(45, 7).double()  # [fan-in, filters]
    assert used.mean(0).abs().max() < 1e-6
    assert (
        45 * used.var(0, correction=0) - 1
    ).abs().max() < 2e-3  # 1e-4 is added to fan-in times the variance, here above 0.08
    assert not torch.allclose(used, layer.weight.detach().reshape(7, 45).T.double())


@pytest.mark.parametrize(("standardized", "engine"), [(False, "capture"), (True, "vmap")])
def test_per_example_gradients_of_a_wide_resnet_equal_the_reference(standardized, engine):
    torch.manual_seed(1)
    assert_gradients_equal_the_reference(wrn_16_4(standardized=standardized), torch.rand(2, 3, 8, 8), engine)


def test_a_network_for_tables_has_its_sizes_and_the_references_gradients():
    torch.manual_seed(2)
    model = table_mlp(9, 3, width=16)
    assert parameters(model) == (9 + 1) * 16 + (16 + 1) * 16 + (16 + 1) * 3
    assert parameters(table_mlp(9, 3)) == (9 + 1) * 64 + (64 + 1) * 64 + (64 + 1) * 3
    assert model(torch.rand(4, 9)).shape == (4, 3)
    assert_gradients_equal_the_reference(model, 2 * torch.rand(2, 9) - 1, "capture")
