"""The plan of a training by `Trainer`, whose arguments say how large a sample is and how long to train."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from transformers import TrainingArguments

from tptopk.privacy.plan import Plan, PrivacyWarning
from tptopk.privacy.refusal import check_count
from tptopk.training.sampling import Records


def planned(
    args: TrainingArguments,
    records: Records,
    dataset_size: int | None,
    method: str,
    *,
    epsilon: float,
    delta: float,
    clip_norm: float | Sequence[float],
    accountant: str,
    **options: Any,
) -> Plan:
    """`Plan.calibrate` with those of the options that were given, and of the dataset's size, or of its records counted."""
    return Plan.calibrate(
        method,
        epsilon=epsilon,
        delta=delta,
        batch_size=args.per_device_train_batch_size,
        dataset_size=_declared(dataset_size, records),
        steps=_steps(args, len(records)),
        clip_norm=clip_norm,
        accountant=accountant,
        **{name: value for name, value in options.items() if value is not None},
    )


def _declared(size: int | None, records: Records) -> int:
    if size is not None:
        check_count("dataset_size", size)
        return size
    warnings.warn(
        f"dataset_size was left out, so the train_dataset was counted: that it has {len(records)} records is thereby declared public",
        PrivacyWarning,
        stacklevel=4,
    )
    return len(records)


def _steps(args: TrainingArguments, size: int) -> int:
    """As Trainer will count them, with an epoch of `Phase.steps_per_epoch`."""
    if args.max_steps > 0:
        return int(args.max_steps)
    per_epoch = max(1, round(1 / (args.per_device_train_batch_size / max(1, size))))
    steps: int = math.ceil(args.num_train_epochs * per_epoch)
    return steps
