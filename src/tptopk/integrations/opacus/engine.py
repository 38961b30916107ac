"""The engine: what is charged is in its accountant, what is returned trains by it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler

from tptopk.gradients.capture import NotCaptured, claimed_modules
from tptopk.gradients.probe import refuse_unsuitable
from tptopk.integrations.empty_batches import CollateOrEmpty
from tptopk.integrations.methods import check_options, private_method
from tptopk.integrations.opacus import checkpoints
from tptopk.integrations.opacus.accountant import Accountant
from tptopk.integrations.opacus.keywords import check_keywords, for_each_phase
from tptopk.integrations.opacus.loader import PoissonLoader, check_collate, check_loader
from tptopk.integrations.opacus.steps import PrivateSteps
from tptopk.integrations.optimizer import PrivateOptimizer
from tptopk.models.fix import fix
from tptopk.privacy.plan import Phase, Plan, PrivacyWarning
from tptopk.privacy.refusal import Refusal, check_count, check_number, refuse_unknown_keywords
from tptopk.privacy.statement import statement
from tptopk.training.facts import facts_of_ledger
from tptopk.training.trained import TRAINED, was_trained
from tptopk.training.updates import check_optimizer

MOST_EPOCHS = 10_000  # where a plan ends that was given no horizon


class PrivacyEngine:
    """Makes a module, an optimizer and a loader private. One engine, one training, one account.

    Formal guarantees: the sequence of the model's weights is (ε, δ)-DP for the records of the loader's dataset, with
    ε = `get_epsilon(δ)`, as long as the loop trains by what `make_private` returned and its loss is as said above. The
    dataset's size is declared public by using the engine, which says so. The ledger is in memory and in checkpoints:
    what a killed process did after its last checkpoint is forgotten with its model, and must be.

    `accountant`: "prv" (privacy loss distributions, as `tptopk.Plan`'s "pld") or "rdp". `secure_mode`: noise from ChaCha20.
    """

    @refuse_unknown_keywords
    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        self.secure_mode = secure_mode
        self.accountant = Accountant(accountant)

    @refuse_unknown_keywords
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float | Sequence[float],
        max_grad_norm: float | Sequence[float],
        criterion: Any = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        method: str = "dp-sgd",
        active_ratio: float | None = None,
        warmup_steps: int | None = None,
    ) -> tuple[nn.Module, PrivateOptimizer, PoissonLoader]:
        """The module as it is, an optimizer that steps privately, and a loader of Poisson samples of the dataset.

        Keywords are Opacus's; `method` is any private method of the library, with its `active_ratio` (0.4 unless said).
        `warmup_steps` is the length of the warm-up, for methods that have one; `noise_multiplier` and `max_grad_norm` may
        then be pairs, one number for each phase. No horizon is known here, so ε is that of the steps charged so far
        and grows for as long as the loop goes on, up to 10,000 epochs.
        """
        spec = private_method(method)
        check_options(spec, active_ratio=(active_ratio, spec.sparse), warmup_steps=(warmup_steps, spec.warmup))
        check_keywords(
            batch_first=batch_first, loss_reduction=loss_reduction, poisson_sampling=poisson_sampling, clipping=clipping,
            noise_generator=noise_generator, grad_sample_mode=grad_sample_mode, wrap_model=wrap_model,
            rand_on_empty=rand_on_empty, criterion=criterion,
        )  # fmt: skip
        check_loader(data_loader)
        counts = [MOST_EPOCHS * len(data_loader)]
        if spec.warmup:
            if warmup_steps is None:
                raise Refusal(
                    f"{method} needs warmup_steps=, the length of its warm-up: make_private knows no horizon. Or use "
                    "make_private_with_epsilon, where warmup= is a share of the epochs"
                )
            check_count("warmup_steps", warmup_steps)
            counts = [warmup_steps, counts[0]]
        names = ["warm-up", "sparse"] if spec.warmup else ["training"]
        size = len(data_loader.dataset)  # type: ignore[arg-type]
        plan = Plan(
            phases=tuple(
                Phase(steps=count, sample_rate=1 / len(data_loader), noise_multiplier=sigma, clip_norm=clip, name=name)
                for count, sigma, clip, name in zip(
                    counts,
                    for_each_phase("noise_multiplier", noise_multiplier, len(counts)),
                    for_each_phase("max_grad_norm", max_grad_norm, len(counts)),
                    names,
                    strict=True,
                )
            ),
            delta=min(1e-5, 0.1 / size),
            dataset_size=size,
            method=method,
            accountant=self.accountant.of_plans,
            active_ratio=(0.4 if active_ratio is None else active_ratio) if spec.sparse else 1.0,
        )
        return self._made_private(module, optimizer, data_loader, plan, clipping, loss_reduction)

    @refuse_unknown_keywords
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float | Sequence[float],
        criterion: Any = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        method: str = "dp-sgd",
        active_ratio: float | None = None,
        warmup: float | None = None,
        warmup_budget: float | None = None,
    ) -> tuple[nn.Module, PrivateOptimizer, PoissonLoader]:
        """As `make_private`, with noise for `epochs` passes over the loader to cost `target_epsilon`, and never more.

        `warmup` is the warm-up's share of the steps and `warmup_budget` its share of ε (0.3 each unless said). A step past
        the planned epochs raises `BudgetSpent`.
        """
        spec = private_method(method)
        check_options(
            spec,
            active_ratio=(active_ratio, spec.sparse),
            warmup=(warmup, spec.warmup),
            warmup_budget=(warmup_budget, spec.warmup),
        )
        check_keywords(
            batch_first=batch_first, loss_reduction=loss_reduction, poisson_sampling=poisson_sampling, clipping=clipping,
            noise_generator=noise_generator, grad_sample_mode=grad_sample_mode, wrap_model=wrap_model,
            rand_on_empty=rand_on_empty, criterion=criterion,
        )  # fmt: skip
        check_loader(data_loader)
        check_number("epochs", epochs, above=0)
        given = {"active_ratio": active_ratio, "warmup": warmup, "warmup_budget": warmup_budget}
        plan = Plan.calibrate(
            method,
            epsilon=target_epsilon,
            delta=target_delta,
            batch_size=1,  # the rate is 1 / len(loader), whatever the last batch's size
            dataset_size=len(data_loader),
            steps=max(1, round(epochs * len(data_loader))),
            clip_norm=for_each_phase("max_grad_norm", max_grad_norm, 2 if spec.warmup else 1),
            accountant=self.accountant.of_plans,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
        plan = replace(plan, dataset_size=len(data_loader.dataset))  # type: ignore[arg-type]
        return self._made_private(module, optimizer, data_loader, plan, clipping, loss_reduction)

    def _made_private(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader[Any],
        plan: Plan,
        clipping: str,
        loss_reduction: str,
    ) -> tuple[nn.Module, PrivateOptimizer, PoissonLoader]:
        if self.accountant.steps is not None:
            raise Refusal(
                "this engine has made a training private already; one engine keeps one account, so make another"
            )
        if isinstance(optimizer, PrivateOptimizer) or was_trained(module):
            raise Refusal(
                "this module or optimizer was trained or made private before, and its weights carry that training's cost; build both anew, "
                "or go on with what make_private returned"
            )
        self.validate(module=module, optimizer=optimizer, data_loader=loader)
        empty = check_collate(loader)
        expected = max(1, int(plan.dataset_size * (1 / len(loader))))  # Opacus's public divisor, rounded down
        steps = PrivateSteps(
            module,
            optimizer,
            plan,
            clipping=clipping,
            loss_reduction=loss_reduction,
            divisor=expected if loss_reduction == "mean" else 1.0,
            secure=self.secure_mode,
        )
        warnings.warn(
            f"the loader{' with shuffle=True' if isinstance(loader.sampler, RandomSampler) else ''} is replaced by "
            f"Poisson sampling: each of the dataset's {plan.dataset_size} records is in a batch with probability "
            f"1/{len(loader)}, so that batches have {expected} records on average and none may be left out. The dataset's size is "
            "thereby declared public",
            PrivacyWarning,
            stacklevel=4,
        )
        TRAINED.add(module)
        self.accountant.steps = steps
        private_loader = PoissonLoader(loader, steps, CollateOrEmpty(loader.collate_fn, empty), len(loader))
        return module, PrivateOptimizer(optimizer, steps, expected), private_loader

    def get_epsilon(self, delta: float) -> float:
        """ε at δ of all steps charged so far, an upper bound."""
        return self.accountant.get_epsilon(delta)

    def statement(self, delta: float | None = None) -> str:
        """What may be claimed for the training so far and what may not, in Markdown; at the plan's δ unless given.

        A training without a horizon says that it ended here, which may depend on the data; one that was planned says how much of it was taken. One
        that went on from a checkpoint says so, and that what a process did after its last checkpoint is not counted.
        """
        steps = self.accountant.steps
        if steps is None:
            raise Refusal("call make_private first: a statement is of a private training")
        steps.refuse_if_changed()
        plan, charged = steps.plan, steps.ledger.charged
        whole = all(charged[i] >= p.steps for i, p in enumerate(plan.phases))
        if plan.target_epsilon is None:
            phases = (replace(p, steps=max(1, charged[i])) for i, p in enumerate(plan.phases))
            plan = replace(plan, phases=tuple(phases))
        if delta is not None:
            check_number("delta", delta, above=0, below=1)
            plan = replace(plan, delta=delta)
        facts = facts_of_ledger(
            steps.ledger,
            seeded=False,
            averaged=False,
            status="finished" if whole else "unfinished",
            generator="chacha20" if self.secure_mode else "philox",
        )
        return statement(plan, replace(facts, epsilon=self.get_epsilon(plan.delta), in_memory=True))

    def validate(self, *, module: nn.Module, optimizer: Optimizer | None, data_loader: DataLoader[Any] | None) -> None:
        """Refuse what cannot be trained privately here; nothing is run."""
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise Refusal(
                f"the module is a {type(module).__name__}; one process and one device, with the module itself"
            )
        places = {t.device for t in (*module.parameters(), *module.buffers())}
        if len(places) > 1:
            raise Refusal(f"the module lies on several devices ({', '.join(sorted(map(str, places)))}); move it to one")
        if any(place.type == "meta" for place in places):
            raise Refusal("the module is on the meta device and holds no numbers; move it to a CPU or a GPU first")
        refuse_unsuitable(module)
        try:
            claimed_modules(module)
        except NotCaptured as error:
            raise Refusal(f"{error}; tptopk.fit has other engines, for models that hooks cannot follow") from error
        if optimizer is not None:
            check_optimizer(optimizer, module)
        if data_loader is not None:
            check_loader(data_loader)

    def is_compatible(
        self, *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> bool:
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except Refusal:
            return False
        return True

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """The module with every BatchNorm replaced by a GroupNorm, in place."""
        return fix(module)

    @refuse_unknown_keywords
    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module,
        optimizer: PrivateOptimizer | None = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        module_state_dict_kwargs: None = None,
        torch_save_kwargs: None = None,
    ) -> None:
        """Write where the training stands to the folder `path`: safetensors and JSON, nothing pickled, no secret.

        The plan with its noise and all charges are always in it. `checkpoint_dict`: plain values of your own.
        """
        _refuse_given(noise_scheduler, grad_clip_scheduler, module_state_dict_kwargs, torch_save_kwargs)
        steps = self._steps_of(module, optimizer)
        steps.refuse_if_changed()
        checkpoints.save(path, steps, optimizer=optimizer is not None, yours=checkpoint_dict or {})

    @refuse_unknown_keywords
    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module,
        optimizer: PrivateOptimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        module_load_dict_kwargs: None = None,
        torch_load_kwargs: None = None,
    ) -> dict[str, Any]:
        """Go on from a checkpoint, after the same `make_private` as the training had; returns your own values.

        Steps that were charged stay charged, in the checkpoint and in this process; randomness is fresh.
        """
        _refuse_given(noise_scheduler, grad_clip_scheduler, module_load_dict_kwargs, torch_load_kwargs)
        return checkpoints.load(path, self._steps_of(module, optimizer), optimizer=optimizer is not None)

    def _steps_of(self, module: nn.Module, optimizer: object) -> PrivateSteps:
        steps = self.accountant.steps
        if steps is None:
            raise Refusal("call make_private first: a checkpoint is of a private training")
        if module is not steps.module:
            raise Refusal("this module is not the one that this engine made private")
        if optimizer is not None and not (
            isinstance(optimizer, PrivateOptimizer) and optimizer._private_steps is steps
        ):
            raise Refusal("this optimizer is not the one that make_private returned")
        return steps


def _refuse_given(*keywords: object) -> None:
    if any(value is not None for value in keywords):
        raise Refusal(
            "one plan owns the noise and the clip, so there are no schedulers of them, and nothing is pickled, so there are no "
            "keywords for torch; a checkpoint takes path, module, optimizer and checkpoint_dict"
        )
