"""Sums of fixed shape are the ordinary ones. On a CPU the traced program is run as it is; tests/test_cuda.py replays it."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from tests.gradients.cases import CASES, make
from tests.gradients.test_rules import flat, random_support
from tptopk.gradients import graphs
from tptopk.gradients.clipping import clipped_sum
from tptopk.gradients.graphs import FixedShapes, fixed_size
from tptopk.gradients.traces import ModelChanged
from tptopk.supports.support import Support


@pytest.fixture(autouse=True)
def _traced_and_not_compiled(monkeypatch, request):
    if "compiler" not in request.keywords:
        monkeypatch.setattr(graphs, "_traced", lambda program, r: make_fx(program)(r.leaves, r.real))


def recorder(model):
    return FixedShapes(model, F.cross_entropy, compiled=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_a_recorded_sum_is_the_ordinary_one_also_padded_and_at_new_weights(name, density):
    model, (x, y) = make(name, 1, 40)
    support = random_support(model, density)
    fixed = recorder(model)
    assert fixed.clipped_sum((x, y), support, 0.1) is None, "the first batch on a support goes the ordinary way"
    for n in (40, 37):  # 37 is padded to 40
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.95)
        found = fixed.clipped_sum((x[:n], y[:n]), support, 0.1)
        slow = flat(clipped_sum(model, F.cross_entropy, (x[:n], y[:n]), support, 0.1))
        assert found is not None and (flat(found) - slow).norm() <= 1e-5 * slow.norm() + 1e-7
    assert len(fixed._recorded) == 1


@pytest.mark.parametrize(
    ("name", "limit"),
    [(name, limit) for name in CASES for limit in (None, 0) if limit is None or name not in ("gru", "lstm", "rnn")],
)  # recurrent layers write their gradients out whatever the limit, and take long to record
def test_one_recording_serves_supports_that_keep_changing(name, limit):
    model, (x, y) = make(name, 1, 40)
    fixed = FixedShapes(model, F.cross_entropy, compiled=True, memory_limit=limit)
    for turn in range(5):
        support = random_support(model, (0.1, 0.5, 0.02, 0.3, 1.0)[turn])
        found = fixed.clipped_sum((x, y), support, 0.1)
        if turn < 2:
            assert found is None, "two supports that leave soon are not yet a habit"
            continue
        slow = flat(clipped_sum(model, F.cross_entropy, (x, y), support, 0.1, engine="reference"))
        # Of so few coordinates totals are far below their terms; made anew, they are clipped for what rounding can lose.
        tolerance = 1e-3 if turn == 2 and limit == 0 else 1e-5
        assert found is not None and (flat(found) - slow).norm() <= tolerance * slow.norm() + 1e-7
        assert len(fixed._recorded) == 1
    assert fixed.clipped_sum((x, y), support, 0.1) is not None, "and one that stays is recorded on its own"
    assert fixed._recorded_on is support


def test_a_support_that_shifts_clips_where_the_active_norm_is_large_alone():
    """The example's gradient is large where it is inactive: a norm over all coordinates would clip it to nothing."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, 1e-3)  # no logit so large that the gradient vanishes
    x, y = torch.tensor([[1e-3, 1e3]]), torch.tensor([0])
    masks = [torch.tensor([[True, False], [False, False]]), torch.tensor([[True, False], [True, False]])] * 2
    fixed = recorder(model)
    for mask in masks:
        support = Support({"weight": mask})
        found = fixed.clipped_sum((x, y), support, 0.1)
    assert found is not None
    slow = clipped_sum(model, F.cross_entropy, (x, y), support, 0.1, engine="reference")
    assert torch.allclose(found.flat, slow.flat, rtol=1e-5, atol=0) and found.flat[0] != 0
    assert found.flat[1] == found.flat[3] == 0


@pytest.mark.parametrize("bad", [[3], [0], [0, 5, 6]])
@pytest.mark.parametrize("examples", [8, 17])  # 17 are padded, with copies of the first
def test_an_example_that_is_not_finite_changes_nothing_of_the_others_to_the_bit(bad, examples):
    """The same program leaves it out: the ordinary way rounds otherwise, and would move all the others with it."""
    torch.manual_seed(0)
    model, (x, y) = make("linear", 1, examples)
    fixed, support = recorder(model), Support.full(model)
    fixed.clipped_sum((x, y), support, 0.1)
    x[bad], silent = float("nan"), y.clone()
    found = fixed.clipped_sum((x, y), support, 0.1)
    x[bad], silent[bad] = 0.0, -1  # no class: a loss of zero
    without = fixed.clipped_sum((x, silent), support, 0.1)
    assert (
        found is not None and without is not None and torch.equal(found.flat, without.flat) and bool(found.flat.any())
    )
    x[:] = float("inf")
    nothing = fixed.clipped_sum((x, y), support, 0.1)
    assert nothing is not None and not nothing.flat.any()
    x[:], y[:] = 1.0, 0
    slow = clipped_sum(model, F.cross_entropy, (x, y), support, 0.1)
    again = fixed.clipped_sum((x, y), support, 0.1)
    assert again is not None and torch.allclose(again.flat, slow.flat, rtol=1e-4, atol=1e-6), "and all count again"


def test_an_example_that_is_not_finite_is_left_out_of_the_same_throw_of_dice():
    """Thrown again for its sake, dice would choose anew who else is finite: half of an example is dropped, and all of it now and then."""

    class UnitLength(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.layer = nn.Dropout(0.5), nn.Linear(8, 2)

        def forward(self, x):
            found = self.drop(x)
            return self.layer(found / found.norm(dim=1, keepdim=True))

    torch.manual_seed(0)
    model, x, y = UnitLength(), torch.zeros(40, 8), torch.ones(40, dtype=torch.long)
    x[:, :2] = 1.0  # a fourth of them are 0 / 0
    fixed, support = recorder(model), Support.full(model)
    fixed.clipped_sum((x, y), support, 0.1)
    fixed.clipped_sum((x, y), support, 0.1)
    gone, silent = x.clone(), y.clone()
    gone[0], silent[0] = float("nan"), -1
    sums = []
    for data in ((gone, y), (x, silent)):
        torch.manual_seed(1)
        found = fixed.clipped_sum(data, support, 0.1)
        assert found is not None and bool(found.flat.any())
        sums.append(found.flat)
    assert torch.equal(*sums)


class ByLength(nn.Module):
    """Reads the records' lengths on the host, for a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        lengths = (x[:, :, 0] != 0).sum(1).tolist()
        mask = torch.tensor([[float(n < length) for n in range(x.shape[1])] for length in lengths])
        return (self.layer(x) * mask[:, :, None]).sum(1)


def test_numbers_that_a_program_read_on_the_host_are_nobodys_and_it_is_not_used():
    """make_fx does not see `tolist`: the lengths of the batch that it was traced on would be in every later sum."""
    torch.manual_seed(0)
    model, x, y = ByLength(), torch.randn(8, 5, 3), torch.randint(0, 2, (8,))
    x[:, 2:] = 0.0
    fixed, support = recorder(model), Support.full(model)
    assert fixed.clipped_sum((x, y), support, 0.1) is None
    with pytest.warns(UserWarning, match="by more than the recorded operations"):
        assert fixed.clipped_sum((x, y), support, 0.1) is None


def test_lengths_that_a_program_read_beside_two_classes_are_found_out():
    class GivenLengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, batch):
            found = self.layer(batch[0])
            return torch.stack([found[n, : max(1, length)].mean(0) for n, length in enumerate(batch[1].tolist())])

    def loss(model, batch):
        return F.cross_entropy(model(batch), batch[2], reduction="none")

    torch.manual_seed(0)
    batch = torch.randn(8, 9, 3), torch.randint(1, 10, (8,)), torch.randint(0, 2, (8,))
    model = GivenLengths()
    fixed, support = FixedShapes(model, loss, compiled=True), Support.full(model)
    fixed.clipped_sum(batch, support, 0.1)
    with pytest.warns(UserWarning, match="by more than the recorded operations"):
        assert fixed.clipped_sum(batch, support, 0.1) is None


def test_a_recording_is_made_on_nobodys_examples(monkeypatch):
    seen = []

    def traced(program, recorded):
        seen.extend(leaf.clone() for leaf in recorded.leaves)
        return make_fx(program)(recorded.leaves, recorded.real)

    monkeypatch.setattr(graphs, "_traced", traced)
    model, x, y = nn.Linear(5, 3), torch.full((8, 5), 37.0), torch.full((8,), 2)
    fixed, support = recorder(model), Support.full(model)
    fixed.clipped_sum((x, y), support, 0.1)
    assert fixed.clipped_sum((x, y), support, 0.1) is not None and len(seen) == 2
    assert not bool((seen[0] == 37.0).any()) and not torch.equal(seen[1], y)


def test_a_new_support_a_moved_model_or_another_mode_is_recorded_anew():
    model, (x, y) = make("linear", 1, 8)
    support, fixed = Support.full(model), recorder(model)
    ready = [fixed.clipped_sum((x, y), support, 0.1) is not None for _ in range(2)]
    other = random_support(model, 0.5)
    ready += [fixed.clipped_sum((x, y), other, 0.1) is not None for _ in range(2)]
    model[0].weight.data = model[0].weight.data.clone()  # a recording would read the old memory
    ready += [fixed.clipped_sum((x, y), other, 0.1) is not None for _ in range(2)]
    model.eval()
    ready += [fixed.clipped_sum((x, y), other, 0.1) is not None for _ in range(2)]
    assert ready == [False, True] * 4


def test_dice_on_the_host_and_writes_to_the_model_are_not_recorded():
    class Sometimes(nn.Module):
        def __init__(self, act):
            super().__init__()
            self.layer, self.act = nn.Linear(5, 3), act
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            return self.layer(x) * self.act(self)

    def write(model):
        model.seen.add_(1.0)
        return 1.0

    def look(model):
        return 1.0 if bool(model.layer.weight.sum() > 0) else 2.0

    x, y = torch.randn(8, 5), torch.zeros(8, dtype=torch.long)
    for act, reason in (
        (lambda m: 1.0 + random.random(), "random numbers on the host"),
        (look, "cannot be recorded"),
    ):
        model = Sometimes(act)
        fixed, support = recorder(model), Support.full(model)
        fixed.clipped_sum((x, y), support, 0.1)
        with pytest.warns(UserWarning, match=reason):
            assert fixed.clipped_sum((x, y), support, 0.1) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once
            assert fixed.clipped_sum((x, y), support, 0.1) is None
    fixed = recorder(model := Sometimes(write))
    fixed.clipped_sum((x, y), (support := Support.full(model)), 0.1)
    with pytest.raises(ModelChanged):
        fixed.clipped_sum((x, y), support, 0.1)


@pytest.mark.parametrize(("examples", "sizes", "size"), [
    (1, 8, 1), (7, 8, 7), (8, 8, 8), (17, 8, 18), (1000, 8, 1024), (1025, 8, 1152), (1025, 32, 1056), (8192, 32, 8192),
])  # fmt: skip
def test_padding_stays_small(examples, sizes, size):
    assert fixed_size(examples, sizes) == size


@pytest.mark.slow
@pytest.mark.compiler
def test_a_compiled_sum_is_the_ordinary_one():
    model, (x, y) = make("linear", 1, 8)
    fixed, support = recorder(model), random_support(model, 0.5)
    fixed.clipped_sum((x, y), support, 0.1)
    found = fixed.clipped_sum((x, y), support, 0.1)
    slow = flat(clipped_sum(model, F.cross_entropy, (x, y), support, 0.1))
    assert found is not None and (flat(found) - slow).norm() <= 1e-5 * slow.norm()
