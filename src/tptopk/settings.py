"""The words of the command line and of configuration files: one table for both."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tptopk.privacy.refusal import Refusal, check_number, nearest

# imported where they are needed: the options of a command are read here, and should not wait for PyTorch
if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Adam, Optimizer

    from tptopk.data.digits import Pair
    from tptopk.data.tables import Schema
    from tptopk.privacy.plan import Plan

DIGITS_MODEL = "tptopk.models.digits:digits_cnn"
TABLE_MODEL = "tptopk.models.networks:table_linear"


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """Everything that `train`, `compare` and `plan` can be told."""

    method: str = option("tp-topk", "dp-sgd, tp-topk, tp-rand, on-topk, on-rand or non-private")
    epsilon: float = option(3.0, "privacy budget ε of the whole run")
    delta: float = option(1e-5, "δ; well below 1 / dataset size")
    epochs: float | None = option(None, "expected passes over the data (40 unless --steps is given)")
    steps: int | None = option(None, "training steps, instead of epochs")
    batch_size: int = option(256, "expected batch size of Poisson sampling")
    active_ratio: float = option(0.4, "share ρ of coordinates that sparse methods keep active")
    warmup: float = option(0.3, "share of the steps in the dense warm-up of two-phase methods")
    warmup_budget: float = option(0.3, "share of ε that the warm-up may cost; 0 for one noise level throughout")
    clip_norm: float = option(1.0, "norm C that each record's gradient is clipped to")
    accountant: str = option("pld", "pld (tight), rdp, or rdp-paper")
    score: str = option("paper", "ranking of coordinates: paper or factored")
    ratio_schedule: str = option("constant", "active ratio over the sparse steps: constant, linear or cosine")
    optimizer: str = option("sgd", "sgd, adam or adamw")
    learning_rate: float = option(0.2, "learning rate")
    momentum: float = option(0.9, "momentum of sgd")
    weight_decay: float = option(0.0, "weight decay")
    ema: float | None = option(None, "decay of a moving average of the weights, such as 0.99")
    data: str | None = option(
        None,
        "a benchmark (mnist, fmnist, cifar10, pneumoniamnist, …), a .npz file with x_train, y_train[, x_test, y_test], a .csv or "
        ".parquet table, or a folder of images; embedded digits if not given; the command line trains classifiers, by cross-entropy",
    )
    data_dir: str | None = option(None, "folder of the benchmarks; TPTOPK_DATA, or data, if not given")
    schema: str | None = option(
        None, "a TOML file that says what is public of a table's columns; TABLE.toml if not given"
    )
    image_size: int | None = option(
        None, "side of the square that images of a folder, or of eyepacs, are resized and cropped to"
    )
    image_mode: str = option("RGB", "what images of a folder are turned into: RGB or L (grey)")
    dataset_size: int | None = option(
        None,
        "number of training records (of a table whose schema has a unit, of units), which you declare public; needed with --data unless the "
        "benchmark's is published",
    )
    model: str | None = option(
        None,
        "package.module:factory of a function that returns the model, such as mynet:build; if not given, logistic regression for a table and a "
        "small CNN for the embedded digits",
    )
    account: str | None = option(None, "an account file that pays for the run (tptopk account open)")
    secure_noise: bool = option(False, "noise from ChaCha20 instead of Philox; needs the cryptography package")
    audit_canaries: int | None = option(
        None, "plant this many made-up records, half of them at random, and audit the run"
    )
    micro_batch_size: int | None = option(None, "records in memory at once")
    memory_limit: str | None = option(None, "memory of one physical batch, such as 4GiB")
    precision: str = option("tf32", "fp32, tf32 (a GPU's fast matrix products) or bf16")
    compile: bool = option(False, "compile the gradient computation: a slow start, then faster steps")
    engine: str = option("auto", "auto, capture, vmap or reference")
    device: str | None = option(None, "cpu, cuda, cuda:1, …")

    @classmethod
    def gather(cls, config: str | None, given: Mapping[str, Any]) -> Settings:
        """Defaults, then the configuration file, then what was given on the command line."""
        chosen = read_config(config) if config else {}
        return cls(**{**chosen, **{name: value for name, value in given.items() if value is not None}})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def plan(self) -> Plan:
        from tptopk.privacy.plan import Plan

        return Plan.calibrate(**self._numbers())

    def check_numbers(self) -> None:
        """Refuse at once what a plan, which takes time to calibrate, would refuse."""
        from tptopk.privacy.plan import check_calibration

        check_calibration(**self._numbers())

    def _numbers(self) -> dict[str, Any]:
        size = self.published_size if self.dataset_size is None else self.dataset_size
        table = self.table()
        unit = "record" if table is None else table.unit_word
        if unit != "record" and self.audit_canaries is not None:
            raise Refusal(f"canaries belong to no unit: leave out --audit-canaries, or the unit {unit} of the schema")
        if size is None:
            raise Refusal(
                f"declare the number of training {unit}s with --dataset-size N: it becomes a public number of the plan, "
                "so it is never read from the data behind your back"
            )
        if self.epochs is not None and self.steps is not None:
            raise Refusal("give either epochs or steps, and not both")
        return {
            "method": self.method,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "batch_size": self.batch_size,
            "dataset_size": size + (self.audit_canaries or 0),
            "steps": self.steps,
            "epochs": None if self.steps is not None else 40.0 if self.epochs is None else self.epochs,
            "active_ratio": self.active_ratio,
            "warmup": self.warmup,
            "warmup_budget": self.warmup_budget or None,
            "clip_norm": self.clip_norm,
            "accountant": self.accountant,
            "unit": unit,
        }

    @property
    def published_size(self) -> int | None:
        """The number of training records where everybody knows it; None for data whose size a user must declare public."""
        from tptopk.data.constants import published_size
        from tptopk.data.digits import TRAINING

        return TRAINING if self.data in (None, "digits") else published_size(str(self.data))

    def load_data(self, on_image: Callable[[int, int], None] | None = None) -> tuple[Pair, Pair | None]:
        from tptopk.data.sources import read_source

        reading = {name: getattr(self, name) for name in ("data_dir", "schema", "image_size", "image_mode")}
        return read_source("digits" if self.data is None else self.data, **reading, on_image=on_image)

    def table(self) -> Schema | None:
        """What is public of the table's columns; None where the data is something else."""
        from tptopk.data.sources import read_schema_for

        return None if self.data is None else read_schema_for(self.data, self.schema)

    def load_unit(self) -> list[str] | None:
        """The id of each training record's unit, where the table's schema has one."""
        from tptopk.data.tables import read_unit

        table = self.table()
        return None if table is None or table.unit is None else read_unit(str(self.data), table)

    def network(self) -> str:
        """package.module:factory of the network; for a table with its inputs and classes, which the schema knows."""
        if self.model is not None:
            return self.model
        if self.data in (None, "digits"):
            return DIGITS_MODEL
        table = self.table()
        if table is None:
            raise Refusal(
                f"give --model FILE:FUNCTION for {self.data}, such as mynet:build for a function build() in mynet.py that returns the network: "
                "only tables and the embedded digits have one of their own"
            )
        return f"{TABLE_MODEL}({len(table.columns)}, {len(table.classes)})"

    def build_model(self) -> nn.Module:
        return build(self.network())

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        from torch.optim import SGD, Adam, AdamW

        check_number("learning_rate", self.learning_rate, above=0)
        check_number("weight_decay", self.weight_decay, least=0)
        check_number("momentum", self.momentum, least=0, below=1)
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            return SGD(parameters, lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay)
        kinds: dict[str, type[Adam]] = {"adam": Adam, "adamw": AdamW}
        if self.optimizer not in kinds:
            raise Refusal(f"unknown optimizer {self.optimizer!r}{nearest(self.optimizer, ['sgd', *kinds])}")
        return kinds[self.optimizer](parameters, lr=self.learning_rate, weight_decay=self.weight_decay)


def read_config(path: str) -> dict[str, Any]:
    """A TOML file with the words of the command line, with dashes or underscores."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"{path} is not a TOML file: {error}") from error
    types = {f.name: str(f.type) for f in fields(Settings)}
    read = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in types:
            known = [name.replace("_", "-") for name in types]
            raise Refusal(
                f"{path}: unknown setting {key!r}{nearest(key.replace('_', '-'), known)} (settings stand at the top level, without sections)"
            )
        wanted = types[name].split(" | ")[0]
        if wanted == "float" and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value).__name__ != wanted:
            raise Refusal(f"{path}: {key} is {value!r}; it must be of type {wanted}")
        read[name] = value
    return read


def build(reference: str) -> nn.Module:
    """Call the factory named as package.module:function, or package.module:function(14, 2); modules in the current folder are found too."""
    from torch import nn

    found = re.fullmatch(r"([^:]+):([^:()]+)(?:\((\d+(?:, *\d+)*)\))?", reference)
    if found is None:
        raise Refusal(f"model is {reference!r}; it must be package.module:factory, for example mynet:build")
    module_name, function, numbers = found.groups()
    if module_name.endswith(".py"):
        module_name = module_name.removesuffix(".py").replace("/", ".")
        raise Refusal(f"model is {reference!r}; write it without .py: {module_name}:{function}")
    arguments = [int(number) for number in numbers.split(",")] if numbers else []
    factory = _factory(reference, module_name, function)
    try:
        if not callable(factory) or inspect.signature(factory).bind(*arguments) is None:
            raise TypeError
    except TypeError as error:
        needs = f"takes {numbers} as its arguments" if numbers else "needs no arguments"
        raise Refusal(f"model {reference!r} must be a function that {needs} and returns the network") from error
    model = factory(*arguments)
    if not isinstance(model, nn.Module):
        raise Refusal(f"model {reference!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _factory(reference: str, module_name: str, function: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise Refusal(f"model {reference!r}: {error}; is it in this folder or installed?") from error
    if not hasattr(module, function):
        own = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise Refusal(f"model {reference!r}: {module_name} has no function {function!r}{nearest(function, own)}")
    return getattr(module, function)


def seed_everything(seed: int | None) -> None:
    """Repeatable initial weights and dropout; noise and samples have their own streams."""
    import torch

    if seed is not None:
        torch.manual_seed(seed)
