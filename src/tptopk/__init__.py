"""Train PyTorch models from scratch on sensitive data under differential privacy.

What is named here is imported when it is first asked for, so that `tptopk --help` need not wait for PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tptopk.gradients.clipping import ClippedSum, clipped_sum
    from tptopk.models.fix import fix
    from tptopk.privacy.gradient import PrivateGradient
    from tptopk.privacy.methods import METHODS
    from tptopk.privacy.plan import Phase, Plan
    from tptopk.privacy.refusal import PrivacyWarning, Refusal
    from tptopk.supports.advice import Advice, advise
    from tptopk.supports.support import Support
    from tptopk.supports.warmup import WarmUp
    from tptopk.training.annealing import Annealing
    from tptopk.training.evaluation import evaluate
    from tptopk.training.loading import load
    from tptopk.training.rows import mirrored, shifted
    from tptopk.training.run import Run
    from tptopk.training.standardize import Standardize
    from tptopk.training.trainer import fit

__version__ = version("tptopk")
__all__ = [
    "METHODS",
    "Advice",
    "Annealing",
    "ClippedSum",
    "Phase",
    "Plan",
    "PrivacyWarning",
    "PrivateGradient",
    "Refusal",
    "Run",
    "Standardize",
    "Support",
    "WarmUp",
    "advise",
    "clipped_sum",
    "evaluate",
    "fit",
    "fix",
    "load",
    "mirrored",
    "shifted",
]

_HOMES = {
    "gradients.clipping": ("ClippedSum", "clipped_sum"),
    "models.fix": ("fix",),
    "privacy.gradient": ("PrivateGradient",),
    "privacy.methods": ("METHODS",),
    "privacy.plan": ("Phase", "Plan"),
    "privacy.refusal": ("PrivacyWarning", "Refusal"),
    "supports.advice": ("Advice", "advise"),
    "supports.support": ("Support",),
    "supports.warmup": ("WarmUp",),
    "training.annealing": ("Annealing",),
    "training.evaluation": ("evaluate",),
    "training.rows": ("mirrored", "shifted"),
    "training.loading": ("load",),
    "training.run": ("Run",),
    "training.standardize": ("Standardize",),
    "training.trainer": ("fit",),
}
_HOME = {name: f"tptopk.{home}" for home, names in _HOMES.items() for name in names}
_ROOMS = {"data", "diagnostics", "gradients", "models", "privacy", "supports", "theory", "training"}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"tptopk.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'tptopk' has no attribute {name!r}")
    globals()[name] = getattr(import_module(_HOME[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
