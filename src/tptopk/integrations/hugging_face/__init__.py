"""Hugging Face's `Trainer`, training privately: its arguments, callbacks, schedules, evaluation and checkpoints stay.

    from tptopk.integrations.hugging_face import PrivateTrainer   # was: from transformers import Trainer

    trainer = PrivateTrainer(model=model, args=args, train_dataset=records, eval_dataset=others,
                             target_epsilon=8.0, target_delta=1e-5, clip_norm=1.0, method="tp-topk", dataset_size=50_000)
    trainer.train()
    print(trainer.epsilon, trainer.run.statement())

`trainer` says what becomes of each part of `Trainer`, `losses` how a model's own loss becomes one number an example,
`refusals` which arguments are refused and why.
"""

from importlib.util import find_spec

for _needed in ("transformers", "accelerate"):
    if find_spec(_needed) is None:
        raise ModuleNotFoundError(
            f"PrivateTrainer needs {_needed}, which is not installed: python -m pip install 'tptopk[hugging-face]'",
            name=_needed,
        )

from tptopk.integrations.hugging_face.trainer import PrivateTrainer  # noqa: E402

__all__ = ["PrivateTrainer"]
