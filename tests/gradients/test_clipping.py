"""Promises 3 and 8: the support is masked before clipping, and a bad record is a zero."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.gradients.cases import CASES, make
from tests.gradients.test_rules import flat, random_support
from tptopk.gradients.capture import Capture
from tptopk.gradients.clipping import Clip, ClippedSum, clipped_sum
from tptopk.gradients.contributions import Budget, Dense, Rows, squared_norms_of
from tptopk.gradients.examples import take
from tptopk.gradients.products import Products, Windows
from tptopk.privacy.plan import SMALLEST_CLIP_NORM
from tptopk.privacy.refusal import Refusal
from tptopk.supports.support import Support

ENGINES = ["capture", "vmap", "reference"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_a_bad_record_contributes_zero(engine, bad, density, name):
    model, data = make(name, 0, 5)
    support = random_support(model, density)
    good = flat(
        clipped_sum(model, F.cross_entropy, take(data, torch.tensor([0, 1, 3, 4])), support, 0.1, engine=engine)
    )
    data[0][2] = bad
    with_bad = flat(clipped_sum(model, F.cross_entropy, data, support, 0.1, engine=engine))
    assert torch.isfinite(with_bad).all()
    if bad == 1e38:  # finite but absurd: clipped like any other
        assert (with_bad - good).norm() <= 0.1 * (1 + 1e-5)
    else:
        torch.testing.assert_close(with_bad, good, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("name", CASES)
def test_leaving_records_out_by_selection_rounds_the_others_in_no_other_way(name, limit, monkeypatch):
    """Else a record that is not finite would move all the others: the sum is made with a selection only where there is one."""
    model, batch = make(name, 1, 150)
    ordinary = Clip.sum
    for density in (0.1, 1.0):
        support, sums = random_support(model, density), []
        for selected in (
            lambda weights, left_out: left_out,
            lambda weights, left_out: torch.zeros(len(weights), dtype=torch.bool),
        ):
            monkeypatch.setattr(Clip, "sum", lambda clip, w, left_out: ordinary(clip, w, selected(w, left_out)))  # noqa: B023
            sums.append(clipped_sum(model, F.cross_entropy, batch, support, 0.1, memory_limit=limit).flat)
        assert torch.equal(*sums)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bad_record_is_no_error_of_a_loss_that_checks_its_input(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid(), nn.Flatten(0))
    x, y = torch.randn(6, 4), torch.rand(6).round()
    x[2, 1] = float("nan")
    others = torch.tensor([0, 1, 3, 4, 5])
    total, good = (
        flat(clipped_sum(model, F.binary_cross_entropy, (x[i], y[i]), Support.full(model), 0.1, engine=engine))
        for i in (torch.arange(6), others)
    )
    torch.testing.assert_close(total, good)


@pytest.mark.parametrize("engine", ["capture", "vmap", "reference"])
@pytest.mark.parametrize("bad", [float("nan"), 2.0, -0.1, float("inf")])
@pytest.mark.parametrize("loss", [F.binary_cross_entropy, nn.BCELoss(), partial(F.binary_cross_entropy)])
def test_a_target_that_a_loss_raises_for_is_a_zero(engine, bad, loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Sigmoid())
    x, y = torch.randn(5, 4), torch.rand(5, 2)
    others = torch.tensor([0, 1, 3, 4])
    good = flat(clipped_sum(model, loss, (x[others], y[others]), Support.full(model), 0.1, engine=engine))
    y[2, 1] = bad
    torch.testing.assert_close(flat(clipped_sum(model, loss, (x, y), Support.full(model), 0.1, engine=engine)), good)


@pytest.mark.parametrize("bad", [3, -2, 10**6])
def test_a_list_of_classes_that_a_loss_raises_for_is_a_zero(bad):
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.tensor([[0, 2, -1]]).repeat(5, 1)
    others = torch.tensor([0, 1, 3, 4])
    loss = F.multilabel_margin_loss
    good = flat(clipped_sum(model, loss, (x[others], y[others]), Support.full(model), 0.1))
    y[2, 0] = bad
    torch.testing.assert_close(flat(clipped_sum(model, loss, (x, y), Support.full(model), 0.1)), good)


def test_a_class_that_is_ruled_out_is_no_bad_record():
    """A score of −∞ is a number that a loss may be given."""
    torch.manual_seed(0)

    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x).index_fill(1, torch.tensor([2]), -torch.inf)

    total = clipped_sum(
        Masked(4, 3), F.cross_entropy, (torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])), Support.full(Masked(4, 3)), 0.1, engine="reference"
    )  # fmt: skip
    assert total.flat.any()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bad_inactive_coordinate_does_not_matter(engine):
    """One input feature is NaN for one example; with its column inactive the example counts in full."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[:, 1] = False
    support = Support({"weight": mask, "bias": torch.ones(3, dtype=torch.bool)})

    def loss(m, batch):  # the second feature does not reach the output, only the gradient of its column
        return F.cross_entropy(
            F.linear(batch[0].nan_to_num(), m.weight, m.bias) + 0 * m(batch[0]).nan_to_num(), batch[1], reduction="none"
        )

    bad = x.clone()
    bad[2, 1] = float("nan")
    clean = x.clone()
    clean[2, 1] = 0.0
    a = clipped_sum(model, loss, (bad, y), support, 10.0, engine="reference")
    b = clipped_sum(model, loss, (clean, y), support, 10.0, engine="reference")
    torch.testing.assert_close(flat(a), flat(b))
    gradients = torch.randn(4, 3, 3)
    gradients[2, 0, 1] = float("nan")
    contribution = Dense(gradients)
    contribution.restrict(support, "weight")
    assert torch.isfinite(contribution.squared_norms(Budget(None))).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_masking_comes_before_clipping(engine):
    """Clipping first would shrink the active part by the inactive part's norm."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    data = (torch.randn(1, 4) * 100, torch.tensor([1]))
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[0, 0] = True
    total = clipped_sum(model, F.cross_entropy, data, Support({"weight": mask}), 0.1, engine=engine)
    assert total.values["weight"][0, 0].abs() == pytest.approx(0.1, rel=1e-5)


def test_an_empty_batch_does_not_run_the_model():
    model, data = make("linear", 0, 5)
    model.forward = None  # would raise if called
    total = clipped_sum(model, F.cross_entropy, take(data, slice(0, 0)), Support.full(model), 1.0)
    assert not flat(total).any() and total.sensitivity() == 1.0


def test_sums_of_different_clip_norms_do_not_add():
    with pytest.raises(ValueError, match="different norms"):
        ClippedSum(torch.zeros(1), {}, 1.0) + ClippedSum(torch.zeros(1), {}, 2.0)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, 1e-9, float("nan"), float("inf")])
def test_a_clip_norm_that_does_not_clip_is_refused(clip_norm):
    model, data = make("linear", 0, 2)
    with pytest.raises(Refusal, match="clip_norm"):
        clipped_sum(model, F.cross_entropy, data, Support.full(model), clip_norm)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["linear", "conv2d", "embedding"])
def test_the_smallest_clip_norm_still_clips_gradients_just_above_it(name, precision, engine):
    """Squares of such small coordinates must not vanish from the norm: what is not counted is not clipped."""
    model, data = make(name, 0, 1)

    def loss(m, batch):
        return 1e-7 * F.cross_entropy(m(batch[0]).float(), batch[1], reduction="none")

    total = clipped_sum(model, loss, data, Support.full(model), SMALLEST_CLIP_NORM, engine=engine, precision=precision)
    assert 0.97 * SMALLEST_CLIP_NORM <= flat(total).double().norm() <= SMALLEST_CLIP_NORM * (1 + 1e-5)


def test_somebody_elses_autocast_does_not_round_the_sum():
    """In bfloat16 the sum of 2,000 clipped gradients is rounded by many times the clip norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
    data = (torch.randn(2000, 10), torch.zeros(2000, dtype=torch.long))
    plain = flat(clipped_sum(model, F.cross_entropy, data, Support.full(model), 0.1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = flat(clipped_sum(model, F.cross_entropy, data, Support.full(model), 0.1))
    assert inside.dtype == plain.dtype
    torch.testing.assert_close(inside, plain, rtol=1e-5, atol=1e-6)


def test_norms_of_many_coordinates_are_not_too_small():
    values = torch.full((1, 20_000_000), 1.2)
    assert squared_norms_of(values).item() == pytest.approx(1.44 * 20_000_000, rel=5e-6)


def matrix(g, x, shape):
    """A contribution to a matrix, of g [B, T, p] and x [B, T, d]."""
    x = x.contiguous()
    return Products(g, Windows(x, ((x.shape[1],), (x.stride(1),)), ((x.shape[2],), (1,))), shape)


def assert_alike(contributions, support, left_out=None, limit=None):
    if support is not None:
        for contribution in contributions:
            contribution.restrict(support, "w")
    norms = [c.squared_norms(Budget(limit)) for c in contributions]
    weights = torch.rand(len(norms[0]))
    weights = weights if left_out is None else weights.masked_fill(left_out, 0.0)
    sums = [c.weighted_sum(weights, left_out) for c in contributions]
    for norm, total in zip(norms[1:], sums[1:], strict=True):
        torch.testing.assert_close(norm, norms[0], rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(total, sums[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_rows_and_dense_agree(density):
    torch.manual_seed(0)
    example, row = torch.tensor([0, 0, 0, 2, 2]), torch.tensor([1, 1, 4, 0, 1])
    rows = Rows(example, row, torch.randn(5, 3), batch=3, rows=6)
    assert_alike([Dense(rows.dense().clone()), rows], Support({"w": torch.rand(6, 3) < density}))


@pytest.mark.parametrize(
    ("positions", "shape", "way"), [(1, (6, 5), "closed form"), (2, (30, 40), "ghost"), (9, (6, 5), "written out")]
)
@pytest.mark.parametrize("mask", ["full", "elements", "rows and columns", "one"])
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
@pytest.mark.parametrize("limit", [None, 0])
def test_every_way_to_a_matrix_gradient_agrees(positions, shape, way, mask, scale, limit):
    """Closed form, ghost, kept and recomputed gradients are the same numbers, at any scale and with an example left out."""
    torch.manual_seed(0)
    g, x = scale * torch.randn(4, positions, shape[0]), torch.randn(4, positions, shape[1])
    masks = {
        "full": None,
        "elements": torch.rand(shape) < 0.3,
        "rows and columns": torch.outer(torch.rand(shape[0]) < 0.5, torch.rand(shape[1]) < 0.5),
        "one": torch.zeros(shape, dtype=torch.bool).index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(True)),
    }
    support = None if masks[mask] is None else Support({"w": masks[mask]})
    products, dense = matrix(g, x, shape), Dense(torch.einsum("bti,btj->bij", g, x))
    if support is None:
        assert products.way == way
    assert_alike([dense, products], support, limit=limit)
    g[2, 0, 1] = float("nan")
    spoilt, clean = matrix(g, x, shape), Dense(torch.einsum("bti,btj->bij", g, x))
    left_out = torch.tensor([False, False, True, False])
    for contribution in (spoilt, clean):
        if support is not None:
            contribution.restrict(support, "w")
        contribution.squared_norms(Budget(limit))
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0])
    torch.testing.assert_close(
        spoilt.weighted_sum(weights, left_out), clean.weighted_sum(weights, left_out), rtol=1e-4, atol=1e-6 * scale
    )


def test_ghost_norms_survive_cancellation():
    """Two positions whose gradients all but cancel: in float32 the ghost norm would be rounding."""
    torch.manual_seed(0)
    g, x = torch.randn(3, 1, 200).repeat(1, 2, 1), torch.randn(3, 1, 100).repeat(1, 2, 1)
    g[:, 1] *= -1
    g[:, 1] += 1e-5 * torch.randn(3, 200)
    ghost, truth = (
        matrix(g, x, (200, 100)),
        torch.einsum("bti,btj->bij", g.double(), x.double()).flatten(1).norm(dim=1),
    )
    assert ghost.way == "ghost"
    torch.testing.assert_close(ghost.squared_norms(Budget(None)).sqrt(), truth, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("name", ["conv2d", "used twice, in place", "tied", "lstm", "attention", "transformer"])
def test_a_capture_can_listen_to_somebody_elses_backward(name):
    model, data = make(name, 0, 4)
    with Capture(model, 4) as heard:
        loss = F.cross_entropy(model(data[0]), data[1], reduction="sum")
    loss.backward()
    with Capture(model, 4) as asked:
        loss = F.cross_entropy(model(data[0]), data[1], reduction="sum")
    asked.differentiate(loss)
    ours, theirs = heard.contributions(), asked.contributions()
    assert set(ours) == set(theirs) == {n for n, _ in model.named_parameters()}
    for key in ours:
        torch.testing.assert_close(ours[key].dense(), theirs[key].dense())
        torch.testing.assert_close(ours[key].dense().sum(0), model.get_parameter(key).grad, rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_elsewhere_or_a_model_in_two_places_is_refused():
    model, (x, y) = make("linear", 0, 3)
    with pytest.raises(Refusal, match=r"model is on cpu and the batch on meta"):
        clipped_sum(model, F.cross_entropy, (x.to("meta"), y), Support.full(model), 1.0)
    support = Support.full(model)
    model[0].to("meta")
    with pytest.raises(Refusal, match="several devices"):
        clipped_sum(model, F.cross_entropy, (x, y), support, 1.0)


def test_a_batch_of_strides_and_one_of_nothing():
    model, (x, y) = make("conv2d", 0, 6)
    support = Support.full(model)
    strided = x.transpose(2, 3).contiguous().transpose(2, 3)[::2]
    assert not strided.is_contiguous()
    a, b = (
        flat(clipped_sum(model, F.cross_entropy, (v, y[::2]), support, 0.1)) for v in (strided, x[::2].contiguous())
    )
    torch.testing.assert_close(a, b)
    assert not flat(clipped_sum(model, F.cross_entropy, (x[:0], y[:0]), support, 0.1)).any()


def test_channels_last_is_only_a_memory_format():
    model, (x, y) = make("conv2d", 0, 6)
    support = random_support(model, 0.5)
    plain = flat(clipped_sum(model, F.cross_entropy, (x, y), support, 0.1))
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(flat(clipped_sum(model, F.cross_entropy, (x, y), support, 0.1)), plain)
