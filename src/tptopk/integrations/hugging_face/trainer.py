"""`PrivateTrainer`: Hugging Face's loop, with the library's mechanism where its backward pass and clipping were."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from tptopk.gradients.clipping import ENGINES
from tptopk.gradients.examples import Batch, take
from tptopk.gradients.precision import check_precision
from tptopk.gradients.probe import refuse_mixing_in_batches
from tptopk.gradients.traces import ModelChanged
from tptopk.integrations.empty_batches import CollateOrEmpty
from tptopk.integrations.hugging_face.callback import Along
from tptopk.integrations.hugging_face.loader import AsDictionary, Samples, poisson_loader
from tptopk.integrations.hugging_face.losses import settled_loss
from tptopk.integrations.hugging_face.planning import planned
from tptopk.integrations.hugging_face.refusals import (
    refuse_arguments,
    refuse_evaluation_on_training_records,
    refuse_losses_of_a_batch,
    refuse_surroundings,
)
from tptopk.integrations.hugging_face.steps import FOLDER, TrainerSteps, checkpoint_at
from tptopk.integrations.methods import check_options, private_method
from tptopk.integrations.optimizer import PrivateOptimizer
from tptopk.privacy.plan import PrivacyWarning
from tptopk.privacy.refusal import Refusal, check_count, nearest
from tptopk.training.checks import check_length, largest_batch, most_examples
from tptopk.training.run import Run
from tptopk.training.sampling import Records
from tptopk.training.trained import TRAINED, was_trained
from tptopk.training.updates import check_optimizer

OF_PRIVATE_RECORDS = ("loss", "grad_norm", "train_loss")  # what Trainer logs of its training batches


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """`Trainer` whose training is (ε, δ)-differentially private. All arguments of `Trainer`, and by keyword:

    `target_epsilon`, `target_delta`: the budget of the whole training, never passed.
    `clip_norm`: C, or (C₁, C₂) for the two phases of a method with a warm-up; `max_grad_norm` of the arguments is not read.
    `method`: "dp-sgd", or any private method of the library, with its `active_ratio`, `warmup` and `warmup_budget`.
    `dataset_size`: the number of training records, which you declare public; left out, it is counted, and a warning says so.
    `loss`: a function of (model, batch) that returns one loss an example, [B]. Left out, it is the model's own: what the model says
    of a batch of this one example, so that tokens are averaged over their own example and −100 is left out.
    `micro_batch_size`: records in memory at once; changes memory and time, never the update. By default as many as fit.
    `engine`, `precision`, `accountant`, `secure_noise`: as for `tptopk.fit` and `Plan.calibrate`.
    `log_training_loss`: show the mean loss of the training batches. It is computed from private records without noise, and the
    guarantee does not cover it; the statement then says so. Off, no training loss is computed, logged, saved or returned.

    What becomes of `Trainer`:

    ====================================  ===========================================================================
    part                                  here
    ====================================  ===========================================================================
    `per_device_train_batch_size`         the expected size of a Poisson sample; an epoch is dataset_size / size steps
    the train loader                      Poisson samples, never prepared by accelerate; a sample may be empty
    backward, clipping, optimizer.step    each example clipped, summed, noised, divided by the expected size; charged first
    `loss`, `grad_norm`, `total_flos`     not logged: the first two are of private records, the third tells the sample
    padding to a batch's longest record   refused unless it changes no other record's loss; pad to one public length
    checkpoints                           Trainer's own, and in each a folder `privacy` with charges, support and scores
    `output_dir`                          has a run folder `privacy`: `tptopk verify`, `statement` and `report` read it
    `resume_from_checkpoint`              charges made after the checkpoint stay charged; randomness is fresh
    `evaluate`, `predict`                 untouched; what they say of other records is outside the guarantee. Given the
                                          `train_dataset` itself they warn, and the statement says so; as `eval_dataset`
                                          it is refused. A copy of it, or a part, is not recognised
    ====================================  ===========================================================================

    Formal guarantees: the sequence of the model's weights, and all that Trainer logs or saves but for metrics of evaluation, is
    (`epsilon`, `plan.delta`)-DP for the records of `train_dataset`, as `run.statement()` says. Callbacks of yours are not looked into.
    """

    optimizer: Any  # Trainer's, as accelerate wraps it

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        target_epsilon: float,
        target_delta: float,
        clip_norm: float | Sequence[float] = 1.0,
        method: str = "dp-sgd",
        active_ratio: float | None = None,
        warmup: float | None = None,
        warmup_budget: float | None = None,
        dataset_size: int | None = None,
        loss: Callable[[nn.Module, Batch], Tensor] | None = None,
        micro_batch_size: int | None = None,
        engine: str = "auto",
        precision: str = "tf32",
        accountant: str = "pld",
        secure_noise: bool = False,
        log_training_loss: bool = False,
        **keywords: Any,
    ) -> None:
        spec = private_method(method)
        check_options(
            spec,
            active_ratio=(active_ratio, spec.sparse),
            warmup=(warmup, spec.warmup),
            warmup_budget=(warmup_budget, spec.warmup),
        )
        check_precision(precision)
        if engine not in (*ENGINES, "auto"):
            raise Refusal(f"unknown engine {engine!r}{nearest(str(engine), [*ENGINES, 'auto'])}")
        if micro_batch_size is not None:
            check_count("micro_batch_size", micro_batch_size)
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        refuse_arguments(args)
        if model is None:
            raise Refusal("give model=, built already; model_init= is for searches, and no plan pays for a search")
        super().__init__(model, args, *positional, **keywords)
        refuse_surroundings(self)
        refuse_evaluation_on_training_records(self)
        if loss is None:
            refuse_losses_of_a_batch(self, Trainer)
        self._loss, self._micro_batch_size, self._engine, self._precision = loss, micro_batch_size, engine, precision
        self._secure_noise, self._log_training_loss = secure_noise, log_training_loss
        self._loss_was_shown = log_training_loss
        self._collate = AsDictionary(
            self._get_collator_with_removed_columns(self.data_collator, description="training")
        )
        self._records = Records(self.train_dataset, self._collate)
        self.plan = planned(
            args, self._records, dataset_size, method, epsilon=target_epsilon, delta=target_delta, clip_norm=clip_norm,
            accountant=accountant, active_ratio=active_ratio, warmup=warmup, warmup_budget=warmup_budget,
        )  # fmt: skip
        check_length(self._records, self.plan)
        if log_training_loss:
            warnings.warn(
                "log_training_loss=True: the training loss is computed from private records without noise; the guarantee does not "
                "cover it, nor who reads it",
                PrivacyWarning,
                stacklevel=2,
            )
        self.run: Run | None = None
        self._samples = Samples(self.plan, secure_noise=secure_noise)
        self._steps: TrainerSteps | None = None
        self._optimizer_of_last_training: object = None
        self._checkpoint: Path | None = None
        self.add_callback(Along(self))

    @property
    def epsilon(self) -> float:
        """ε at the plan's δ of all steps charged so far, those of earlier attempts among them."""
        ledger = self._steps.ledger if self._steps is not None else None
        return ledger.epsilon() if ledger is not None else 0.0

    # What is settled before anything is charged.

    def _one(self) -> Batch:
        return self._records.batch(torch.zeros(1, dtype=torch.long), self.args.device)

    def _settled_steps(self) -> TrainerSteps:
        """Try everything on made-up examples; what cannot be private is refused here."""
        refuse_arguments(self.args)  # they may have been changed since
        refuse_evaluation_on_training_records(self)
        check_length(self._records, self.plan)
        self._records.refuse_mixing_collate()
        one = self._one()
        self.model.train()
        loss, engine = settled_loss(self.model, self._loss, one, self.label_names, self._engine)
        self._records.refuse_mixing_by_length(self.model, loss, self.args.device)
        most = self._micro_batch_size
        if most is None:
            fits = largest_batch(self.model, loss, one, self.plan, engine, self._precision, None)
            most = min(fits, most_examples(self.args.device))
        refuse_mixing_in_batches(self.model, loss, one, min(most, math.ceil(self.plan.expected_batch_size())))
        # never the randomness of an earlier attempt
        self._samples = Samples(self.plan, secure_noise=self._secure_noise)
        return TrainerSteps(
            self.model, loss, engine, self.plan, self._samples.streams, micro_batch_size=most, precision=self._precision
        )

    # Training.

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """As `Trainer.train`. Its `training_loss` is NaN unless `log_training_loss`, and its metrics say what was spent."""
        if trial is not None:
            raise Refusal(
                "trial: a search trains on the private records again and again, and this plan pays for one training"
            )
        self._checkpoint = checkpoint_at(resume_from_checkpoint, self.args.output_dir)
        if was_trained(self.model) and self._checkpoint is None:
            raise Refusal(
                "this model was trained before, and its weights carry that run's cost; give resume_from_checkpoint=, or build model and "
                "trainer anew"
            )
        self._steps, self.run = self._settled_steps(), None
        if self.optimizer is not None and self.optimizer is self._optimizer_of_last_training:
            self.optimizer = None
        status = "failed"
        try:
            checkpoint = None if self._checkpoint is None else str(self._checkpoint)
            output = super().train(checkpoint, None, ignore_keys_for_eval)
            status = "finished" if self._steps.steps_left < 1 else "interrupted"  # by a callback
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except ModelChanged:
            self._steps.abandon()
            raise
        finally:
            self._optimizer_of_last_training = self.optimizer
            if self._steps.ledger is not None:
                self.run = self._steps.close(
                    status, self._config, test_metrics=self._has_evaluated, training_loss=self._loss_was_shown
                )
        self._steps.warn_of_dropped()
        if not self._log_training_loss:
            output = output._replace(training_loss=math.nan)
        output.metrics.update(epsilon=self.epsilon, delta=self.plan.delta)
        return output

    def _begin(self, max_steps: int, global_step: int) -> None:
        """Everything is built and nothing was drawn: open the ledger."""
        assert self._steps is not None
        if max_steps != self.plan.steps:
            raise Refusal(
                f"Trainer is about to take {max_steps} steps and the plan pays for {self.plan.steps}: the arguments were changed since "
                "PrivateTrainer was built. Build it anew"
            )
        self._steps.open(
            Path(self.args.output_dir) / FOLDER,
            self._checkpoint,
            global_step,
            self._config,
            training_loss=self._loss_was_shown,
        )
        if self._steps.steps_left < 1:
            raise Refusal(
                "with the steps that earlier attempts lost, the budget is spent: there is no step left to take"
            )
        TRAINED.add(self.model)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Poisson samples of the train_dataset. It is not prepared by accelerate, which would share them out and even them up."""
        steps = self._steps
        collate = CollateOrEmpty(self._collate, take(self._one(), slice(0, 0)))
        return poisson_loader(
            self.train_dataset,
            collate,
            self._samples,
            self.plan,
            taken=lambda: steps.taken if steps is not None else 0,
            args=self.args,
        )

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Trainer's optimizer, whose steps are private ones."""
        given = self.optimizer is not None
        original = super().create_optimizer(model)
        if self._steps is None:
            return original
        if not given and type(original).__module__.split(".")[0:2] not in (
            ["torch", "optim"],
            ["transformers", "optimization"],
        ):
            raise Refusal(f"optim={str(self.args.optim)!r}: it may step by itself during backward; use one of torch's")
        check_optimizer(original, self.model)
        self._steps.use(original)
        self.optimizer = PrivateOptimizer(original, self._steps, self.plan.expected_batch_size())
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Hand the sample over. What Trainer takes for the loss is zero: none is computed."""
        assert self._steps is not None
        model.train()
        batch = self._prepare_inputs(inputs)
        self._steps.given(batch)
        return self._steps.mean_loss(batch) if self._log_training_loss else torch.zeros((), device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Clipping is the mechanism's, example by example."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """None is computed outside the mechanism; the private gradient's is in the run folder's metrics."""

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Not counted: the number tells how many records were drawn, and amplification needs the sample to be secret."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer.log`, without what was computed from private records."""
        for name in ("grad_norm",) if self._log_training_loss else OF_PRIVATE_RECORDS:
            logs.pop(name, None)
        super().log(logs, start_time)

    # Evaluation.

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """As `Trainer.evaluate`; on the train_dataset with a warning, and the statement says so."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        self._notice(self.eval_dataset[given] if isinstance(given, str) else given)
        metrics: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return metrics

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """As `Trainer.predict`; on the train_dataset with a warning, and the statement says so."""
        self._notice(test_dataset)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def _notice(self, dataset: object) -> None:
        if dataset is None or dataset is not self.train_dataset:
            return
        self._loss_was_shown = True
        if self._steps is not None and self.run is not None:
            self._steps.add_that_the_loss_was_shown(self.run)
        warnings.warn(
            "this measures the model on its own train_dataset: the figures are computed from private records without noise; the guarantee does "
            "not cover them, and the statement says so",
            PrivacyWarning,
            stacklevel=3,
        )

    # Checkpoints.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self._steps is not None
        self._steps.save(Path(output_dir))
        super()._save_optimizer_and_scheduler(output_dir)

    # Records of the run.

    @property
    def _config(self) -> dict[str, Any]:
        return {"trainer": "transformers.Trainer", "model": type(self.model).__name__}

    @property
    def _has_evaluated(self) -> bool:
        return any(name.startswith("eval_") for entry in self.state.log_history for name in entry)
