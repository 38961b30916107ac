"""Which method a training that was made private may name, and which options that method uses."""

from __future__ import annotations

from typing import Any

from tptopk.privacy.methods import Method, method_named
from tptopk.privacy.refusal import Refusal


def private_method(name: str) -> Method:
    spec = method_named(name)
    if not spec.private:
        raise Refusal(f"method {name!r} is not private; train without an engine instead")
    return spec


def check_options(spec: Method, **options: tuple[Any, bool]) -> None:
    for name, (value, read) in options.items():
        if value is not None and not read:
            raise Refusal(f"{name} is given and {spec.name} does not use it; choose another method= or leave it out")
