"""CSV and Parquet tables, turned into numbers by a schema of public facts: bounds, categories and classes, never statistics."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tptopk.data.columns import MISSING, as_word, check_bounds, one_hot, parsed, scaled
from tptopk.data.digits import Pair
from tptopk.privacy.refusal import Refusal, check_count, nearest

SUFFIXES = (".csv", ".parquet")

SCHEMA_EXAMPLE = 'target = "outcome", classes = ["no", "yes"], [numeric] age = [0, 120], [categories] sex = ["f", "m"]'
KINDS: dict[str, type] = {
    "target": str,
    "classes": list,
    "numeric": dict,
    "categories": dict,
    "test": str,
    "unit": str,
    "most-rows": int,
}


@dataclass(frozen=True)
class Schema:
    """What is publicly known of a table's columns.

    A numeric column becomes two inputs: its value, clipped to the bounds and scaled to [-1, 1], and whether it is missing (its
    value is then 0). An infinite number is beyond every bound and is clipped like any other; NaN is missing. A column of
    categories becomes one input a category and one for anything else. So the number of inputs and their scale are the same
    whatever the records are. `unit` is a column of ids, of patients for example, which is no input: all records of an id, but no
    more than the first `most_rows`, are protected as one.
    """

    target: str
    classes: tuple[str, ...]
    numeric: Mapping[str, tuple[float, float]]
    categories: Mapping[str, tuple[str, ...]]
    test: str | None = None
    unit: str | None = None
    most_rows: int | None = None

    def __post_init__(self) -> None:
        if not self.numeric and not self.categories:
            raise Refusal("a table needs columns to learn from: give numeric={'age': (0, 120)} or categories={...}")
        twice = set(self.numeric) & set(self.categories) | {self.target} & {*self.numeric, *self.categories}
        if twice:
            raise Refusal(f"column {sorted(twice)[0]!r} has two roles; it is the target, numeric, or of categories")
        self._check_unit()
        for name, (low, high) in self.numeric.items():
            check_bounds(name, low, high)
        for name, values in {**self.categories, self.target: self.classes}.items():
            if not values or len(set(values)) != len(values):
                raise Refusal(f"the values of {name!r} are {list(values)}; give each once, and at least one")
        if len(self.classes) < 2:
            raise Refusal(f"classes is {list(self.classes)}; give at least two")

    def _check_unit(self) -> None:
        if (self.unit is None) != (self.most_rows is None):
            raise Refusal(
                'unit and most-rows go together, such as unit = "patient_id" and most-rows = 3: the column of ids, and the most records of one '
                "that take part, a public number"
            )
        if self.unit is None or self.most_rows is None:
            return
        check_count("most-rows", self.most_rows)
        if self.unit in (self.target, *self.used):
            raise Refusal(f"column {self.unit!r} is the unit; it must not be the target or an input as well")
        if self.unit_word == "record":
            raise Refusal(f"unit is {self.unit!r}; one record is what is protected without a unit: leave it out")

    @property
    def unit_word(self) -> str:
        """What one unit is called: patient, where the column of ids is patient_id; without a unit, record."""
        return "record" if self.unit is None else self.unit.removesuffix("_id") or self.unit

    def as_values(self) -> dict[str, Any]:
        """In plain values; the test table's name is left out, which says nothing of how a record is read."""
        return {
            "target": self.target,
            "classes": list(self.classes),
            "numeric": {name: [float(low), float(high)] for name, (low, high) in self.numeric.items()},
            "categories": {name: list(known) for name, known in self.categories.items()},
            **({} if self.unit is None else {"unit": self.unit, "most-rows": self.most_rows}),
        }

    def same_as(self, other: Schema) -> bool:
        """Whether both read a record alike: also the order of the columns counts."""
        return json.dumps(self.as_values()) == json.dumps(other.as_values())

    @property
    def used(self) -> list[str]:
        return [*self.numeric, *self.categories]

    @property
    def columns(self) -> list[str]:
        """A name for each input."""
        numbers = [name for column in self.numeric for name in (column, f"{column} missing")]
        return numbers + [f"{column}={value}" for column, known in self.categories.items() for value in (*known, "…")]

    def inputs(self, columns: Mapping[str, Sequence[str]], count: int, path: str | Path) -> Tensor:
        """The inputs [N, D] for columns of text."""
        made = [np.zeros((count, 0), np.float32)]
        for name, (low, high) in self.numeric.items():
            values = numbers_of(columns[name], name, path)
            made.append(np.stack([scaled(values, low, high), np.isnan(values)], 1).astype(np.float32))  # [N, 2]
        made += [one_hot(columns[name], known) for name, known in self.categories.items()]  # [N, categories + 1]
        return torch.from_numpy(np.concatenate(made, 1))

    def findings(self, inputs: Tensor) -> list[str]:
        """Columns that are constant, missing or full of unseen categories. Not private: an operator's own look."""
        found, start = [], 0
        for name in self.used:
            width = 2 if name in self.numeric else len(self.categories[name]) + 1
            part = inputs[:, start : start + width]
            start += width
            if len(part) > 1 and bool((part == part[0]).all()):
                found.append(f"column {name!r} is the same in all records")
            if odd := int(part[:, -1].sum()):
                what = "no number in" if name in self.numeric else "an unseen category or none in"
                found.append(f"{odd} {'record has' if odd == 1 else 'records have'} {what} column {name!r}")
        return found

    def inputs_in_words(self) -> str:
        """Where the inputs come from: 8 inputs = 2 numbers × 2 + ward 4; 2 classes."""
        numbers = [f"{len(self.numeric)} number{'s' * (len(self.numeric) > 1)} × 2"] if self.numeric else []
        parts = numbers + [f"{name} {len(known) + 1}" for name, known in self.categories.items()]
        return f"{len(self.columns)} inputs = {' + '.join(parts)}; {len(self.classes)} classes"


def schema_of(
    *,
    target: str,
    classes: Sequence[Any],
    numeric: Mapping[str, Sequence[float]] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    test: str | None = None,
    unit: str | None = None,
    most_rows: int | None = None,
) -> Schema:
    """A schema from plain values, such as a TOML file holds."""
    for name, bounds in (numeric or {}).items():
        if isinstance(bounds, str) or not isinstance(bounds, Sequence) or len(bounds) != 2:
            raise Refusal(
                f"the bounds of {name!r} are {bounds!r}; give the least and the largest value, such as [0, 120]"
            )
    for name, values in {**(categories or {}), target: classes}.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise Refusal(f"the values of {name!r} are {values!r}; give a list of them")
    return Schema(
        target=target,
        classes=tuple(map(as_word, classes)),
        numeric={name: (bounds[0], bounds[1]) for name, bounds in (numeric or {}).items()},
        categories={name: tuple(map(as_word, values)) for name, values in (categories or {}).items()},
        test=test,
        unit=unit,
        most_rows=most_rows,
    )


def read_schema(path: str | Path) -> Schema:
    """A schema in a TOML file: target, classes, [numeric] bounds, [categories]; unit and most-rows, and a test table, if there are."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(
            f"cannot read the schema {path}: {error.strerror}; it is a TOML file: {SCHEMA_EXAMPLE}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"{path} is not a TOML file: {error}") from error
    return schema_from(values, path)


def schema_from(values: Mapping[str, Any], path: str | Path) -> Schema:
    """A schema from the plain values that a file at `path` holds."""
    for key, value in values.items():
        if key not in KINDS:
            raise Refusal(f"{path}: unknown word {key!r}{nearest(key, KINDS)}")
        if not isinstance(value, KINDS[key]):
            raise Refusal(f"{path}: {key} is {value!r}; expected as in {SCHEMA_EXAMPLE}")
    for key in ("target", "classes"):
        if key not in values:
            raise Refusal(f"{path} has no {key}; expected as in {SCHEMA_EXAMPLE}")
    try:
        return schema_of(**{key.replace("-", "_"): value for key, value in values.items()})
    except Refusal as refusal:
        raise Refusal(f"{path}: {refusal}") from None


def read_table(
    path: str | Path,
    *,
    target: str,
    classes: Sequence[Any],
    numeric: Mapping[str, Sequence[float]] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
) -> Pair:
    """(inputs [N, D], class numbers [N]) of a CSV or Parquet table; see `Schema` for how columns become inputs."""
    return read_with(path, schema_of(target=target, classes=classes, numeric=numeric, categories=categories))


def read_with(path: str | Path, schema: Schema) -> Pair:
    """The same with a schema. A record without a label, or with one that is not a class, is refused: repair the table first."""
    columns = text_columns(path, [*schema.used, schema.target])
    labels = columns[schema.target]
    number = {value: i for i, value in enumerate(schema.classes)}
    missing = sum(label.lower() in MISSING and label not in number for label in labels)
    if missing:
        raise Refusal(
            f"{path}: {missing} of {len(labels)} records have no label in {schema.target!r}; label them or leave them out of the table"
        )
    unknown = sum(label not in number for label in labels)
    if unknown:
        raise Refusal(
            f"{path}: {unknown} of {len(labels)} records have a label in {schema.target!r} that is not one of the classes "
            f"{', '.join(schema.classes)}; add the class to the schema or repair the table"
        )
    targets = torch.tensor([number[label] for label in labels], dtype=torch.long)
    return schema.inputs(columns, len(labels), path), targets


def read_table_inputs(path: str | Path, schema: Schema) -> Tensor:
    """The inputs alone, of a table that may have no labels."""
    columns = text_columns(path, schema.used)
    return schema.inputs(columns, len(columns[schema.used[0]]), path)


def read_unit(path: str | Path, schema: Schema) -> list[str]:
    """The id of each record's unit."""
    assert schema.unit is not None
    ids = text_columns(path, [schema.unit])[schema.unit]
    missing = sum(one.lower() in MISSING for one in ids)
    if missing:
        raise Refusal(
            f"{path}: {missing} of {len(ids)} records have no {schema.unit!r}; give each the id of its {schema.unit_word}, or leave it out of "
            "the table"
        )
    return ids


def header_of(path: str | Path) -> list[str]:
    """The names of all columns."""
    path = existing(path)
    return _parquet_header(path) if path.suffix == ".parquet" else _csv_header(path)


def text_columns(path: str | Path, names: list[str]) -> dict[str, list[str]]:
    """The named columns as text, in the order of the records."""
    path = existing(path)
    found = _parquet_columns(path, names) if path.suffix == ".parquet" else _csv_columns(path, names)
    if not found[names[0]]:
        raise Refusal(f"{path} holds no records")
    return found


def existing(path: str | Path) -> Path:
    """The path of a table that is there; refused with the nearest name if it is not."""
    path = Path(path)
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*") if file.suffix in SUFFIXES]
        close = get_close_matches(path.name, beside, n=1)
        hint = f"did you mean {path.with_name(close[0])}?" if close else f"expected a {' or '.join(SUFFIXES)} file"
        raise Refusal(f"there is no table {path}; {hint}")
    return path


def _require(names: list[str], there: Sequence[str], path: Path) -> None:
    if not any(there):
        raise Refusal(
            f"{path} does not begin with the names of its columns; expected {', '.join(names)} in its first line"
        )
    for name in names:
        if name not in there and len(there) == 1 and (found := [c for c in ";\t|" if c in there[0]]):
            what = {";": "semicolons", "\t": "tabs", "|": "bars"}[found[0]]
            raise Refusal(f"{path} seems to be separated by {what}; save it with commas between the values")
        if name not in there:
            raise Refusal(f"{path} has no column {name!r}{nearest(name, there)}")


def _csv_columns(path: Path, names: list[str]) -> dict[str, list[str]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            header = [name.strip() for name in next(rows, [])]
            _require(names, header, path)
            twice = [name for name in names if header.count(name) > 1]
            if twice:
                raise Refusal(f"{path} has more than one column {twice[0]!r}")
            places = [header.index(name) for name in names]
            found: dict[str, list[str]] = {name: [] for name in names}
            for row in rows:
                if not row:
                    continue
                if len(row) != len(header):
                    raise Refusal(
                        f"{path}, line {rows.line_num}: {len(row)} values, but there are {len(header)} columns; "
                        "separate values by commas and quote those that hold one"
                    )
                for name, place in zip(names, places, strict=True):
                    found[name].append(row[place].strip())
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Refusal(
            f'{path} is not a CSV file in UTF-8; save it as UTF-8 (in Excel: "CSV UTF-8 (comma delimited)")'
        ) from error
    except csv.Error as error:
        raise Refusal(f"{path} is not a CSV file in UTF-8: {error}") from error
    return found


def _csv_header(path: Path) -> list[str]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return [name.strip() for name in next(csv.reader(file), [])]
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise Refusal(f"cannot read the columns of {path}: {error}") from error


def _parquet_header(path: Path) -> list[str]:
    from pyarrow import parquet

    return list(parquet.read_schema(path).names)


def _parquet_columns(path: Path, names: list[str]) -> dict[str, list[str]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise Refusal(
            f"{path}: Parquet needs pyarrow, which is not installed; type: python -m pip install 'tptopk[tables]', or save it as CSV"
        ) from error
    try:
        _require(names, parquet.read_schema(path).names, path)
        table = parquet.read_table(path, columns=names)
        return {name: [as_word(value) for value in table.column(name).to_pylist()] for name in names}
    except (pyarrow.ArrowException, OSError) as error:
        raise Refusal(f"{path} cannot be read as a Parquet file: {error}") from error


def numbers_of(texts: Sequence[str], name: str, path: str | Path) -> np.ndarray[Any, Any]:
    """[N], NaN where missing."""
    numbers, wrong, _ = parsed(texts)
    if wrong:
        raise Refusal(
            f"{path}: {wrong} of {len(texts)} values in {name!r} are not numbers; repair them, leave them empty, or make it a "
            "column of categories"
        )
    return numbers
