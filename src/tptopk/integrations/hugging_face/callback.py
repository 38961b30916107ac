"""What the training does at moments that `Trainer` alone knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainingArguments

if TYPE_CHECKING:
    from tptopk.integrations.hugging_face.trainer import PrivateTrainer


class Along(TrainerCallback):  # type: ignore[misc]
    """Opens the ledger when training begins, and ends it when no step is left that the budget pays for."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **others: Any) -> None:
        self._trainer._begin(state.max_steps, state.global_step)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **others: Any) -> None:
        assert self._trainer._steps is not None
        if self._trainer._steps.steps_left < 1:
            control.should_training_stop = True
