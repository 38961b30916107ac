"""Train PyTorch models from scratch on sensitive data under differential privacy."""

from importlib.metadata import version

from tptopk.gradients.clipping import ClippedSum, clipped_sum
from tptopk.models.fix import fix
from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.methods import METHODS
from tptopk.privacy.plan import Phase, Plan, PrivacyWarning
from tptopk.privacy.refusal import Refusal
from tptopk.supports.advice import Advice, advise
from tptopk.supports.support import Support
from tptopk.supports.warmup import WarmUp
from tptopk.training.annealing import Annealing
from tptopk.training.evaluation import evaluate
from tptopk.training.rows import mirrored, shifted
from tptopk.training.run import Run, load
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
