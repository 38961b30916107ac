"""What advice needs of a warm-up: sums of its private gradients, in memory that does not grow with the steps.

The steps of the first phase are dealt into four parts, one after the other. Of each part the sum of its private
gradients and the sum of their squares are kept, so that coordinates can be ranked by some parts and judged by others.
Everything here is post-processing of private gradients and costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tptopk.privacy.gradient import PrivateGradient, require_private
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal

PARTS = 4
FORMAT = 1
FILE = "warmup.safetensors"


class WarmUp:
    """The first phase of a run by `plan`, as far as it went: 8 numbers a coordinate and one a step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.counts = [0] * PARTS
        self.along: list[float] = []  # each private gradient along the sum of those before it
        self._sums: list[dict[str, Tensor]] = [{} for _ in range(PARTS)]
        self._squares: list[dict[str, Tensor]] = [{} for _ in range(PARTS)]

    @torch.no_grad()
    def add(self, gradient: PrivateGradient) -> None:
        """Take in one step; those of later phases are passed over."""
        gradient = require_private(gradient)
        if gradient.phase != 0:
            return
        part = gradient.step % PARTS
        products, lengths = [], []
        for name, value in gradient.values.items():
            for kept in (*self._sums, *self._squares):
                kept[name] = kept[name].to(value.device) if name in kept else torch.zeros_like(value)
            before = torch.stack([sums[name] for sums in self._sums]).sum(0)
            products.append((before * value).sum())
            lengths.append(before.square().sum())
            self._sums[part][name] += value
            self._squares[part][name] += value.square()
        product, length = torch.stack([torch.stack(products), torch.stack(lengths)]).double().sum(1).tolist()
        self.along.append(product / length**0.5 if length > 0 else 0.0)
        self.counts[part] += 1

    @property
    def steps(self) -> int:
        return sum(self.counts)

    @property
    def complete(self) -> bool:
        return self.steps == self.plan.phases[0].steps

    @property
    def noise_std(self) -> float:
        """ν₁, a number of the plan."""
        return self.plan.noise_std(self.plan.phases[0])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self._sums[0].items()}

    @property
    def total(self) -> int:
        """d, the number of coordinates."""
        return sum(value.numel() for value in self._sums[0].values())

    def mean(self, part: int) -> dict[str, Tensor]:
        """The mean private gradient over the steps of a part."""
        return {name: value / self.counts[part] for name, value in self._sums[part].items()}

    def scores(self, parts: Iterable[int] = range(PARTS)) -> dict[str, Tensor]:
        """The paper's score a_p over the steps of some parts; over all of them it is the one that TP-TopK ranks by."""
        parts = list(parts)
        steps = sum(self.counts[part] for part in parts)
        return {
            name: torch.stack([self._squares[part][name] for part in parts]).sum(0) / steps - self.noise_std**2
            for name in self.shapes
        }

    def state(self) -> dict[str, Tensor]:
        """All of it, as tensors."""
        found = {
            "counts": torch.tensor(self.counts, dtype=torch.int64),
            "along": torch.tensor(self.along, dtype=torch.float64),
        }
        for part in range(PARTS):
            found |= {f"sums/{part}/{name}": value for name, value in self._sums[part].items()}
            found |= {f"squares/{part}/{name}": value for name, value in self._squares[part].items()}
        return found

    def unfinished(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of it: nothing before its first step, and nothing once it is whole and in its file."""
        return self.state() if self.steps and not self.complete else {}

    def restore(self, state: Mapping[str, Tensor], names: Iterable[str] | None = None) -> None:
        """Go on from where `state` was taken, with the coordinates in the order of `names`."""
        if not sum(state["counts"].tolist()):
            return  # nothing was taken in by then
        self.counts, self.along = state["counts"].tolist(), state["along"].tolist()
        names = [key[len("sums/0/") :] for key in state if key.startswith("sums/0/")] if names is None else list(names)
        self._sums = [{name: state[f"sums/{part}/{name}"] for name in names} for part in range(PARTS)]
        self._squares = [{name: state[f"squares/{part}/{name}"] for name in names} for part in range(PARTS)]

    def content(self) -> bytes:
        """A safetensors file: what was released, and the plan. No secret, and nothing that would be executed."""
        about = {"format": FORMAT, "plan": self.plan.to_dict(), "names": list(self.shapes)}
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.state().items()}
        return save(tensors, metadata={"tptopk.warmup": json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path) -> WarmUp:
        """Read a file back; one that is damaged or of something else is refused."""
        try:
            with safe_open(str(path), "pt") as file:
                about = json.loads((file.metadata() or {})["tptopk.warmup"])
                if about["format"] != FORMAT:
                    raise Refusal(f"{path} was written by another version of tptopk (format {about['format']!r})")
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            found = cls(Plan.from_dict(about["plan"]))
            found.restore(state, about["names"])
            found._check()
        except FileNotFoundError as error:
            raise Refusal(f"{path} is not there") from error
        except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise Refusal(f"{path} is not a saved warm-up: {error}") from error
        return found

    def _check(self) -> None:
        if len(self.counts) != PARTS or not 0 <= self.steps <= self.plan.phases[0].steps:
            raise ValueError(f"it counts {self.counts} steps of {self.plan.phases[0].steps}")
        if min(self.counts) < 0 or len(self.along) != self.steps:
            raise ValueError("its steps do not add up")
        for kept in (*self._sums, *self._squares):
            for name, value in kept.items():
                if not value.is_floating_point() or tuple(value.shape) != self.shapes[name]:
                    raise ValueError(f"{name} has another shape or type in one part than in another")
                if not torch.isfinite(value).all():
                    raise ValueError(f"{name} holds a value that is not finite")
        if any(bool((value < 0).any()) for squares in self._squares for value in squares.values()):
            raise ValueError("a sum of squares is negative")
