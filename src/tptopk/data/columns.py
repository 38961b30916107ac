"""Columns turned into inputs by public facts: bounds, categories, buckets of a hash; never statistics.

`parsed`, `scaled` and `one_hot` are what a column of any table goes through. A number beyond its bounds, and so an infinite one,
counts as the nearest bound; NaN, nothing and the words of `MISSING` are missing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tptopk.privacy.refusal import Refusal, check_count, check_number, nearest

MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}

Array = np.ndarray[Any, Any]


class NotANumber(Refusal, TypeError):
    """A numeric column holds a thing that is neither text nor a number."""


def check_bounds(name: Hashable, low: Any, high: Any) -> None:
    """Refuse bounds of a column that are not two finite numbers, the least first, of a finite width."""
    check_number(f"the lower bound of column {name!r}", low)
    check_number(f"the upper bound of column {name!r}", high)
    if low >= high:
        raise Refusal(f"the bounds of column {name!r} are [{low:g}, {high:g}]; write the least first, then the largest")
    check_number(f"the width of the bounds of column {name!r}", high - low)


class Parsed(NamedTuple):
    """A column as numbers, and how many of its values were none."""

    numbers: Array  # [N]; NaN where missing, or not a number
    text: int  # text that is not a number
    other: int  # neither text nor a number


def parsed(values: Iterable[Any]) -> Parsed:
    numbers, text, other = [], 0, 0
    for value in values:
        number = math.nan
        if not (_is_missing(value) or (isinstance(value, str) and value.strip().lower() in MISSING)):
            try:
                number = float(value)
            except ValueError:
                text += 1
            except OverflowError:  # a whole number that no float reaches
                number = math.copysign(math.inf, 1 if value > 0 else -1)
            except TypeError:
                other += 1
        numbers.append(number)
    return Parsed(np.array(numbers, np.float64), text, other)


def scaled(numbers: Array, low: float, high: float) -> Array:
    """Clipped to the bounds and scaled from them to [−1, 1]; 0 where missing."""
    return np.where(np.isnan(numbers), 0, (np.clip(numbers, low, high) - low) / (high - low) * 2 - 1)


def one_hot(words: Iterable[str], known: Sequence[str]) -> Array:  # [N] → [N, known + 1]
    """One input for each known word, and one for anything else."""
    number = {word: i for i, word in enumerate(known)}
    chosen = np.array([number.get(word, len(known)) for word in words], np.int64)
    return np.eye(len(known) + 1, dtype=np.float32)[chosen]


@dataclass(frozen=True)
class Number:
    """A numeric column: its value scaled from public bounds to [−1, 1] and, if values may be missing, whether this one is.

    Where none may be missing, an infinite number is refused as NaN is: scikit-learn asks that of an estimator that takes no NaN.
    """

    name: Hashable
    low: float
    high: float
    missing: bool

    @classmethod
    def declared(cls, name: Hashable, bounds: Any, missing: bool) -> Number:
        if not _is_pair(bounds):
            raise Refusal(
                f"column {name!r} has no bounds; give its least and largest value, such as (0, 120), or its categories; or leave the column "
                "out: an identifier must not be an input (fit takes it as groups=)"
            )
        low, high = plain(bounds[0]), plain(bounds[1])
        check_bounds(name, low, high)
        return cls(name, low, high, missing)

    def inputs(self, values: Array) -> Array:  # [N] → [N, 1] or [N, 2]
        numbers = values.astype(np.float64) if values.dtype.kind in "biuf" else self._parsed(values)
        if not self.missing and not np.isfinite(numbers).all():
            raise Refusal(
                f"column {self.name!r} contains NaN, infinite or missing values; fill them by a public rule, or declare missing=True"
            )
        known = scaled(numbers, self.low, self.high)[:, None]
        return np.concatenate([known, np.isnan(numbers)[:, None]], 1) if self.missing else known

    def _parsed(self, values: Array) -> Array:
        """Numbers from text and other things. No message quotes a value: it is somebody's."""
        numbers, text, other = parsed(values)
        if other:
            raise NotANumber(f"in the numeric column {self.name!r} every argument must be a string or a number")
        if text:
            raise Refusal(
                f"the numeric column {self.name!r} holds text that is not a number; repair it, or declare the column in categories="
            )
        return numbers


@dataclass(frozen=True)
class Categories:
    """A column of categories: one input for each value and one for anything else, or one for each bucket of a public hash."""

    known: tuple[str, ...]
    buckets: int  # 0 unless hashed

    @classmethod
    def declared(cls, name: Hashable, values: Any) -> Categories:
        values = plain(values)
        if isinstance(values, int):
            check_count(f"the number of buckets of column {name!r}", values)
            return cls((), values)
        if isinstance(values, str) or not isinstance(values, (Sequence, np.ndarray)):
            raise Refusal(
                f"the categories of column {name!r} are {values!r}; give a list of them, or a number of buckets"
            )
        known = tuple(map(as_word, values))
        if not known or len(set(known)) != len(known):
            raise Refusal(f"the categories of column {name!r} are {list(known)}; give each once, and at least one")
        return cls(known, 0)

    def inputs(self, values: Array) -> Array:  # [N] → [N, buckets] or [N, categories + 1]
        words = map(as_word, values)
        if self.buckets:
            return np.eye(self.buckets)[[_bucket(word, self.buckets) for word in words]]
        return one_hot(words, self.known)


Column = Number | Categories


def declared_columns(
    names: Sequence[Hashable], bounds: Any, categories: Mapping[Any, Any] | None, *, missing: bool
) -> list[Column]:
    """How each named column becomes inputs.

    `bounds`: one pair for all numeric columns, a list with a pair for each column, or a dictionary. `categories`: a dictionary from
    a column to a list of its values or a number of buckets. `missing`: whether numeric values may be missing.
    """
    categories = dict(categories or {})
    _refuse_unknown(categories, names, "categories")
    if isinstance(bounds, Mapping):
        _refuse_unknown(bounds, names, "bounds")
        pairs = [bounds.get(name) for name in names]
    elif _is_pair(bounds):
        pairs = [bounds] * len(names)
    else:
        pairs = list(bounds) if isinstance(bounds, (Sequence, np.ndarray)) and not isinstance(bounds, str) else []
        if len(pairs) != len(names):
            raise Refusal(
                f"bounds is neither one pair nor {len(names)} of them, one for each column, nor a dictionary; "
                "give (-1, 1), [(0, 120), …] or {'age': (0, 120)}"
            )
    return [
        Categories.declared(name, categories[name]) if name in categories else Number.declared(name, pair, missing)
        for name, pair in zip(names, pairs, strict=True)
    ]


def encode(X: Array, columns: Sequence[Column]) -> Tensor:
    """[N, columns] → [N, D], each record by itself."""
    return torch.from_numpy(np.concatenate([c.inputs(X[:, i]) for i, c in enumerate(columns)], 1).astype(np.float32))


def _bucket(word: str, buckets: int) -> int:
    """The same on every machine and in every run, unlike Python's own hash."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") % buckets


def as_word(value: Any) -> str:
    """A value as CSV would hold it: nothing for a missing one, whole numbers without a point."""
    value = plain(value)
    if _is_missing(value):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _is_missing(value: Any) -> bool:
    return (
        value is None
        or (isinstance(value, float) and math.isnan(value))
        or type(value).__name__ in ("NAType", "NaTType")
    )


def _is_pair(bounds: Any) -> bool:
    pair = isinstance(bounds, (Sequence, np.ndarray)) and not isinstance(bounds, str) and len(bounds) == 2
    return pair and all(np.ndim(end) == 0 and end is not None for end in bounds)


def plain(value: Any) -> Any:
    """A Python number for a NumPy one, which searches over parameters give."""
    return value.item() if isinstance(value, np.generic) else value


def _refuse_unknown(given: Iterable[Hashable], names: Sequence[Hashable], what: str) -> None:
    for name in given:
        if name not in names:
            raise Refusal(
                f"{what} names a column {name!r} that the table does not have{nearest(str(name), map(str, names))}"
            )
