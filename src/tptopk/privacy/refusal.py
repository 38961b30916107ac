"""The one kind of error that is meant for a person: what was given, what was expected, what to do."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Refusal(ValueError):
    """Raised before anything is charged or lost, with a message that says what to do instead."""


class UnknownKeyword(Refusal, TypeError):
    """An argument that no parameter of the called function has."""


class PrivacyWarning(UserWarning):
    """Something that a person who answers for the guarantee should read."""


class SlowCalibration(PrivacyWarning):
    """A plan took long to calibrate, and there is a faster way."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'tp-topk'?``, or the list of choices when nothing is near."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; it is one of: {', '.join(sorted(choices))}"


def check_number(
    name: str,
    value: float,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> None:
    """Refuse a value that is not a finite number inside the given open and closed bounds."""
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("above", above), ("at least", least), ("below", below), ("at most", most))
        if math.isfinite(bound)
    ]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not (above < value < below and least <= value <= most):
        raise Refusal(f"{name} is {value!r}; it must be a finite number {' and '.join(bounds)}".rstrip())


def check_count(name: str, value: int, *, least: int = 1) -> None:
    """Refuse a value that is not a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise Refusal(f"{name} is {value!r}; it must be a whole number of at least {least}")


def refuse_unknown_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Turn Python's bare TypeError for a mistyped keyword into one that names the nearest."""
    names = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for word in kwargs:
            if "scaler" in word:
                raise UnknownKeyword(
                    f"{word}: private training takes no gradient scaler, because it would rescale gradients before "
                    "they are clipped; use precision='bf16', which needs none"
                )
            if word not in names:
                raise UnknownKeyword(f"{function.__name__} has no argument {word!r}{nearest(word, names)}")
        return function(*args, **kwargs)

    return checked
