"""Several rows of one example: views, and units of several records."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tptopk
from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.refusal import Refusal
from tptopk.training.rows import RowRecords

CPU = torch.device("cpu")


def plan(size, *, steps=4, rate=0.5, sigma=1e-3, unit="record", method="dp-sgd"):
    """So little noise that updates can be compared."""
    phase = Phase(steps=steps, sample_rate=rate, noise_multiplier=sigma, clip_norm=0.05)
    return Plan(phases=(phase,), delta=1e-7, dataset_size=size, unit=unit, method=method, accountant="rdp")


def data(records=24):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(records, 1, 6, 6, generator=generator), torch.arange(records) % 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


def mirrored(x):
    return torch.stack([x, x.flip(-1)], 1)


def trained(train_set, numbers, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = tptopk.fit(model, train_set, numbers, optimizer, loss=F.cross_entropy, seed=3, **options)
    return torch.cat([p.detach().flatten() for p in run.model.parameters()]), run


def by_hand(examples, numbers, **options):
    """The same steps with each example's rows averaged in its loss by hand, one example at a time."""
    x, y = examples

    def loss(model, batch):
        losses = F.cross_entropy(
            model(batch[0].flatten(0, 1)), batch[1].repeat_interleave(x.shape[1]), reduction="none"
        )
        return losses.view(len(batch[0]), -1).mean(1)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tptopk.fit(model, (x, y), numbers, optimizer, loss=loss, seed=3, engine="reference")
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_views_are_averaged_before_clipping():
    x, y = data()
    numbers = plan(24)
    found, run = trained((x, y), numbers, views=mirrored)
    stored, _ = trained((mirrored(x), y), numbers, views=lambda views: views)
    assert run.engine == "capture"
    torch.testing.assert_close(found, by_hand((mirrored(x), y), numbers), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found, stored)


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_records_of_a_unit_are_drawn_together_and_averaged():
    x, y = data()
    y = torch.arange(8).repeat_interleave(3) % 3
    ids = [f"patient {n}" for n in range(8) for _ in range(3)]
    found, run = trained((x, y), plan(8, unit="patient"), unit=ids, most_rows=3)
    together = (x.view(8, 3, 1, 6, 6), torch.arange(8) % 3)
    expected = by_hand(together, plan(8))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert "one patient, with all its records" in run.statement() and "A person with several" not in run.statement()


def test_units_of_unequal_size_weigh_the_same_and_can_be_cut():
    x, y = torch.arange(6.0)[:, None], torch.arange(6)
    ids = torch.tensor([7, 7, 7, 2, 5, 5])
    (rows, targets), weights = RowRecords((x, y), None, None, ids, 3).batch(torch.tensor([0, 1, 2]), CPU)
    assert weights.sum(1).tolist() == pytest.approx([1, 1, 1])
    assert (rows[..., 0] * weights).sum(1).tolist() == pytest.approx([1.0, 3.0, 4.5])
    assert targets[1].tolist() == [3, 3, 3], "filled up with its own record, at weight zero"
    cut = RowRecords((x, y), None, lambda v: torch.stack([v, -v], 1), ids, 2)
    (rows, _), weights = cut.batch(torch.tensor([0, 2]), CPU)
    assert rows.shape == (2, 4, 1) and weights.tolist() == [[0.25] * 4, [0.25] * 4]
    assert rows[0, :, 0].tolist() == [0, -0.0, 1, -1] and len(cut) == 3


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("layer", ["cnn", "gru"])
def test_models_with_rows_are_captured(rows, layer):
    """The probe knows that an example is several rows, wherever a layer has its batch."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.GRU(6, 5), nn.Linear(5, 3)

        def forward(self, x):  # [B, 1, 6, 6], time first inside
            return self.head(self.layer(x[:, 0].transpose(0, 1))[0][-1])

    x, y = data()
    model = network() if layer == "cnn" else Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tptopk.fit(model, (x, y), plan(24, sigma=2.0), optimizer, loss=F.cross_entropy, views=tptopk.shifted(rows, 1))
    assert run.engine == "capture"


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_a_whole_unit_moves_an_update_by_at_most_the_clip_norm():
    """A unit of a hundred records with large gradients, there or replaced by one that contributes nothing."""
    x, y = data(120)
    ids = torch.cat([torch.zeros(100, dtype=torch.long), torch.arange(1, 21)])
    numbers = plan(21, steps=1, rate=1.0, unit="patient")
    with_unit, _ = trained((x * 50, y), numbers, unit=ids, most_rows=100)
    gone = x.clone() * 50
    gone[:100] = float("nan")  # a unit that is not finite contributes zero
    without, _ = trained((gone, y), numbers, unit=ids, most_rows=100)
    assert 0 < (with_unit - without).norm() <= 0.5 * 0.05 / 21 * (1 + 1e-3)


def test_shifted_views_are_pieces_of_their_own_image():
    torch.manual_seed(0)
    images = torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8)
    seen = tptopk.shifted(40, 2)(images)
    assert seen.shape == (2, 40, 3, 8, 8)
    padded = F.pad(images, [2] * 4, mode="reflect")
    places = set()
    for view in range(40):
        for one in range(2):
            match = [
                (down, right, mirror)
                for down in range(5)
                for right in range(5)
                for mirror in (False, True)
                if torch.equal(
                    seen[one, view].flip(-1) if mirror else seen[one, view],
                    padded[one, :, down : down + 8, right : right + 8],
                )
            ]
            assert len(match) == 1
            places |= set(match)
    assert len(places) > 20, "of 50 ways to move an image, 80 draws see 40 on average"
    assert torch.equal(tptopk.mirrored(images)[:, 1], images.flip(-1))


def test_bad_views_and_units_are_refused():
    x, y = data()
    with pytest.raises(Refusal, match="give unit="):
        trained((x, y), plan(8, unit="patient"))
    with pytest.raises(Refusal, match="say Plan.calibrate"):
        trained((x, y), plan(24), unit=list(range(24)), most_rows=1)
    with pytest.raises(Refusal, match="23 ids for 24"):
        trained((x, y), plan(8, unit="patient"), unit=list(range(23)), most_rows=1)
    with pytest.raises(Refusal, match="patients and this one has 24"):
        trained((x, y), plan(8, unit="patient"), unit=list(range(24)), most_rows=1)
    for ids in ([float("nan")] * 24, [None] * 24, torch.zeros(24, 1), [1.5] * 24, [1] * 23 + ["1"]):
        with pytest.raises(Refusal, match="a whole number for each record, or a text for each"):
            trained((x, y), plan(8, unit="patient"), unit=ids, most_rows=1)
    for options in ({"unit": list(range(24))}, {"most_rows": 3}):
        with pytest.raises(Refusal, match="go together"):
            trained((x, y), plan(24, unit="patient" if "unit" in options else "record"), **options)
    generator, kept = torch.Generator(), [torch.zeros(1)]

    def with_a_mean(x):
        return torch.stack([x, x - x.mean(0)], 1)

    def of_many(x):
        return with_a_mean(x) if len(x) > 2 else mirrored(x)

    def of_its_own_dice(x):
        return with_a_mean(x) + torch.rand(1, generator=generator)

    def with_state(x):
        kept[0] = 0.5 * kept[0] + x.mean()
        return torch.stack([x, x - kept[0]], 1)

    for views, said in ((with_a_mean, "mix"), (of_many, "mix"), (of_its_own_dice, "twice"), (with_state, "twice")):
        with pytest.raises(Refusal, match=said):
            trained((x, y), plan(24), views=views)
    with pytest.raises(Refusal, match="views must turn"):
        trained((x, y), plan(24), views=lambda x: x[:1])
    with pytest.raises(Refusal, match="inputs, targets"):
        tptopk.fit(
            network(), x, plan(24), torch.optim.SGD(network().parameters(), lr=0.1), loss=lambda m, b: m(b).sum(1),
            views=mirrored,
        )  # fmt: skip
    with pytest.raises(Refusal, match="short word"):
        plan(8, unit="")
