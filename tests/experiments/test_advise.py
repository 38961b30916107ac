"""Advice on real runs: what a run keeps for it, the command, and whether following it beats not following it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tptopk import Plan, fit
from tptopk.cli import main
from tptopk.privacy.accounting import round_up
from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.refusal import Refusal
from tptopk.supports.advice import advise
from tptopk.supports.scores import CoordinateScores
from tptopk.supports.support import Support
from tptopk.supports.warmup import FILE, WarmUp
from tptopk.training.run import RunFolder
from tptopk.training.verify import verify, warmup_in

QUICK = ["--accountant", "rdp", "--steps", "30", "--warmup", "0.4"]


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["tptopk", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0, *capsys.readouterr()


def records(count, seed, spread):
    """Ten features decide the label; 290 more do not, and vary by `spread`."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(10, generator=torch.Generator().manual_seed(99))
    inputs = spread * torch.randn(count, 300, generator=generator)
    inputs[:, :10] = torch.randn(count, 10, generator=generator)
    noise = 0.3 * torch.randn(count, generator=generator)
    return inputs, (inputs[:, :10] @ weights + noise > 0).long()


def trained(spread, ratio=1.0, rate=0.3, score="paper", after=1.0, **options):
    plan = Plan.calibrate(
        "tp-topk", epsilon=8.0, delta=1e-5, batch_size=200, dataset_size=2000, steps=300, active_ratio=ratio, warmup=0.5,
        warmup_budget=0.5, accountant="rdp",
    )  # fmt: skip
    model = nn.Linear(300, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    warmup = WarmUp(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    run = fit(
        model, records(2000, 0, spread), plan, optimizer, loss=F.cross_entropy, test_set=records(2000, 1, spread), score=score,
        learning_rates=[rate, rate * after], seed=0, on_private_gradient=warmup.add, **options,
    )  # fmt: skip
    return run, warmup


def test_following_the_advice_to_restrict_beats_not_following_it():
    """Features that do not matter but vary as much as those that do: clipping and noise suffer from them."""
    dense, warmup = trained(spread=1.0)
    found = advise(warmup)
    assert found.verdict == "restrict" and found.active_ratio < 0.3
    followed, _ = trained(spread=1.0, ratio=found.active_ratio, score=found.score, after=found.learning_rate[0])
    raised, _ = trained(spread=1.0, after=found.learning_rate[0])
    assert followed.test["accuracy"] > max(dense.test["accuracy"], raised.test["accuracy"]) + 0.02


def test_where_noise_costs_nothing_the_advice_is_not_to_restrict():
    """Features that do not matter and hardly vary: most coordinates carry no signal, and their noise does no harm."""
    _, warmup = trained(spread=0.02)
    found = advise(warmup)
    tenth = next(c for c in found.candidates if c.score == "paper" and 0.09 < c.active_ratio < 0.11)
    assert found.verdict != "restrict" and tenth.kept.low > 0.6 and tenth.outside < 0.5


def test_a_run_keeps_its_warm_up_and_verify_checks_it(tmp_path):
    run, warmup = trained(spread=1.0, ratio=0.4, out=tmp_path / "run")
    kept = warmup_in(tmp_path / "run")
    assert kept.plan == run.plan and kept.complete and kept.counts == warmup.counts
    assert all(torch.equal(value, warmup.state()[name]) for name, value in kept.state().items())
    assert verify(tmp_path / "run").holds
    content = (tmp_path / "run" / FILE).read_bytes()
    (tmp_path / "run" / FILE).write_bytes(content[:-4] + b"\x00\x00\x80\x3f")
    assert "warmup" in [what for what, ok, _ in verify(tmp_path / "run").checks if not ok]
    with pytest.raises(Refusal, match="not the file that the run left"):
        warmup_in(tmp_path / "run")


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
@pytest.mark.parametrize("stop", [5, 9])
def test_a_resumed_run_keeps_one_whole_warm_up(tmp_path, stop):
    """Stopped inside the warm-up and after it: the sums are those of the gradients that the model was moved by."""
    plan = Plan.calibrate(
        "tp-topk", epsilon=3.0, delta=1e-5, batch_size=200, dataset_size=2000, steps=16, warmup=0.5, accountant="rdp"
    )
    data, scores = records(2000, 0, 1.0), CoordinateScores()
    seen: dict[int, object] = {}

    def watch(gradient):
        if gradient.phase == 0:
            seen[gradient.step] = gradient

    def interrupt(record):
        if record.step == stop:
            raise KeyboardInterrupt

    for options in ({"on_step": interrupt}, {"resume": True}):
        torch.manual_seed(0)
        model = nn.Linear(300, 2)
        given = {"out": tmp_path / "run", "checkpoint_every": 4, "on_private_gradient": watch, "loss": F.cross_entropy}
        try:
            fit(model, data, plan, torch.optim.SGD(model.parameters(), lr=0.1), **given, **options)
        except KeyboardInterrupt:
            continue
    kept = warmup_in(tmp_path / "run")
    assert kept.counts == [2, 2, 2, 2] and verify(tmp_path / "run").holds
    for gradient in seen.values():
        scores.add(gradient, Support({n: torch.ones_like(v, dtype=torch.bool) for n, v in gradient.values.items()}))
    for name, value in scores.values().items():
        torch.testing.assert_close(kept.scores()[name], value)


def test_advise_runs_and_charges_a_warm_up_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, shown, errors = command(monkeypatch, capsys, "advise", *QUICK, "--plot", "advice.png")
    assert code == 0 and errors in ("", "calibrating the noise …\n")  # said on a slow machine
    for word in ("noise saved", "misranking", "charged: ε = ", "runs/advise-1", "progress", "wrote advice.png"):
        assert word in shown, word
    assert shown.startswith("Verdict: ")
    assert any(verdict in shown for verdict in ("restrict", "stay dense", "cannot tell"))
    assert (tmp_path / "advice.png").read_bytes()[:4] == b"\x89PNG"
    record = read_ledger(tmp_path / "runs" / "advise-1" / "ledger.jsonl")
    assert record.charged[0] == 12 and len(record.plan.phases) == 1
    verdict = verify(tmp_path / "runs" / "advise-1")
    assert verdict.holds and f"ε = {round_up(verdict.epsilon)} at" in shown
    code, again, _ = command(monkeypatch, capsys, "advise", "runs/advise-1", "--json")
    values = json.loads(again)
    assert code == 0 and "epsilon" not in values, "reading it again costs nothing"
    assert values["warmup_steps"] == 12 and values["steps"] == 18 and len(values["candidates"]) == 18
    assert [c["active_ratio"] for c in values["candidates"][:2]] == [1.0, 0.8]


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")  # of steps that the budget does not pay
@pytest.mark.parametrize("stop", [1, 9])  # before the first checkpoint, and between two
def test_a_warm_up_for_advice_that_was_interrupted_is_gone_on_with_and_read(tmp_path, monkeypatch, capsys, stop):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tptopk.cli.running.fit", partial(fit, checkpoint_every=4))

    def interrupt(self, warmup, gradient):
        honest(self, warmup, gradient)
        if gradient.step == stop:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        honest = RunFolder.take_in
        patch.setattr(RunFolder, "take_in", interrupt)
        code, shown, errors = command(monkeypatch, capsys, "advise", *QUICK)
    assert code == 130 and not shown
    assert "go on with: tptopk train --resume runs/advise-1, then: tptopk advise runs/advise-1" in errors
    code, _, errors = command(monkeypatch, capsys, "advise", "runs/advise-1")
    assert (
        code == 2 and "was not finished; go on with it, then ask again: tptopk train --resume runs/advise-1" in errors
    )
    assert command(monkeypatch, capsys, "train", "--resume", "runs/advise-1")[0] == 0
    code, shown, _ = command(monkeypatch, capsys, "advise", "runs/advise-1", "--json")
    values = json.loads(shown)
    assert code == 0 and 8 <= values["warmup_steps"] < 12 and values["steps"] == 18
    assert verify(tmp_path / "runs" / "advise-1").holds


def test_a_warm_up_that_is_not_of_the_run_is_refused():
    plan = Plan.calibrate(
        "dp-sgd", epsilon=3.0, delta=1e-5, batch_size=200, dataset_size=2000, steps=16, accountant="rdp"
    )
    used = WarmUp(plan)
    used.add(PrivateGradient({"w": torch.zeros(3)}, plan.noise_std(plan.phases[0]), 0, 0))
    two = replace(plan, method="tp-topk", phases=(plan.phases[0], plan.phases[0]), target_epsilon=None)
    for warmup, by, message in (
        (used, plan, "1 steps already"),
        (WarmUp(replace(plan, dataset_size=4000)), plan, "begins otherwise"),
        (WarmUp(two), two, "a plan of one phase"),
        ("warm", plan, "is a str"),
    ):
        model = nn.Linear(300, 2)
        with pytest.raises(Refusal, match=message):
            fit(
                model,
                records(2000, 0, 1.0),
                by,
                torch.optim.SGD(model.parameters(), lr=0.1),
                loss=F.cross_entropy,
                warmup=warmup,
            )


def test_what_advise_refuses_it_refuses_before_anything_is_charged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, expected in (
        (["--ratios", "0.0001"], "k = 0 of d = 5050"),
        (["--ratios", "0.5,2"], "ratio is 2.0"),
        (["--level", "1.2"], "level is 1.2"),
        (["--plot", "a.xyz"], "must end in .png, .svg, .pdf"),
        (["--plot", "nowhere/a.png"], "no folder nowhere"),
        (["--active-ratio", "0.00001"], "leaves k = 0 of d = 5050"),
    ):
        code, shown, errors = command(monkeypatch, capsys, "advise", *QUICK, *words)
        errors = errors.removeprefix("calibrating the noise …\n")  # said on a slow machine
        assert code == 2 and not shown and expected in errors and len(errors.splitlines()) == 1, (words, errors)
        assert list(tmp_path.iterdir()) == [], words


def test_a_drawing_that_fails_loses_no_advice_and_says_that_the_warm_up_is_paid_for(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise Refusal("cannot write the figure: no space left")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tptopk.report.plots.advice_figure", full)
    code, shown, errors = command(monkeypatch, capsys, "advise", *QUICK, "--plot", "runs/advise-1/advice.png")
    assert code == 2 and shown.startswith("Verdict: ")
    assert "no space left; the warm-up is charged and kept: tptopk advise runs/advise-1 reads it" in errors
    assert command(monkeypatch, capsys, "advise", "runs/advise-1")[0] == 0


def test_advise_on_a_finished_run_costs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, capsys, "train", *QUICK)[0] == 0
    before = (tmp_path / "runs" / "tp-topk-1" / "ledger.jsonl").read_bytes()
    code, shown, _ = command(monkeypatch, capsys, "advise", "runs/tp-topk-1", "--ratios", "0.5,0.1")
    assert (
        code == 0
        and "costs nothing" in shown
        and (tmp_path / "runs" / "tp-topk-1" / "ledger.jsonl").read_bytes() == before
    )
    for words, expected in (
        (["runs/tp-topk-1", "--ratios", "0.0001"], "k = 0"),
        (["runs/tp-topk-1", "--ratios", "few"], "numbers separated by commas"),
        (["runs/tp-topk-1", "--epsilon", "1"], "its own plan"),
        (["runs/none"], "none"),
        (["--method", "dp-sgd", *QUICK], "no warm-up"),
        (["--accountant", "rdp", "--steps", "10"], "at least 8"),
    ):
        code, _, errors = command(monkeypatch, capsys, "advise", *words)
        errors = errors.removeprefix("calibrating the noise …\n")  # said on a slow machine
        assert code == 2 and expected in errors and len(errors.splitlines()) == 1, (words, errors)
    path = tmp_path / "runs" / "tp-topk-1" / FILE
    path.write_bytes(bytes(np.random.default_rng(0).integers(0, 256, 500, dtype=np.uint8)))
    code, _, errors = command(monkeypatch, capsys, "advise", "runs/tp-topk-1")
    assert code == 2 and "not the file that the run left" in errors
    path.unlink()
    code, _, errors = command(monkeypatch, capsys, "advise", "runs/tp-topk-1")
    assert code == 2 and FILE in errors
