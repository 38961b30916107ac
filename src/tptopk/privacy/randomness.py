"""Counter-based random streams, each keyed by hash from one secret and the place it is used in.

The secret is 256 bits of operating-system entropy and stays in memory. A stream's key is
BLAKE2b(secret; run, attempt, purpose, phase, step, parameter), so that no two places ever share numbers and
none can be derived from another. On the CPU a stream is NumPy's Philox 4×64 with a 128-bit key; on CUDA, torch's
own Philox takes a 64-bit seed made the same way. Philox passes statistical tests and is no cryptographic generator. With
`secure`, noise is made of ChaCha20 key streams with 256-bit keys instead, by the cryptography package, on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tptopk.privacy.refusal import Refusal


class Streams:
    """All randomness of one attempt at one run."""

    def __init__(self, run: str, attempt: int = 1, seed: int | None = None, *, secure: bool = False) -> None:
        """`seed` makes a run repeatable for experiments; whoever knows it can subtract the noise."""
        self._secure = secure
        if secure:
            _chacha20(bytes(32), 1)  # refuses before anything is charged where the package is missing
        self._secret = (
            secrets.token_bytes(32) if seed is None else hashlib.sha256(f"tptopk seed {seed}".encode()).digest()
        )
        self._place = [run if seed is None else "", attempt]

    @property
    def name(self) -> str:
        return "chacha20" if self._secure else "philox"

    def __repr__(self) -> str:
        return "Streams(secret withheld)"

    def __getstate__(self) -> object:
        raise TypeError("random streams hold the run's secret and are never written anywhere")

    def _key(self, purpose: str, place: tuple[int | str, ...], size: int) -> int:
        message = json.dumps([*self._place, purpose, *place]).encode()
        return int.from_bytes(hashlib.blake2b(message, key=self._secret, digest_size=size).digest(), "little")

    def numpy(self, purpose: str, *place: int | str) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self._key(purpose, place, 16)))

    @contextmanager
    def dice(self, device: torch.device, purpose: str, *place: int | str) -> Iterator[None]:
        """What models, views and collate functions draw inside comes from the secret: dropout, random crops, masked tokens.

        They draw by place in the batch, so that whether a record was drawn decides what all after it get. Whoever could
        recompute those numbers would see the sample, which the guarantee keeps secret; and global generators that had
        moved on by them would tell its size. Afterwards the generators of torch, NumPy and Python are as they were.
        """
        on_cuda = device.type == "cuda"
        python, arrays = random.getstate(), np.random.get_state()
        with torch.random.fork_rng([device] if on_cuda else [], device_type="cuda"):
            keys = self._key(purpose, place, 64).to_bytes(64, "little")
            torch.default_generator.manual_seed(int.from_bytes(keys[:8], "little") - 2**63)
            if on_cuda:
                place_of = torch.cuda.current_device() if device.index is None else device.index
                torch.cuda.default_generators[place_of].manual_seed(int.from_bytes(keys[8:16], "little") - 2**63)
            random.seed(keys[16:40])
            np.random.seed(np.frombuffer(keys[40:], "<u4"))
            try:
                yield
            finally:
                random.setstate(python)
                np.random.set_state(arrays)

    def normal(self, shape: int, device: torch.device, purpose: str, *place: int | str) -> torch.Tensor:
        """`shape` standard normal numbers in float32 on the device."""
        if self._secure:
            key = self._key(purpose, place, 32).to_bytes(32, "little")
            return torch.from_numpy(_normal_from_bytes(key, shape)).to(device)
        if device.type == "cuda":
            generator = torch.Generator(device).manual_seed(self._key(purpose, place, 8) - 2**63)
            return torch.randn(shape, generator=generator, device=device)
        return torch.from_numpy(self.numpy(purpose, *place).standard_normal(shape, dtype=np.float32)).to(device)


def _chacha20(key: bytes, size: int) -> bytes:
    """The first `size` bytes of the key stream; the key is used for this one stream, so that the nonce may be zero."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ModuleNotFoundError as error:
        raise Refusal("secure noise needs the cryptography package: python -m pip install cryptography") from error
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))


def _normal_from_bytes(key: bytes, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Box-Muller on 64-bit uniform numbers in float64: tails reach 9.4 standard deviations."""
    pairs = (count + 1) // 2
    raw = np.frombuffer(_chacha20(key, 16 * pairs), dtype="<u8")
    radius = np.sqrt(-2.0 * np.log((raw[:pairs].astype(np.float64) + 1.0) * 2.0**-64))
    angle = raw[pairs:].astype(np.float64) * (2.0 * np.pi * 2.0**-64)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count].astype(np.float32)
