"""Which arguments of `Trainer` cannot be kept, and why. All of them are refused before anything is charged."""

from __future__ import annotations

from typing import Any

from tptopk.privacy.refusal import Refusal

# name → the values that change nothing, and why any other is refused
_PRECISION = "it rounds gradients before they are clipped; leave it out, and say precision='bf16' to PrivateTrainer"
_ONE_DEVICE = "PrivateTrainer trains in one process on one device; tptopk.fit trains in several, under torchrun"
_SAMPLING = "the guarantee rests on Poisson sampling of the whole dataset; leave it out"
_UNTESTED = "it changes the model or its backward pass in ways that no test of ours covers; leave it out"
ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "gradient_accumulation_steps": (
        (1,),
        "a step is one Poisson sample: give per_device_train_batch_size the whole batch, and micro_batch_size= to "
        "PrivateTrainer, the records in memory at once",
    ),
    "max_grad_norm": (
        (1.0, 0, None),  # an explicit 1.0 cannot be told from the default
        "it would clip what is already clipped and noised; leave it out, and give PrivateTrainer clip_norm=, which clips each example",
    ),
    "fp16": ((False,), _PRECISION),
    "bf16": ((False,), _PRECISION),
    "fp16_full_eval": ((False,), "it rounds the weights, which stay float32 here; leave it out"),
    "bf16_full_eval": ((False,), "it rounds the weights, which stay float32 here; leave it out"),
    "auto_find_batch_size": ((False,), "the batch size is a number of the plan; give micro_batch_size= to save memory"),
    "gradient_checkpointing": ((False, None), "it hides calls of layers; give micro_batch_size= to save memory"),
    "torch_compile": ((False,), _UNTESTED),
    "use_liger_kernel": ((False,), _UNTESTED),
    "neftune_noise_alpha": ((None,), _UNTESTED),
    "label_smoothing_factor": ((0,), "it averages over the batch's tokens; write it into loss=, one number an example"),
    "group_by_length": ((False,), _SAMPLING),
    "train_sampling_strategy": (("random",), _SAMPLING),
    "dataloader_drop_last": ((False,), _SAMPLING),
    "dataloader_in_order": ((True,), "the order of samples would depend on how long their records take to read"),
    "data_seed": ((None,), "samples come from a secret of the run, and whoever knew a seed could recompute them"),
    "include_num_input_tokens_seen": (("no", False), "it logs how many records were drawn, and the sample is secret"),
    "skip_memory_metrics": ((True,), "memory tells how many records were drawn, and the sample is secret"),
    "debug": (([], "", None), "it prints numbers of private records"),
    "enable_jit_checkpoint": ((False,), "it saves in the middle of a step; save_steps= saves between steps"),
    "deepspeed": ((None,), _ONE_DEVICE),
    "fsdp": ((None, [], "", False), _ONE_DEVICE),
    "parallelism_config": ((None,), _ONE_DEVICE),
}


def refuse_arguments(args: Any) -> None:
    """Refuse `TrainingArguments` that would break the guarantee, or that private training would silently not do."""
    for name, (harmless, reason) in ARGUMENTS.items():
        value = getattr(args, name, harmless[0])
        if value not in harmless:
            raise Refusal(f"{name}={value!r}: {reason}")


def refuse_surroundings(trainer: Any) -> None:
    """Refuse what a launcher or an environment variable has switched on."""
    if trainer.args.world_size > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise Refusal(f"this is one of several processes: {_ONE_DEVICE}")
    if trainer.args.n_gpu > 1 or trainer.is_model_parallel:
        raise Refusal(f"the model would be spread over several GPUs (CUDA_VISIBLE_DEVICES=0 shows one): {_ONE_DEVICE}")
    if trainer.accelerator.mixed_precision != "no":
        raise Refusal(f"accelerate's mixed precision is {trainer.accelerator.mixed_precision!r}: {_PRECISION}")


def refuse_evaluation_on_training_records(trainer: Any) -> None:
    """Refuse the train dataset as one to evaluate on, by itself or among several."""
    others = trainer.eval_dataset
    others = list(others.values()) if isinstance(others, dict) else [others]
    if any(one is not None and one is trainer.train_dataset for one in others):
        raise Refusal(
            "eval_dataset is the train_dataset: evaluation on the private records is outside the guarantee, and load_best_model_at_end would "
            "choose the model by it; give other records"
        )


def refuse_losses_of_a_batch(trainer: Any, base: type) -> None:
    """Refuse losses that give one number for a whole batch, where none an example was given."""
    own = type(trainer).compute_loss is not base.compute_loss  # type: ignore[attr-defined]
    if own or trainer.compute_loss_func is not None:
        raise Refusal(
            f"{'compute_loss' if own else 'compute_loss_func'} gives one loss a batch, and privacy needs one an example; give PrivateTrainer "
            "loss=, a function of (model, batch) that returns [B]"
        )
