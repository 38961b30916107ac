"""`ModuleValidator` in the shape of Opacus's: is a module fit for private training, and if not, make it so."""

from __future__ import annotations

from typing import Any

from torch import nn

from tptopk.gradients.probe import refuse_unsuitable
from tptopk.models.fix import fix
from tptopk.privacy.refusal import Refusal


class ModuleValidator:
    """Class methods alone; a module that is fit is left as it is."""

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[Refusal]:
        """What stands in the way, or nothing; with `strict` it is raised."""
        try:
            refuse_unsuitable(module)
        except Refusal as refusal:
            if strict:
                raise
            return [refusal]
        return []

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, **unknown: Any) -> nn.Module:
        """The module with every BatchNorm replaced by a GroupNorm, in place; build the optimizer afterwards."""
        if unknown:
            raise Refusal(f"fix takes the module alone, not {', '.join(sorted(unknown))}")
        return fix(module)

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **unknown: Any) -> nn.Module:
        fixed = cls.fix(module, **unknown)
        cls.validate(fixed, strict=True)
        return fixed
