"""Promise 3 where a record's own terms cancel: what rounding leaves of them moves the sum by no more than C.

The records beside it are of ordinary size, and lose nothing to it. Without the guard many of these move it by more.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tptopk.gradients.clipping import clipped_sum
from tptopk.gradients.contributions import EXAMPLES
from tptopk.gradients.examples import MeanOverRows
from tptopk.gradients.precision import SMALLEST_FACTOR, automatic_factors, clip_factors
from tptopk.supports.support import Support

C, RECORDS, POSITIONS = 0.1, 60, 6
SIZES = [1e4, 1e6, 1e8, 1e12]


class Pooled(nn.Module):
    """A layer at several positions, their mean, and a classifier."""

    def __init__(self, layer: nn.Module, width: int, after: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.head, self.after = layer, nn.Linear(width, 4), after

    def forward(self, x):
        return self.head(self.layer(x).mean(self.after))


def moved(model, loss, batch, support, **options) -> float:
    """By how many C the sum moves when the last record goes."""
    without = torch.utils._pytree.tree_map(lambda t: t[:-1], batch)
    sums = [clipped_sum(model, loss, b, support, C, **options).flat.double() for b in (batch, without)]
    return float((sums[0] - sums[1]).norm()) / C


def opposite(size: float, *shape: int) -> torch.Tensor:
    """[POSITIONS, *shape] that add up to nothing: v, −v, and 3v, −2v, −v."""
    v = size * torch.randn(shape)
    return torch.stack([v, -v, 3 * v, -2 * v, -v, torch.zeros(shape)])


def made(name: str, size: float):
    torch.manual_seed(0)
    y = torch.arange(RECORDS) % 4
    if name == "linear":
        x = torch.randn(RECORDS, POSITIONS, 32)
        x[-1] = opposite(size, 32)
        return Pooled(nn.Linear(32, 64), 64, (1,)), (x, y)
    if name == "conv1d":
        x = torch.randn(RECORDS, 5, POSITIONS)
        x[-1] = opposite(size, 5).T
        return Pooled(nn.Conv1d(5, 7, 1), 7, (2,)), (x, y)
    x = torch.randn(RECORDS, 3, POSITIONS, 8)
    x[-1] = opposite(size, 3, 8).transpose(0, 1)
    return Pooled(nn.Conv2d(3, 9, 3, padding=1, padding_mode="circular"), 9, (2, 3)), (x, y)


@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("density", [0.3, 1.0])
@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("clipping", ["flat", "auto-s"])
def test_positions_that_cancel_move_the_sum_by_no_more_than_the_clip(name, size, density, limit, clipping):
    model, batch = made(name, size)
    support = Support({n: torch.rand(p.shape) < density for n, p in model.named_parameters()})
    assert moved(model, F.cross_entropy, batch, support, memory_limit=limit, clipping=clipping) <= 1 + 1e-4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("limit", [None, 0])
def test_rows_of_one_unit_that_cancel_do_not_either(size, limit):
    """v and −v of one patient, or of two views, through one linear layer."""
    torch.manual_seed(0)
    model, x = nn.Linear(32, 16), torch.randn(RECORDS, 2, 32)
    x[-1] = size * torch.randn(32) * torch.tensor([[1.0], [-1.0]])
    batch = ((x, torch.zeros(RECORDS, 2)), torch.full((RECORDS, 2), 0.5))
    loss = MeanOverRows(lambda m, b: m(b[0]).sum(1) * torch.tensor(1.0))
    assert moved(model, loss, batch, Support.full(model), memory_limit=limit) <= 1 + 1e-4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_tokens_of_one_record_that_cancel_do_not_either(size, density):
    """One token everywhere, whose gradients are large and cancel in the last record."""
    torch.manual_seed(0)
    model = nn.Embedding(7, 8)
    ids, factors = torch.full((RECORDS, POSITIONS), 3), torch.randn(RECORDS, POSITIONS, 8)
    factors[-1] = opposite(size, 8)
    support = Support({"weight": torch.rand(7, 8) < density})
    assert moved(model, lambda m, b: (m(b[0]) * b[1]).sum((1, 2)), (ids, factors), support) <= 1 + 1e-4


def test_records_that_do_not_cancel_are_clipped_as_ever():
    """The guard costs nothing where terms are of the size of their total."""
    model, batch = made("conv2d", 1.0)
    x = torch.randn_like(batch[0])
    for limit in (None, 0):
        ours, truth = (
            clipped_sum(model, F.cross_entropy, (x, batch[1]), Support.full(model), C, **options).flat
            for options in ({"memory_limit": limit}, {"engine": "reference"})
        )
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.1, 1e-8])
def test_large_inputs_beside_tiny_gradients_are_clipped(clip_norm):
    """Float32 squares of the gradients vanish, and the inputs are as large as they can be."""
    model = nn.Linear(256, 256, bias=False)
    for gradient, size in ((2.6e-23, 1e18), (1e-16, 3e38), (1e-3, 1e30), (1e-38, 1e20)):
        x, g = torch.full((1, 256), size), torch.full((1, 256), gradient)
        total = clipped_sum(model, lambda m, b: (m(b[0]) * b[1]).sum(1), (x, g), Support.full(model), clip_norm)
        assert float(total.flat.double().norm()) <= clip_norm * (1 + 1e-5)


@pytest.mark.parametrize(
    ("x", "g"),
    [
        ((0.0, 1e20), (1e8, 1e-16)),
        ((1e-30, 1e10), (1e30, 1.0)),
        ((0.0, 1e16), (1e8, 1e-15)),
        ((0.0, 1e38), (1e38, 1e-7)),
    ],
)
def test_a_mask_that_leaves_out_the_largest_factors_does_not_hide_the_others(x, g):
    model = nn.Linear(2, 2, bias=False)
    support = Support({"weight": torch.eye(2).bool()})
    batch = (torch.tensor([x]), torch.tensor([g]))
    for clipping in ("flat", "auto-s"):
        total = clipped_sum(model, lambda m, b: (m(b[0]) * b[1]).sum(1), batch, support, C, clipping=clipping)
        assert float(total.flat.double().norm()) <= C * (1 + 1e-5)


@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("limit", [None, 0])
def test_a_zero_input_beside_a_huge_gradient_spoils_nothing(density, limit):
    """0 × ∞ is not a number, and would be in everybody's sum."""
    torch.manual_seed(0)
    for layer, x in ((nn.Linear(4, 3), torch.randn(5, 4)), (nn.Conv1d(2, 3, 1), torch.randn(5, 2, 3))):
        support = Support({n: torch.rand(p.shape) < density for n, p in layer.named_parameters()})
        factors = torch.ones(5)
        x[-1], factors[-1] = 0.0, 1e37
        for clipping in ("flat", "auto-s"):
            total = clipped_sum(
                layer, lambda m, b: m(b[0]).flatten(1).sum(1) * b[1], (x, factors), support, 1.0, clipping=clipping, memory_limit=limit
            )  # fmt: skip
            assert torch.isfinite(total.flat).all()


def test_cancelling_terms_are_seen_beside_gradients_whose_squares_overflow():
    torch.manual_seed(1)
    model = Pooled(nn.Conv2d(32, 32, 3, bias=False, padding=1, padding_mode="circular"), 32, (2, 3))
    model.head.requires_grad_(False)
    x, y = torch.randn(20, 32, 6, 3), 100 + torch.randn(20, 4)
    v = 1e-24 * torch.randn(32, 3)
    x[-1], y[-1] = torch.stack([v, -v, v, -v, v, -v]).transpose(0, 1), 1e30
    support = Support({"layer.weight": torch.rand(32, 32, 3, 3) < 0.5})
    assert moved(model, F.mse_loss, (x, y), support, memory_limit=0) <= 1 + 1e-4


@pytest.mark.parametrize("factors", [clip_factors, automatic_factors])
def test_a_factor_that_float32_would_round_up_is_zero(factors):
    norms = torch.tensor([1e20, 1e29, 1e31, 1e44, float("inf"), float("nan")], dtype=torch.float64)
    found = factors(norms, 0.0, 1.0, 0.0)
    assert (found[:2] > SMALLEST_FACTOR).all() and not found[2:].any()


def test_a_large_sample_of_like_records_is_added_up_to_a_thousandth_of_the_clip():
    model = nn.Linear(16, 1, bias=False)
    support = Support.full(model)
    torch.manual_seed(0)
    for count in (EXAMPLES + 1, 1024, 30_000):
        x = (1 + 0.3 * torch.randn(count, 16)).abs()
        for gone in (slice(1, None), slice(None, -1)):
            total, without = (
                clipped_sum(model, lambda m, b: m(b).sum(1), v, support, C).flat.double() for v in (x, x[gone])
            )
            assert float((total - without).norm()) <= C * (1 + 1e-3)


def test_in_which_order_an_embeddings_terms_are_added_is_no_matter_of_other_examples():
    """An example uses one row three times, with coefficients that cancel but for 1, or cancel all, as the order is."""
    examples, tokens, words = 100, 64, 50
    generator = torch.Generator().manual_seed(1)
    ids = torch.where(torch.rand(examples, tokens, generator=generator) < 0.3, 0, torch.randint(1, words, (examples, tokens), generator=generator))  # fmt: skip
    coefficients = torch.zeros(examples, tokens)
    for example in range(examples):
        uses = (ids[example] == 0).nonzero()[:, 0]
        coefficients[example, uses[[0, len(uses) // 2, -1]]] = torch.tensor([1e10, -1e10, 1.0])
    model = nn.Embedding(words, 1)
    support = Support.full(model)

    def loss(model, batch):
        return (model(batch[0])[..., 0] * batch[1]).sum(1)

    def found(row: torch.Tensor, example: int) -> torch.Tensor:
        """The sum without that example: whatever its ids are, its coefficients are zero."""
        others, silent = ids.clone(), coefficients.clone()
        others[example], silent[example] = row, 0.0
        return clipped_sum(model, loss, (others, silent), support, C).flat

    rows = [torch.zeros(tokens, dtype=torch.long), torch.full((tokens,), words - 1), torch.randint(0, words, (tokens,), generator=generator)]  # fmt: skip
    for example in range(0, examples, 5):
        sums = [found(row, example) for row in rows]
        assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


@pytest.mark.parametrize("engine", ["capture", "vmap", "reference"])
def test_a_long_sum_does_not_round_small_terms_as_another_example_decides(engine):
    """From 2¹³ on, float32 adds a whole last place where it is given a little more than half of one; below 2¹³ it adds what it is given."""
    small = [0.51 * 2.0**-10] * 1500
    model = nn.Linear(1, 1, bias=False)
    support = Support.full(model)

    def total(first: float) -> float:
        x = torch.tensor([first, *[1.0] * 8191, *small])[:, None]
        return float(clipped_sum(model, lambda m, b: m(b)[:, 0], x, support, 1.0, engine=engine).flat[0])

    assert abs(total(1.0) - total(0.0)) <= 1.001, "1.73 where all is added up in float32"
