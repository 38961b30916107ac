"""The six training methods, as data.

Each method is described by what its support does; the rooms that act on it (`supports/policies.py`,
`training/trainer.py`) read these fields and never a method's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tptopk.privacy.refusal import Refusal, nearest


@dataclass(frozen=True)
class Method:
    """What sets one method apart from the others."""

    name: str
    ranking: Literal["none", "score", "random"]  # how coordinates are ranked; "none" keeps all of them
    warmup: bool  # a dense first phase, then a ranking fixed for the rest
    private: bool
    summary: str

    @property
    def sparse(self) -> bool:
        return self.ranking != "none"


METHODS = {
    method.name: method
    for method in (
        Method("dp-sgd", "none", False, True, "all coordinates, always"),
        Method("tp-topk", "score", True, True, "all in the warm-up; then the k highest scores, fixed"),
        Method("tp-rand", "random", True, True, "the same warm-up; then k coordinates drawn uniformly, fixed"),
        Method("on-rand", "random", False, True, "k fresh uniform coordinates at every epoch"),
        Method("on-topk", "score", False, True, "k re-chosen at every epoch from a running score, a tenth at random"),
        Method("non-private", "none", False, False, "no clipping, no noise: NOT private"),
    )
}


def method_named(name: str) -> Method:
    if name not in METHODS:
        raise Refusal(f"unknown method {name!r}{nearest(str(name), METHODS)}")
    return METHODS[name]
