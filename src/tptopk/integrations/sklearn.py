"""`TPTopKClassifier`: private training of tables as a scikit-learn estimator."""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array, check_random_state, check_X_y
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tptopk.data.columns import Column, declared_columns, encode, plain
from tptopk.privacy.plan import Plan, PrivacyWarning
from tptopk.privacy.refusal import Refusal, check_count, check_number, nearest
from tptopk.training.begun import begun_with, run_folder
from tptopk.training.trainer import fit

Array = np.ndarray[Any, Any]
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
}
# where scikit-learn's own message quotes the values, what is said instead
WITHOUT_VALUES = {
    "Expected 2D array": "X is not a table of two dimensions, [records, columns]. Reshape your data: X.reshape(-1, 1) if it has one column, "
    "X.reshape(1, -1) if it is one record",
    "Complex data": "Complex data not supported: X must hold real numbers, categories or texts",
}


class TPTopKClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier of tables, trained under (ε, δ) differential privacy.

    How a table becomes inputs is decided by what you declare, never by the records, so that preprocessing says nothing about them:

    `bounds`: the least and the largest value of numeric columns: one pair for all, a list with a pair for each column (None for a
    column of categories), or a dictionary by column name, or by number where columns have no names. Values are scaled from their
    bounds to [−1, 1]. A value outside is clipped to the nearest bound, silently and always: a warning would tell that there was
    one. Left out, every column is taken to be on that scale already, and a warning says so; bounds that are far off cost
    accuracy, not privacy.
    `categories`: a dictionary from a column to the list of its values (one input each, and one for anything else) or to a number
    of buckets, into which values are hashed by a fixed public function. All other columns are numeric. Values are compared as
    a CSV file would hold them: 1, 1.0 and "1" are the same.
    `missing`: declares that numeric values may be missing (NaN, None, empty or "NA"). Each numeric column then has a second input
    that says so, and the value is 0; an infinite number is not missing but beyond its bound, and is clipped to it. Otherwise a
    table with missing or infinite values is refused, without saying where.
    `classes`: the class labels. `classes_` holds them sorted. A label that is none of them is refused.
    `dataset_size`: the number of records (of groups, if `fit` is given groups), which you declare public.

    Where `classes` or `dataset_size` is None they are read from the data, which scikit-learn's tools for model selection need, and
    a `PrivacyWarning` and the statement say so: a label that one record alone has would show that this record is there, and
    the guarantee treats the number of records as known to all. For a model that is to be released, give both.

    The guarantee: `epsilon`, `delta`, `method` ("tp-topk", "dp-sgd", "tp-rand", "on-topk", "on-rand", "non-private"), `active_ratio`,
    `warmup`, `warmup_budget`, `clip_norm`, `accountant` and `account` mean what they mean for `Plan.calibrate` and `fit`.
    `unit` is a word for what is protected, such as "patient", if `fit` is given groups, and `most_rows` a public number: the most
    records of one group that take part, the first ones.

    Training: `batch_size` is a number of records, or as a float a share of `dataset_size`; `epochs`; `learning_rate`; `optimizer` is "sgd"
    (with momentum 0.9), "adam", or a function from parameters to a torch optimizer. `hidden` holds the widths of hidden tanh
    layers: none is logistic regression. `device` is where training runs; the fitted model is on the CPU. The defaults were chosen by
    `benchmarks/tune_table.py`. `out`: a new folder for the run, which `tptopk verify`, `statement` and `report` read;
    it needs `classes` and `dataset_size`. `resume`: `fit` goes on with the run in `out` that was cut short, given the same table and
    declarations; what was charged and lost stays charged.

    `random_state`: None takes randomness from the operating system, as a private model needs. Anything else makes the run
    repeatable, and whoever knows it can subtract the noise: such a model is not for release, and `statement()` says so.

    After `fit`: `classes_`, `n_features_in_`, `feature_names_in_`, `epsilon_` and `delta_` (spent), `plan_`, `run_`, and `statement()`.

    Formal guarantees: `run_` and all predictions for records outside the training table are (`epsilon_`, `delta_`)-DP for the
    records (or groups) given to `fit`, as `statement()` says; what was read from the data because it was not declared is not
    covered, nor is the fact that a table was refused, nor choosing parameters by scores on the private records.
    """

    def __init__(
        self,
        *,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        method: str = "tp-topk",
        active_ratio: float = 0.4,
        warmup: float = 0.3,
        warmup_budget: float | None = 0.3,
        classes: Sequence[Any] | None = None,
        bounds: Any = None,
        categories: Mapping[Any, Sequence[Any] | int] | None = None,
        missing: bool = False,
        dataset_size: int | None = None,
        unit: str | None = None,
        most_rows: int | None = None,
        batch_size: float = 0.5,
        epochs: float = 80,
        learning_rate: float = 0.3,
        clip_norm: float | Sequence[float] = 0.5,
        hidden: Sequence[int] = (),
        optimizer: str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = "sgd",
        accountant: str = "pld",
        account: str | Path | None = None,
        device: str | torch.device | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.method = method
        self.active_ratio = active_ratio
        self.warmup = warmup
        self.warmup_budget = warmup_budget
        self.classes = classes
        self.bounds = bounds
        self.categories = categories
        self.missing = missing
        self.dataset_size = dataset_size
        self.unit = unit
        self.most_rows = most_rows
        self.batch_size = batch_size
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.clip_norm = clip_norm
        self.hidden = hidden
        self.optimizer = optimizer
        self.accountant = accountant
        self.account = account
        self.device = device
        self.out = out
        self.resume = resume
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = bool(self.missing)
        tags.input_tags.string = tags.input_tags.categorical = bool(self.categories)
        return tags

    def fit(self, X: Any, y: Any, groups: Any = None) -> TPTopKClassifier:
        """Train on a table X [N, columns] and labels y [N]; `groups`: an id for each record, if a whole group is what is protected."""
        X, y = self._checked(X, y, reset=True)
        names = getattr(self, "feature_names_in_", range(self.n_features_in_))
        if self.bounds is None and len(self.categories or ()) < self.n_features_in_:
            warnings.warn(
                "no bounds were given: values are clipped to [−1, 1]. Give bounds={column: (least, largest)}, or bounds=(-1, 1) if "
                "that is the scale of your columns",
                stacklevel=2,
            )
        bounds = (-1, 1) if self.bounds is None else self.bounds
        columns = declared_columns(list(names), bounds, self.categories, missing=bool(self.missing))
        inputs = encode(X, columns)
        classes, targets = self._labels(y)
        ids = None if groups is None else np.asarray(groups).tolist()
        if ids is None and self.unit is not None:
            raise Refusal(f"unit is {self.unit!r}; give fit groups=, an id of its {self.unit} for each record")
        if (ids is None) != (self.most_rows is None):
            raise Refusal(
                f"most_rows is {self.most_rows!r}; with groups, and only then, give a public number: the most records of one that take part"
            )
        unit = "record" if ids is None else self.unit or "group"
        size = plain(self.dataset_size)
        read = ["the class labels"] if self.classes is None else []
        if size is None:
            read.append(f"the number of {unit}s")
            size = len(inputs) if ids is None else len(set(ids))
        if read and self.out is not None:
            raise Refusal(
                f"a run folder states what may be claimed, and {' and '.join(read)} would be read from the data: declare classes=[…] and "
                "dataset_size=…, or leave out= away"
            )
        described = self._described(names, columns, classes)
        if self.resume:
            self._refuse_other_declarations(described)
        if read:
            warnings.warn(
                f"read from the data, which the guarantee does not cover: {' and '.join(read)}; declare classes=[…] and dataset_size=… "
                "for a model that is to be released",
                PrivacyWarning,
                stacklevel=2,
            )
        seed = _seed(self.random_state)
        model = _network(inputs.shape[1], len(classes), self.hidden, seed)
        optimizer = self._optimizer(model)
        self.run_ = fit(
            model,
            (inputs, targets),
            self._plan(size, unit),
            optimizer,
            loss=F.cross_entropy,
            unit=ids,
            most_rows=plain(self.most_rows),
            device=self.device,
            account=self.account,
            out=self.out,
            resume=bool(self.resume),
            config=described,
            seed=seed,
        )
        model.cpu()
        self.run_.support = self.run_.support.to("cpu")
        self.classes_, self._columns, self._read = classes, columns, read
        self.plan_, self.epsilon_, self.delta_ = self.run_.plan, self.run_.epsilon, self.run_.delta
        return self

    def predict_proba(self, X: Any) -> Array:
        """[N, classes]: the model's probability of each class, in the order of `classes_`."""
        check_is_fitted(self)
        X, _ = self._checked(X, None, reset=False)
        inputs = encode(X, self._columns).double()
        model = self.run_.model
        # in float64, so that a record's probabilities do not depend on those beside it in their last digits
        weights = {name: value.double() for name, value in model.state_dict().items()}
        with torch.no_grad():
            return np.asarray(functional_call(model, weights, (inputs,)).softmax(1))

    def predict(self, X: Any) -> Array:
        """[N]: the most probable class."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(1)])

    def statement(self) -> str:
        """What may be claimed for this model and what may not, in Markdown."""
        check_is_fitted(self)
        lines = [
            self.run_.statement(),
            "",
            "## How the table was read",
            "",
            "- Columns became inputs by declared bounds and categories alone; a value outside its bounds was clipped to the nearest.",
        ]
        if self._read:
            lines.append(
                f"- **Read from the data and not covered**: {' and '.join(self._read)}, because they were not declared."
            )
        else:
            lines.append(f"- The class labels and the number of {self.plan_.unit}s were declared.")
        return "\n".join(lines)

    def _checked(self, X: Any, y: Any, *, reset: bool) -> tuple[Array, Any]:
        """The table as an array and the labels, of the right shapes and column names; values are looked at later."""
        if hasattr(X, "iloc"):  # scikit-learn's own conversion of mixed data frames quotes values it cannot convert
            validate_data(self, X, reset=reset, skip_check_array=True)
            X = _frame_values(X)
            if not reset:
                return check_array(X, dtype=None, ensure_all_finite=False, estimator=self), None
            return check_X_y(X, y, dtype=None, ensure_all_finite=False, estimator=self)  # type: ignore[no-any-return]
        try:
            if not reset:
                return validate_data(self, X, dtype=None, ensure_all_finite=False, reset=False), None
            return validate_data(self, X, y, dtype=None, ensure_all_finite=False)  # type: ignore[no-any-return]
        except ValueError as error:
            told = next((words for words in WITHOUT_VALUES if words in str(error)), None)
            if told is None:
                raise
        raise Refusal(WITHOUT_VALUES[told])

    def _labels(self, y: Array) -> tuple[Array, Tensor]:
        """The classes, sorted, and each record's number among them."""
        if self.classes is None:
            check_classification_targets(y)
            classes = np.unique(y)
        else:
            try:
                classes = np.unique(np.asarray(self.classes))
            except TypeError:
                raise Refusal(f"classes is {self.classes!r}; give labels of one kind, which can be sorted") from None
            if len(classes) != len(self.classes):
                raise Refusal(f"classes is {self.classes!r}; give each label once")
        if len(classes) < 2:
            raise Refusal(
                f"there is only one class among {len(y)} labels; a classifier needs at least two, in classes="
            )
        number = {label: i for i, label in enumerate(classes.tolist())}
        numbers = [number.get(label, -1) for label in y.tolist()]
        if -1 in numbers:
            raise Refusal(
                "y holds a label that is none of the declared classes; add the class to classes= or repair the table"
            )
        return classes, torch.tensor(numbers, dtype=torch.long)

    def _described(self, names: Iterable[Any], columns: Sequence[Column], classes: Array) -> dict[str, Any]:
        """What was declared, for the run folder: in words, and as it was understood."""
        left_out = ("random_state", "resume")
        words = {
            name: "a function" if callable(value) else repr(value)
            for name, value in self.get_params().items()
            if name not in left_out
        }
        table = [{**asdict(column), "name": str(name)} for name, column in zip(names, columns, strict=True)]
        return {"model": type(self).__name__, **words, "columns": table, "labels": list(map(repr, classes.tolist()))}

    def _refuse_other_declarations(self, now: dict[str, Any]) -> None:
        """The same table read by other bounds, categories or classes, or in another order, would silently be another one."""
        if self.out is None:
            raise Refusal("resume goes on with the run of a folder; give it as out=")
        before, now = begun_with(run_folder(self.out)), json.loads(json.dumps(now))
        may_differ = {"out", "device", "account"}
        # their words may be cut short: columns and labels are not
        may_differ |= {"bounds", "categories", "missing", "classes"}
        for name in now:
            if name not in may_differ and before.get(name) != now[name]:
                of_table = name in ("columns", "labels")
                what = f"other {name}, or the same in another order" if of_table else f"{name} = {before.get(name)}"
                raise Refusal(
                    f"the run in {self.out} was begun with {what}; a run is resumed with what it was begun with"
                )

    def _plan(self, size: int, unit: str) -> Plan:
        batch = plain(self.batch_size)
        if isinstance(batch, float):
            check_number("batch_size", batch, above=0, most=1)
            batch = max(1, round(batch * size))
        return Plan.calibrate(
            self.method,
            epsilon=plain(self.epsilon),
            delta=plain(self.delta),
            batch_size=batch,
            dataset_size=size,
            epochs=plain(self.epochs),
            active_ratio=plain(self.active_ratio),
            warmup=plain(self.warmup),
            warmup_budget=plain(self.warmup_budget),
            clip_norm=plain(self.clip_norm),
            accountant=self.accountant,
            unit=unit,
        )

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if callable(self.optimizer):
            return self.optimizer(model.parameters())
        if self.optimizer not in OPTIMIZERS:
            raise Refusal(f"unknown optimizer {self.optimizer!r}{nearest(str(self.optimizer), OPTIMIZERS)}")
        rate = plain(self.learning_rate)
        check_number("learning_rate", rate, above=0)
        return OPTIMIZERS[self.optimizer](model.parameters(), rate)


def _frame_values(frame: Any) -> Array:
    values = frame.to_numpy()
    return values if values.dtype.kind in "biuf" else frame.to_numpy(dtype=object)  # type: ignore[no-any-return]


def _network(features: int, classes: int, hidden: Sequence[int], seed: int | None) -> nn.Module:
    """Linear layers with tanh between them; without hidden ones, logistic regression that starts at zero."""
    if isinstance(hidden, str) or not isinstance(hidden, Sequence):
        raise Refusal(f"hidden is {hidden!r}; give a list of widths, such as (16,), or none")
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        for width in map(plain, hidden):
            check_count("a hidden width", width)
            layers += [nn.Linear(features, width), nn.Tanh()]
            features = width
        last = nn.Linear(features, classes)
    if not layers:
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def _seed(random_state: int | np.random.RandomState | None) -> int | None:
    if random_state is None or isinstance(random_state, (int, np.integer)):
        return None if random_state is None else int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))
