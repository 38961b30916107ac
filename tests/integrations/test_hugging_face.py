"""Hugging Face's Trainer, made private: what a step is, what it costs, and what is drawn."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.utils.data import IterableDataset

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainerCallback

from tests.integrations.trainers import BATCH, RATE, N, network, private, records, weights, with_sample
from tptopk.integrations.hugging_face import loader
from tptopk.privacy import accounting
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.plan import Phase, Plan, PrivacyWarning
from tptopk.privacy.refusal import Refusal
from tptopk.training.sampling import PoissonSampler
from tptopk.training.verify import verify


def own_clipped_sum(model: nn.Module, chosen: list[dict[str, torch.Tensor]], clip_norm: float) -> list[torch.Tensor]:
    """What the model itself says of each record alone, differentiated by plain autograd, clipped and added up."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for record in chosen:
        loss = model(**{name: value[None] for name, value in record.items()}).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for sum_, g in zip(total, gradients, strict=True):
            sum_ += g * min(1.0, clip_norm / float(norm))
    return total


# A step.


@pytest.mark.parametrize(
    ("kind", "engine", "micro_batch_size"),
    [("class", "capture", 64), ("class", "capture", 2), ("words", "capture", 64), ("next", "vmap", 3)],
)
def test_a_step_without_noise_is_the_reference_clipped_sum(
    kind, engine, micro_batch_size, tmp_path, monkeypatch, no_noise
):
    chosen, clip_norm = [0, 3, 4, 11, 17], 0.9
    with_sample(monkeypatch, *chosen)
    model = network(kind)
    before = copy.deepcopy(model)
    trainer = private(
        tmp_path, model, kind, clip_norm=clip_norm, micro_batch_size=micro_batch_size, args={"max_steps": 1}
    )
    trainer.train()
    assert trainer.run.engine == engine
    total = own_clipped_sum(before, [records(kind)[i] for i in chosen], clip_norm)
    expected = torch.cat([(p - RATE * g / BATCH).flatten() for p, g in zip(before.parameters(), total, strict=True)])
    assert torch.allclose(weights(model), expected, atol=1e-6)
    assert float((weights(model) - weights(before)).norm()) > 1e-3


@pytest.mark.parametrize(("kind", "bad"), [("class", 999), ("words", -100)])
def test_one_record_moves_a_step_by_no_more_than_the_clip(kind, bad, tmp_path, monkeypatch, no_noise):
    """Whatever it is: long, with a label that is no class, or without any target."""
    data = records(kind)
    data[7] = {**data[7], "labels": torch.full_like(data[7]["labels"], bad)}
    moved = {}
    for extra in ([], [4], [7]):
        with_sample(monkeypatch, 1, 2, *extra)
        model = network(kind)
        private(tmp_path / f"{extra}", model, kind, clip_norm=0.05, train_dataset=data, args={"max_steps": 1}).train()
        moved[tuple(extra)] = weights(model)
    assert float((moved[(4,)] - moved[()]).norm()) == pytest.approx(RATE * 0.05 / BATCH, rel=1e-3)
    assert torch.equal(moved[(7,)], moved[()])


def test_a_sample_without_records_is_a_charged_noisy_step(tmp_path, monkeypatch):
    with_sample(monkeypatch)
    model = network()
    before = weights(model)
    trainer = private(tmp_path, model, args={"max_steps": 2})
    trainer.train()
    noise = (weights(model) - before).double()
    plan = trainer.plan
    expected = 2 * (RATE * plan.noise_std(plan.phases[0])) ** 2
    assert read_ledger(tmp_path / "privacy" / "ledger.jsonl").charged == {0: 2}
    # of 1,000 draws, within 6 standard errors: a false alarm once in 1e8 runs
    assert abs(float(noise.square().mean()) / expected - 1) < 6 * math.sqrt(2 / len(noise))


def test_the_chosen_coordinates_alone_move_after_the_warm_up(tmp_path):
    model, seen = network(), []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            seen.append(weights(model))

    arguments = {"optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 0.01}
    trainer = private(
        tmp_path, model, method="tp-topk", active_ratio=0.25, warmup=0.5, args=arguments, callbacks=[Look()]
    )
    trainer.train()
    assert int((seen[-1] != seen[5]).sum()) == math.floor(0.25 * len(seen[0])) == trainer.run.support.size
    assert bool((seen[5] != seen[4]).all())
    assert (tmp_path / "privacy" / "warmup.safetensors").exists()  # `tptopk advise` reads it


# What it costs.


@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk"])
def test_epsilon_is_the_plans(method, tmp_path):
    arguments = {"max_steps": -1, "num_train_epochs": 2.5, "lr_scheduler_type": "linear", "optim": "adamw_torch_fused"}
    trainer = private(tmp_path, method=method, args=arguments)
    assert trainer.plan.steps == 10 and trainer.epsilon == 0
    output = trainer.train()
    assert output.global_step == 10 and trainer.run.status == "finished"
    assert trainer.epsilon == trainer.plan.epsilon() == trainer.run.epsilon <= 8.0
    segments = [phase.segment for phase in trainer.plan.phases]
    assert trainer.epsilon == accounting.epsilon(segments, 1e-3, "rdp")
    verdict = verify(tmp_path / "privacy")
    assert verdict.holds and verdict.epsilon == trainer.epsilon


# Sampling.


def test_samples_are_poisson_and_no_loader_of_accelerates(tmp_path):
    """Inclusions of each record over 600 draws are binomial: χ² over 40 records, a false alarm once in 1e6 runs."""
    data = [{**record, "labels": torch.tensor(i)} for i, record in enumerate(records())]
    trainer = private(tmp_path, train_dataset=data)
    batches = trainer.get_train_dataloader()
    assert type(batches) is torch.utils.data.DataLoader and len(batches) == N // BATCH
    counts, sizes = np.zeros(N), []
    for _ in range(150):
        for batch in batches:
            counts[batch["labels"].numpy()] += 1
            sizes.append(len(batch["labels"]))
    q, draws = BATCH / N, 600
    assert chi2.sf(((counts - q * draws) ** 2 / (draws * q * (1 - q))).sum(), N) > 1e-6
    assert np.var(sizes) == pytest.approx(N * q * (1 - q), rel=0.4)  # of a shuffle's fixed batches it would be 0


@pytest.mark.parametrize("workers", [0, 2])
def test_no_sample_is_drawn_twice_even_if_epochs_are_broken_off(workers, tmp_path, monkeypatch):
    numbers, sample = [], PoissonSampler.sample

    def drawn(self, phase, step, rate):
        numbers.append(step)
        return sample(self, phase, step, rate)

    class BreakOff(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            control.should_epoch_stop = state.global_step % 3 == 0

    monkeypatch.setattr(PoissonSampler, "sample", drawn)
    arguments = {"num_train_epochs": 3, "max_steps": -1, "dataloader_num_workers": workers}
    trainer = private(tmp_path, callbacks=[BreakOff()], args=arguments)
    trainer.train()
    assert trainer.state.global_step == 9 and trainer.run.status == "interrupted"
    assert len(numbers) == len(set(numbers)) >= 9


def test_the_dataset_must_be_one_whose_records_can_be_drawn(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(records())

    with pytest.raises(Refusal, match="IterableDataset"):
        private(tmp_path, train_dataset=Stream())
    with pytest.raises(Refusal, match="declares a dataset of 41"):
        private(tmp_path, dataset_size=41)
    with pytest.warns(PrivacyWarning, match="40 records is thereby declared public"):
        private(tmp_path, dataset_size=None)
    trainer = private(tmp_path)
    trainer.train_dataset.append(records()[0])
    with pytest.raises(Refusal, match="has 41"):
        trainer.train()


def test_what_a_collate_function_draws_is_secret_and_moves_no_generator():
    """Trainer saves the state of the global generators with every checkpoint: it must not tell how many records were drawn."""
    plan = Plan(
        phases=(Phase(steps=4, sample_rate=0.5, noise_multiplier=1.0, clip_norm=1.0),), delta=1e-4, dataset_size=20
    )
    found, after = [], []
    for size in (20, 20, 5):
        fetch = loader.Fetch(
            [torch.zeros(3)] * 20, lambda records: torch.stack(records) + torch.rand(3), loader.Samples(plan).streams
        )
        torch.manual_seed(42)
        found.append(fetch(list(range(size))))
        after.append(torch.get_rng_state())
        assert not torch.equal(found[-1][:1], fetch([0])), "each batch has its own"
    assert not torch.equal(found[0], found[1])
    assert torch.equal(after[0], after[1]) and torch.equal(after[0], after[2])
    assert pickle.loads(pickle.dumps(loader.Fetch([], list, loader.Samples(plan).streams)))._streams is None


def test_generators_that_trainer_saves_do_not_depend_on_the_sample(tmp_path):
    """Two runs with dropout and different samples leave torch's generator in one state."""
    states = []
    for n in range(2):
        model = network()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
        private(tmp_path / str(n), model).train()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
