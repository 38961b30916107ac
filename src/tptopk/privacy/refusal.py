"""The one kind of error that is meant for a person: what was given, what was expected, what to do."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeGuard, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


MANY = 2**63  # from here on a count is none


class Refusal(ValueError):
    """Raised before anything is charged or lost, with a message that says what to do instead."""


class UnknownKeyword(Refusal, TypeError):
    """An argument that no parameter of the called function has."""


class SaidElsewhere(Refusal):
    """What another of several processes refused, and says."""


class PrivacyWarning(UserWarning):
    """Something that a person who answers for the guarantee should read."""


class SlowCalibration(PrivacyWarning):
    """A plan took long to calibrate, and there is a faster way."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'tp-topk'?``, or the list of choices when nothing is near; nothing when there are none."""
    choices = [choice for choice in choices if choice]
    if not choices:
        return ""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    close = close or [choice for choice in choices if len(word) > 2 and word in choice]
    return f"; did you mean {close[0]!r}?" if close else f"; it is one of: {', '.join(sorted(choices))}"


def is_number(value: object) -> TypeGuard[float]:
    """A finite number that fits in a float, and no truth value."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


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
    if not is_number(value) or not (above < value < below and least <= value <= most):
        raise Refusal(f"{name} is {value!r}; it must be a finite number {' and '.join(bounds)}".rstrip())


def check_count(name: str, value: int, *, least: int = 1) -> None:
    """Refuse a value that is not a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < MANY:
        most = " and less than 2 to the power of 63" if isinstance(value, int) and value >= MANY else ""
        raise Refusal(f"{name} is {value!r}; it must be a whole number of at least {least}{most}")


OF_THE_PLAN = (
    "epsilon", "delta", "epochs", "steps", "batch_size", "dataset_size", "active_ratio", "warmup", "warmup_budget", "clip_norm",
    "accountant", "noise_multiplier", "method",
)  # fmt: skip


def _at_home(word: str, names: Iterable[str]) -> str:
    """Where a word belongs that is right and stands in the wrong call; nothing for other words."""
    if "plan" in names and word in OF_THE_PLAN:
        where = "Phase" if word == "noise_multiplier" else "Plan.calibrate"
        return f"; it belongs to the plan: {where}(…, {word}=…)"
    if "target_epsilon" in names and word == "noise_multiplier":
        return "; the noise is calibrated to target_epsilon here, and make_private takes a noise_multiplier"
    return ""


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
                hint = _at_home(word, names) or nearest(word, names)
                raise UnknownKeyword(f"{function.__name__} has no argument {word!r}{hint}")
        return function(*args, **kwargs)

    return checked
