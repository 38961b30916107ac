"""Counter-based random streams, each keyed by hash from one secret and the place it is used in.

The secret is 256 bits of operating-system entropy and stays in memory. A stream's key is
BLAKE2b(secret; run, attempt, purpose, phase, step, parameter), so that no two places ever share numbers and
none can be derived from another. On the CPU a stream is NumPy's Philox 4×64 with a 128-bit key; on CUDA, torch's
own Philox takes a 64-bit seed made the same way.
"""

from __future__ import annotations

import hashlib
import json
import secrets

import numpy as np
import torch


class Streams:
    """All randomness of one attempt at one run."""

    def __init__(self, run: str, attempt: int = 1, seed: int | None = None) -> None:
        """`seed` makes a run repeatable for experiments; whoever knows it can subtract the noise."""
        self._secret = (
            secrets.token_bytes(32) if seed is None else hashlib.sha256(f"tptopk seed {seed}".encode()).digest()
        )
        self._place = [run if seed is None else "", attempt]

    def __repr__(self) -> str:
        return "Streams(secret withheld)"

    def __getstate__(self) -> object:
        raise TypeError("random streams hold the run's secret and are never written anywhere")

    def _key(self, purpose: str, place: tuple[int | str, ...], size: int) -> int:
        message = json.dumps([*self._place, purpose, *place]).encode()
        return int.from_bytes(hashlib.blake2b(message, key=self._secret, digest_size=size).digest(), "little")

    def numpy(self, purpose: str, *place: int | str) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self._key(purpose, place, 16)))

    def normal(self, shape: int, device: torch.device, purpose: str, *place: int | str) -> torch.Tensor:
        """`shape` standard normal numbers in float32 on the device."""
        if device.type == "cuda":
            generator = torch.Generator(device).manual_seed(self._key(purpose, place, 8) - 2**63)
            return torch.randn(shape, generator=generator, device=device)
        return torch.from_numpy(self.numpy(purpose, *place).standard_normal(shape, dtype=np.float32)).to(device)
