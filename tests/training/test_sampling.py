"""Promise 4: Poisson sampling is real."""

from __future__ import annotations

import random
from collections import UserDict

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import tptopk
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.training.sampling import PoissonSampler, Records, micro_batches

SIZE, RATE, STEPS = 400, 0.15, 600
CPU = torch.device("cpu")


def poisson_verdict(samples: list[np.ndarray]) -> dict[str, float]:
    """p-values of what Poisson sampling implies: how batch sizes spread, how often each record comes, how often a pair comes together."""
    sizes = np.array([len(s) for s in samples])
    counts = np.bincount(np.concatenate(samples), minlength=SIZE)
    size_statistic = ((sizes - SIZE * RATE) ** 2).sum() / (SIZE * RATE * (1 - RATE))
    count_statistic = ((counts - STEPS * RATE) ** 2).sum() / (STEPS * RATE * (1 - RATE))
    pairs = list(zip(samples[::2], samples[1::2], strict=True))  # disjoint, so that repeats are independent
    repeats, chances = sum(len(np.intersect1d(a, b)) for a, b in pairs), SIZE * len(pairs)
    return {
        "dispersion of sizes": two_sided(chi2, size_statistic, STEPS),
        "counts of records": two_sided(chi2, count_statistic, SIZE),
        "records twice in a row": 2
        * min(binom.cdf(repeats, chances, RATE**2), binom.sf(repeats - 1, chances, RATE**2)),
    }


def two_sided(distribution, statistic, freedom) -> float:
    return 2 * min(distribution.cdf(statistic, freedom), distribution.sf(statistic, freedom))


def test_the_sampler_is_poisson():
    """One of the three p-values is below 3e-7 once in a million runs."""
    sampler = PoissonSampler(SIZE, Streams("r"))
    verdict = poisson_verdict([sampler.sample(0, step, RATE).numpy() for step in range(STEPS)])
    assert min(verdict.values()) > 3e-7, verdict


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.5, 0.9])
def test_every_record_flips_its_own_coin(rate):
    """All 64 outcomes of six records come as often as independent coins make them, and the places of a large dataset
    come evenly from end to end. Each is beyond its bound once in a million runs."""
    sampler, draws = PoissonSampler(6, Streams("r")), 20_000
    outcomes = [sum(1 << i for i in sampler.sample(0, step, rate).tolist()) for step in range(draws)]
    observed = np.bincount(outcomes, minlength=64)
    expected = draws * np.array([rate ** bin(n).count("1") * (1 - rate) ** (6 - bin(n).count("1")) for n in range(64)])
    common = expected > 5
    statistic = ((observed - expected)[common] ** 2 / expected[common]).sum()
    assert chi2.sf(statistic, common.sum()) > 1e-6
    rare = observed[~common].sum()
    assert common.all() or binom.sf(rare - 1, draws, expected[~common].sum() / draws) > 1e-6
    size = 10**6
    large = np.concatenate([PoissonSampler(size, Streams("r")).sample(0, step, rate).numpy() for step in range(3)])
    assert large.max() < size and large.min() >= 0
    tenths = np.bincount(large // (size // 10), minlength=10)
    assert chi2.sf(((tenths - 0.3 * size * rate) ** 2).sum() / (0.3 * size * rate * (1 - rate)), 10) > 1e-7


class Watched(Dataset):
    """Writes down which of its records are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        self.read.append(i)
        return torch.zeros(2), i % 2


def test_what_fit_reads_is_poisson():
    """What a training run reads, step by step, seen from its dataset. False alarm: once in a million runs, as above."""
    dataset, samples, model = Watched(), [], nn.Linear(2, 2)

    def next_step(record):
        samples.append(np.array(dataset.read, dtype=int))
        dataset.read.clear()

    phase = tptopk.Phase(steps=1 + STEPS, sample_rate=RATE, noise_multiplier=5.0, clip_norm=1.0)
    plan = tptopk.Plan(phases=(phase,), delta=1e-5, dataset_size=SIZE, accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tptopk.fit(model, dataset, plan, optimizer, loss=F.cross_entropy, on_step=next_step)
    assert len(samples) == 1 + STEPS
    verdict = poisson_verdict(samples[1:])  # before the first step the first record is read to try the model
    assert min(verdict.values()) > 3e-7, verdict


def test_a_shuffling_sampler_fails():
    generator, samples = np.random.default_rng(0), []
    while len(samples) < STEPS:
        order = generator.permutation(SIZE)
        samples += [order[i : i + 60] for i in range(0, SIZE - 59, 60)]
    verdict = poisson_verdict(samples[:STEPS])
    assert verdict["dispersion of sizes"] < 1e-6 and verdict["records twice in a row"] < 1e-6


def test_a_fixed_size_sampler_fails():
    generator = np.random.default_rng(0)
    verdict = poisson_verdict([generator.choice(SIZE, 60, replace=False) for _ in range(STEPS)])
    assert verdict["dispersion of sizes"] < 1e-6


def test_edge_rates():
    sampler = PoissonSampler(50, Streams("r"))
    assert sampler.sample(0, 0, 1.0).tolist() == list(range(50))
    assert any(len(sampler.sample(0, step, 0.001)) == 0 for step in range(50)), "empty batches happen and are kept"
    assert all(len(sampler.sample(0, step, 1e-300)) == 0 for step in range(5))
    drawn = PoissonSampler(10**12, Streams("r")).sample(0, 0, 1e-9)
    assert 800 < len(drawn) < 1200 and (drawn.diff() > 0).all() and drawn.max() < 10**12


def test_phases_and_steps_sample_afresh():
    sampler = PoissonSampler(1000, Streams("r"))
    drawn = {tuple(sampler.sample(phase, step, 0.3).tolist()) for phase in range(2) for step in range(10)}
    assert len(drawn) == 20


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.tensor([float(i), i * i]), i % 3


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class Anonymised(TensorDataset):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return torch.zeros_like(x), y


def test_datasets_of_all_kinds_give_the_same_batches():
    x = torch.stack([Squares()[i][0] for i in range(10)])
    y = torch.arange(10) % 3
    wanted = torch.tensor([1, 4, 9])
    for dataset in (Squares(), TensorDataset(x, y), (x, y), [x, y]):
        batch = Records(dataset).fetch(wanted)
        assert torch.equal(batch[0], x[wanted]) and torch.equal(batch[1], y[wanted])
    assert not Records(Anonymised(x, y)).fetch(wanted)[0].any(), "a dataset's own way to read a record is used"


def test_micro_batches_cover_the_sample_once():
    batches = list(micro_batches(Records(Squares()), torch.tensor([0, 2, 5, 7, 8]), 2, CPU))
    assert [len(b[1]) for b in batches] == [1, 2, 2]
    assert torch.cat([b[0][:, 0] for b in batches]).tolist() == [0, 2, 5, 7, 8]
    assert list(micro_batches(Records(Squares()), torch.tensor([], dtype=torch.long), 2, CPU)) == []


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (DataLoader(Squares()), "give the dataset itself, not a DataLoader"),
        (Endless(), "an IterableDataset cannot be sampled record by record"),
        (3, r"a int is no dataset: it needs len\(\) and \[\]"),
        (object(), r"a object is no dataset: it needs len\(\) and \[\]"),
    ],
)
def test_what_cannot_be_sampled_is_refused(dataset, words):
    with pytest.raises(Refusal, match=words):
        Records(dataset)


def two_views(records):
    x = torch.stack([r[0] for r in records])
    return torch.cat([x, x + 0.1]), torch.tensor([r[1] for r in records] * 2)


def mixing(records):
    x = torch.stack([r[0] for r in records])
    return (x + x.roll(1, 0)) / 2, torch.tensor([r[1] for r in records])


def padding(records):
    return torch.nn.utils.rnn.pad_sequence([r[0] for r in records], batch_first=True), torch.tensor(
        [r[1] for r in records]
    )


def test_a_collate_that_multiplies_or_mixes_records_is_refused():
    with pytest.raises(Refusal, match="4 examples of 2 records"):
        Records(Squares(), two_views).refuse_mixing_collate()
    with pytest.raises(Refusal, match="count more than once"):
        Records(Squares(), two_views).fetch(torch.tensor([0, 1, 2]))
    with pytest.raises(Refusal, match="mixes records"):
        Records(Squares(), mixing).refuse_mixing_collate()
    Records(Squares(), padding).refuse_mixing_collate()


class Flagged:
    """Records as a tokenizer's, with a flag."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int):
        return {"ids": torch.arange(6) + index, "flag": torch.tensor(index > 4), "label": index % 2}


def stacked(records):
    return {name: torch.stack([torch.as_tensor(r[name]) for r in records]) for name in records[0]}


def cumulative(records):  # the first record is untouched
    batch = stacked(records)
    return {**batch, "ids": batch["ids"].cumsum(0)}


def greatest_of_more_than_two(records):
    batch = stacked(records)
    return {**batch, "ids": batch["ids"].amax(0).expand_as(batch["ids"])} if len(records) > 2 else batch


def label_of_the_first(records):
    batch = stacked(records)
    return {**batch, "label": batch["label"][:1].expand(len(records))}


def flag_of_the_first(records):
    batch = stacked(records)
    return {**batch, "flag": batch["flag"][:1].expand(len(records))}


def random_label_of_another(records):
    batch = masked_ids(records)
    return {**batch, "label": batch["label"].roll(1)}


def last_changed_by_those_before(records):
    batch = stacked(records)
    batch["ids"][-1] += batch["ids"][:-1].sum(0)
    return batch


def scaled_by_their_number(records):
    batch = stacked(records)
    return {**batch, "ids": batch["ids"] * len(records)}


def numbered(records):
    return {**stacked(records), "place": torch.arange(len(records))}


@pytest.mark.parametrize(
    "collate",
    [
        cumulative,
        greatest_of_more_than_two,
        label_of_the_first,
        flag_of_the_first,
        random_label_of_another,
        last_changed_by_those_before,
        scaled_by_their_number,
        numbered,
    ],
)
def test_a_collate_that_mixes_elsewhere_than_in_the_first_of_two_records_is_refused(collate):
    with pytest.raises(Refusal, match="mixes records"):
        Records(Flagged(), collate).refuse_mixing_collate()


def masked_ids(records):
    batch = stacked(records)
    return {**batch, "ids": torch.where(torch.rand(batch["ids"].shape) < 0.15, 0, batch["ids"])}


def shuffled_words(records):
    """As many draws as a record has different ids: after it, the records' own draws are others."""
    for r in records:
        different = sorted(set(r["ids"].tolist()))
        random.shuffle(different)
        r["ids"][0] = different[0]
    return stacked(records)


def taken_apart(records):
    labels = [r.pop("label") for r in records]
    for r in records:
        r["ids"] += 1
    return {**stacked(records), "label": torch.tensor(labels)}


def named_labels(records):
    return {
        **stacked(records),
        "label": torch.tensor([("no", "yes").index(("no", "yes")[r["label"]]) for r in records]),
    }


@pytest.mark.parametrize("collate", [stacked, masked_ids, shuffled_words, taken_apart, named_labels])
def test_a_collate_that_keeps_records_apart_is_accepted(collate):
    before = random.getstate(), torch.get_rng_state()
    Records(Flagged(), collate).refuse_mixing_collate()
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_a_collate_with_a_generator_of_its_own_is_refused_with_the_reason():
    own = torch.Generator().manual_seed(0)

    def collate(records):
        batch = stacked(records)
        return {**batch, "ids": batch["ids"] + torch.randint(0, 9, batch["ids"].shape, generator=own)}

    with pytest.raises(Refusal, match="generator of its own"):
        Records(Flagged(), collate).refuse_mixing_collate()


def padded_lists(records):
    longest = max(len(r["ids"]) for r in records)
    return {"ids": torch.tensor([list(r["ids"]) + [0] * (longest - len(r["ids"])) for r in records])}


def padded_texts(records):
    return padded_lists([{"ids": [len(word) for word in r["text"].split()]} for r in records])


def masked_at_random(records):
    x = torch.stack([r[0] for r in records])
    return torch.where(torch.rand(x.shape) < 0.3, 0.0, x), torch.tensor([r[1] for r in records])


class OtherMapping(UserDict):
    """As a tokenizer's output: a mapping and no dict."""


@pytest.mark.parametrize(
    ("record", "collate"),
    [
        ({"ids": [3, 4]}, padded_lists),
        (OtherMapping(ids=[3, 4]), padded_lists),
        ({"ids": np.array([3, 4])}, padded_lists),
        ({"text": "a word"}, padded_texts),
    ],
)
def test_padding_to_the_longest_is_noticed_whatever_sequences_are_made_of(record, collate):
    short, long = Records([record] * 5, collate).lengthened()
    assert long["ids"].shape[1] == 3 * short["ids"].shape[1]


def test_a_collate_that_draws_for_each_record_does_not_mix_them():
    Records(Squares(), masked_at_random).refuse_mixing_collate()


def test_padding_that_changes_a_gradient_is_refused_even_where_the_loss_hides_it():
    """The output is zero at first, and the loss log 2 whatever the padding."""

    class Mean(nn.Module):
        def __init__(self, masked: bool) -> None:
            super().__init__()
            self.embed, self.out, self.masked = nn.Embedding(10, 4), nn.Linear(4, 2), masked
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

        def forward(self, ids):
            there = ids.ne(0).unsqueeze(2) if self.masked else torch.ones_like(ids, dtype=torch.bool).unsqueeze(2)
            return self.out((self.embed(ids) * there).sum(1) / there.sum(1).clamp(min=1))

    def loss(model, batch):
        return F.cross_entropy(model(batch["ids"]), batch["ids"][:, 0] % 2, reduction="none")

    found = Records([{"ids": [3, 4, 5, 6]}] * 5, padded_lists)
    found.refuse_mixing_by_length(Mean(masked=True), loss, CPU)
    with pytest.raises(Refusal, match="padded to the longest"):
        found.refuse_mixing_by_length(Mean(masked=False), loss, CPU)
