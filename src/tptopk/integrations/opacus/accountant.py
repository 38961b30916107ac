"""What has been charged, in the shape of an Opacus accountant."""

from __future__ import annotations

from tptopk.integrations.opacus.steps import PrivateSteps
from tptopk.privacy.refusal import Refusal, check_number, nearest

ACCOUNTANTS = {"prv": "pld", "pld": "pld", "rdp": "rdp", "rdp-paper": "rdp-paper"}


class Accountant:
    """Of one engine, and of the training that it made private. Reading changes nothing."""

    def __init__(self, mechanism: str) -> None:
        if mechanism == "gdp":
            raise Refusal("accountant='gdp' is an approximation that reports too small an ε; use 'prv' or 'rdp'")
        if mechanism not in ACCOUNTANTS:
            raise Refusal(f"unknown accountant {mechanism!r}{nearest(str(mechanism), ACCOUNTANTS)}")
        self._mechanism = mechanism
        self.steps: PrivateSteps | None = None

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sample rate, steps) for each phase charged so far."""
        return (
            [(s.noise_multiplier, s.sample_rate, s.steps) for s in self.steps.ledger.segments()] if self.steps else []
        )

    def get_epsilon(self, delta: float) -> float:
        check_number("delta", delta, above=0, below=1)
        return self.steps.ledger.epsilon(delta=delta) if self.steps else 0.0

    def __len__(self) -> int:
        return sum(steps for _, _, steps in self.history)

    def mechanism(self) -> str:
        return self._mechanism

    @property
    def of_plans(self) -> str:
        """What a plan calls it."""
        return ACCOUNTANTS[self._mechanism]
