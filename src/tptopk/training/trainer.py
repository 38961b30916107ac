"""`fit`: train a model by a plan."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tptopk.gradients.precision import check_clipping, check_precision
from tptopk.gradients.traces import ModelChanged
from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.oracle import refuse_oracles
from tptopk.privacy.plan import Plan, PrivacyWarning
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal, check_count, refuse_unknown_keywords
from tptopk.supports.policies import RatioSchedule, SupportPolicy
from tptopk.supports.support import Support
from tptopk.supports.warmup import WarmUp
from tptopk.training.annealing import Annealer, Annealing, check_annealing
from tptopk.training.checks import (
    check_length,
    check_rates,
    check_seed,
    check_test_set,
    check_warmup,
    refuse_own_records,
    settle_device,
)
from tptopk.training.distributed import Team
from tptopk.training.evaluation import evaluate
from tptopk.training.facts import facts_of_ledger
from tptopk.training.loop import Loop
from tptopk.training.mechanism import Mechanism
from tptopk.training.metrics import Metrics, StepRecord, metrics_of
from tptopk.training.opening import opened
from tptopk.training.preparing import records_and_losses, settled
from tptopk.training.rows import Views
from tptopk.training.run import Run
from tptopk.training.sampling import Collate, PoissonSampler
from tptopk.training.standardize import Standardize, check_queries, holds_queries
from tptopk.training.standing import Standing, check_scheduler_can_be_saved, follow
from tptopk.training.trained import TRAINED, was_trained
from tptopk.training.updates import WeightAverage, check_optimizer


@refuse_unknown_keywords
def fit(
    model: nn.Module,
    train_set: Any,
    plan: Plan,
    optimizer: Optimizer,
    *,
    loss: Callable[..., Tensor],
    test_set: Any = None,
    collate: Collate | None = None,
    scheduler: LRScheduler | None = None,
    learning_rates: Sequence[float] | None = None,
    views: Views | None = None,
    unit: Any = None,
    most_rows: int | None = None,
    standardize: Standardize | None = None,
    clipping: str = "flat",
    annealing: Annealing | None = None,
    score: str = "paper",
    ratio_schedule: str | RatioSchedule = "constant",
    ema: float | None = None,
    precision: str = "tf32",
    micro_batch_size: int | None = None,
    memory_limit: int | str | None = None,
    cuda_graphs: bool = True,
    compile: bool = False,
    engine: str = "auto",
    device: torch.device | str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    account: str | Path | None = None,
    secure_noise: bool = False,
    seed: int | None = None,
    on_step: Metrics | Callable[[StepRecord], object] | None = None,
    on_private_gradient: Callable[[PrivateGradient], None] | None = None,
    warmup: WarmUp | None = None,
    config: Mapping[str, Any] | None = None,
    schema: Mapping[str, Any] | None = None,
) -> Run:
    """Train `model` in place by `plan` and return the run.

    `train_set`: a map-style dataset, a TensorDataset or a tuple of tensors, of exactly `plan.dataset_size` records.
    `loss`: a torch loss for (inputs, targets) records, or any `loss(model, batch) -> [B]`.
    `scheduler`: any learning-rate scheduler that needs no metric; stepped after every step.
    `learning_rates`: one for each phase of the plan, instead of the optimizer's own.
    `views`: a function from inputs [B, …] to [B, V, …], several versions of each example (mirrored, shifted), whose
    gradients are averaged before they are clipped as one. `unit`: an id for each record, where the plan's `unit` is
    something else than a record: records of one id are drawn together and averaged, so that the guarantee is for the
    unit. `most_rows`, a public number, is how many records of a unit take part at most: the first ones.
    `standardize`: a `Standardize` layer of the model, whose statistics are released by two queries of the plan.
    `clipping`: "flat", or "auto-s" (automatic clipping), which scales every gradient to a norm just below C.
    `annealing`: take back steps that seem to raise the loss (SA-DP-SGD); that is asked of the data, by queries of the plan.
    `score`: how `tp-topk` and `on-topk` rank coordinates: "paper" or "factored".
    `ratio_schedule`: "constant", "linear" or "cosine" from all coordinates down to the plan's active ratio, or a
    callable from progress in [0, 1] to a ratio.
    `ema`: decay of a moving average of the weights; the run's model is then the average.
    `precision`: "fp32"; "tf32", which is fp32 with a GPU's fast matrix products and on a CPU the same; or "bf16". Norms
    and sums are float32 in each, and what may be rounded is clipped to a little less than C.
    `micro_batch_size`: records in memory at once; changes memory and time, never the update. By default as many as fit.
    `memory_limit`: bytes ("4GiB") that one physical batch may take beyond the model; 2 GiB on a CPU, half the free
    memory of a GPU unless said. Out of memory, a GPU's batch is halved and the same records are taken again.
    `cuda_graphs`: replay the steps of a support as one recorded graph. `compile`: let torch.compile make that
    computation faster, at the price of a minute or so at the start and at the switch of phase.
    `engine`: "auto", "capture", "vmap" or "reference" (see `clipped_sum`).
    `out`: a folder for the run. `resume`: go on with the run in that folder from its last checkpoint, given the same
    plan, network, data and optimizer; steps that were charged and lost stay charged, and as many of the last steps as
    that makes unaffordable are dropped. `checkpoint_every`: steps between checkpoints; a twentieth of the run unless said.
    `account`: an account file (`tptopk account open`) that pays for the whole plan before the first step.
    `secure_noise`: noise from ChaCha20 instead of Philox; slower, needs the cryptography package.
    `seed`: repeatable noise and samples, for experiments: such a run must not be released.
    `on_step`: a function, called after every step with its `StepRecord`; or `tptopk.training.metrics.Metrics`, an object whose
    `step(record)` and `end(run)` are called, such as `JsonLines(path)`. `on_private_gradient`: given every private gradient before
    the model moves by it; what is made of it without looking at the data again costs nothing. `warmup`: takes in the first
    phase of a plan that has no other, and is kept in the folder, for advice on a plan that begins so; a plan with a warm-up keeps
    one unasked.
    `config` and `schema`: plain values to keep in the folder: settings, and what you declared of a table's columns. `resume` refuses
    another schema. They are public: nothing computed from the records belongs in them.

    Formal guarantees: the sequence of private gradients, and so the model and everything else returned except the
    metrics on `test_set`, is (`run.epsilon`, `plan.delta`)-DP for the records of `train_set`, as `run.statement()`
    says. Refusals come before anything is charged. On Ctrl-C or an error the folder is left readable, holding the
    model so far and what was charged.
    """
    refuse_oracles(locals())
    team = Team()
    with team.together():
        records, losses = records_and_losses(train_set, collate, loss, plan, views, unit, most_rows)
        check_length(records, plan)
        mark = team.mark_of(records)
        device = settle_device(model, device)
        check_optimizer(optimizer, model)
        check_seed(seed)
        check_rates(learning_rates, plan, scheduler)
        check_precision(precision)
        check_clipping(clipping)
        check_queries(standardize, plan, model, records, device, resume)
        check_annealing(annealing, plan, team.size, resume)
        metrics = metrics_of(on_step) if team.is_first else None
        if micro_batch_size is not None:
            check_count("micro_batch_size", micro_batch_size)
        model.train()
        computing = settled(
            model, records, losses, loss, plan, device,
            engine=engine, precision=precision, micro_batch_size=micro_batch_size, memory_limit=memory_limit,
        )  # fmt: skip
        if test_set is not None:
            if plan.spec.private:
                refuse_own_records(train_set, test_set)
            check_test_set(model, test_set, loss, collate, device)
        if plan.spec.private and was_trained(model):
            warnings.warn(
                "this model was trained before in this process: its weights carry what that run cost, which this run's ε does not "
                "count",
                PrivacyWarning,
                stacklevel=3,
            )
    with team.together():
        team.refuse_other_plans(plan)
    with team.together():
        team.refuse_other_records(mark)
    team.equal_models(model)
    average = WeightAverage(model, ema) if ema is not None else None
    if resume and out is None:
        raise Refusal("resume=True needs out=, the folder of the run")
    if checkpoint_every is not None:
        check_count("checkpoint_every", checkpoint_every)
    check_scheduler_can_be_saved(scheduler, out)
    shared = team.number(secrets.randbits(62)) if seed is None and team.size > 1 else seed
    # which coordinates are drawn at random depends on no data and need not be secret
    public = Streams(run="", seed=shared)
    policy = SupportPolicy(plan, Support.full(model), lambda n: public.numpy("support", n), score, ratio_schedule)
    asked = warmup is not None
    if warmup is not None:
        check_warmup(warmup, plan)
    elif out is not None and plan.spec.warmup:
        warmup = WarmUp(plan)
    standing = Standing(model, optimizer, scheduler, average, policy, warmup)
    folder = None
    with team.together():
        if team.is_first:
            ledger, folder, streams = opened(
                model, plan, standing, out=out, resume=resume, from_start=standardize is None and not holds_queries(plan),
                account=account, seed=seed, secure=secure_noise, config=config or {}, schema=schema,
            )  # fmt: skip
    with team.together():
        if not team.is_first:
            if resume and out is not None:
                follow(Path(out), standing)
            ledger, streams = Ledger(plan), Streams(run=secrets.token_hex(8), seed=seed, secure=secure_noise)
    ledger.count_along(team)
    every = checkpoint_every or max(1, plan.steps // 20)
    mechanism = Mechanism(
        model,
        losses,
        plan,
        ledger,
        streams,
        computing.engine,
        precision=precision,
        replay=cuda_graphs and device.type == "cuda",
        compiled=compile,
        clipping=clipping,
        team=team,
    )
    history = folder.keep_metrics(sum(ledger.steps.values())) if folder and resume else []
    if folder and warmup and asked:
        folder.keep_warmup(warmup)  # what it advises on is not in the plan

    def after_step(record: StepRecord) -> None:
        history.append(record)
        if folder:
            folder.record(record)
            if record.step % every == 0 and record.step < plan.steps:
                standing.save(folder.path, ledger)
        if metrics is not None:
            metrics.step(record)

    started = time.monotonic()
    status = "failed"
    try:
        TRAINED.add(model)
        ledger.charge_queries()
        if standardize is not None and not resume:
            if team.is_first:
                standardize.ask(records, mechanism if plan.spec.private else None, computing.most, device)
            team.equal_models(model)
            if folder:
                standing.save(folder.path, ledger)  # what was asked is not asked again
        annealer = None
        if annealing is not None:
            annealer = Annealer(annealing, model, losses, records, plan, mechanism, streams, computing.most, device)
        shown: list[Callable[[PrivateGradient], object]] = []
        if warmup and team.is_first:
            shown.append(partial(folder.take_in, warmup) if folder else warmup.add)
        if on_private_gradient and team.is_first:
            shown.append(on_private_gradient)
        Loop(
            model=model, plan=plan, ledger=ledger, records=records, losses=losses, optimizer=optimizer, scheduler=scheduler,
            learning_rates=learning_rates, precision=precision, micro_batch_size=computing.most, device=device,
            team=team, mechanism=mechanism, sampler=PoissonSampler(plan.dataset_size, streams), policy=policy,
            average=average, annealer=annealer, shown=shown, after_step=after_step,
        ).run()  # fmt: skip
        if folder and warmup and asked and not warmup.complete:
            folder.keep_warmup(warmup)  # its last steps were dropped
        status = "finished"
        dropped = plan.steps - sum(ledger.steps.values())
        if dropped:
            warnings.warn(
                f"the last {dropped} of {plan.steps} steps were dropped: with what was charged before, lost steps of earlier attempts "
                "among it, they would cost more than the budget",
                PrivacyWarning,
                stacklevel=3,
            )
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except ModelChanged:
        if folder:
            folder.abandon(ledger)
            folder = None
        raise
    finally:
        if status != "finished":
            ledger.recount()
        if average is not None and history:
            average.write_to_model()
        model.eval()
        facts = facts_of_ledger(
            ledger, seeded=seed is not None, averaged=average is not None, status=status, generator=streams.name
        )
        run = Run(
            model,
            plan,
            ledger.epsilon(),
            policy.current,
            history,
            {},
            facts,
            status,
            time.monotonic() - started,
            computing.engine,
            folder.path if folder else None,
            dict(config or {}),
        )
        if folder:
            folder.close(run, ledger)
        if metrics is not None and status != "finished":
            metrics.end(run)
    if test_set is not None:
        try:
            run.test = evaluate(model, test_set, loss, collate=collate, device=device)
        except Exception as error:  # the model is trained and paid for; a bad test record must not cost it
            warnings.warn(f"training finished, but the test set could not be measured: {error}", stacklevel=3)
        run.facts = replace(run.facts, test_metrics=bool(run.test))
        if folder:
            folder.describe(run)
    if metrics is not None:
        metrics.end(run)
    return run
