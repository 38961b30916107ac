"""Streams are all different, and the secret stays where it is."""

from __future__ import annotations

import pickle
import random
import sys

import numpy as np
import pytest
import torch

from tptopk.privacy.randomness import Streams, _chacha20
from tptopk.privacy.refusal import Refusal

CPU = torch.device("cpu")


def test_no_two_places_share_numbers():
    """Every pair of (run, attempt, purpose, phase, step, parameter) that differs anywhere gives different numbers."""
    seen = set()
    for run in ("a", "b"):
        for attempt in (1, 2):
            streams = Streams(run, attempt, seed=None)
            for purpose in ("noise", "sample"):
                for place in [(p, s, n) for p in range(3) for s in range(20) for n in ("w", "b")]:
                    seen.add(streams.numpy(purpose, *place).bytes(16))
    assert len(seen) == 2 * 2 * 2 * 120


def test_places_that_read_alike_are_different():
    streams = Streams("run", seed=1)
    assert streams.numpy("noise", 1, 12).bytes(8) != streams.numpy("noise", 11, 2).bytes(8)
    assert streams.numpy("noise", "1").bytes(8) != streams.numpy("noise", 1).bytes(8)


@pytest.mark.parametrize("other", [1, 2**32, 2**64, -5])
def test_all_bits_of_a_seed_count(other):
    """torch's own CPU generator keeps 32 bits of its seed; ours must not."""
    assert Streams("r", seed=5).numpy("noise").bytes(8) != Streams("r", seed=5 + other).numpy("noise").bytes(8)


def test_a_seed_repeats_and_no_seed_does_not():
    assert Streams("a", seed=3).numpy("x").bytes(8) == Streams("b", seed=3).numpy("x").bytes(8)
    assert Streams("a").numpy("x").bytes(8) != Streams("a").numpy("x").bytes(8)


def test_the_secret_cannot_be_written_down():
    streams = Streams("r")
    assert "secret withheld" in repr(streams)
    with pytest.raises(TypeError, match="never written"):
        pickle.dumps(streams)


def test_normal_numbers_are_standard():
    """Mean and variance of a million draws; each fails once in a million runs (4.9 standard errors)."""
    draws = Streams("r").normal(1_000_000, CPU, "noise", 0, 0, "w").double()
    assert abs(draws.mean()) < 4.9e-3
    assert abs(draws.var() - 1) < 4.9 * np.sqrt(2 / 1_000_000)


def test_secure_noise_is_standard_normal_keyed_like_the_rest_and_of_any_length():
    """A million numbers: mean and variance within 4.9 standard errors, once in a million runs each beyond."""
    streams = Streams("r", secure=True)
    draws = streams.normal(1_000_001, CPU, "noise", 0, 0).double()
    assert len(draws) == 1_000_001 and abs(draws.mean()) < 4.9e-3 and abs(draws.var() - 1) < 4.9 * (2 / 1e6) ** 0.5
    assert abs((draws.square() - 1).mul(draws).mean()) < 4.9 * 15**0.5 / 1e3, "not skewed"
    assert not torch.equal(draws[:10].float(), streams.normal(10, CPU, "noise", 0, 1))
    one, two = (Streams("r", seed=1, secure=True).normal(5, CPU, "noise", 0, 0) for _ in range(2))
    assert torch.equal(one, two) and streams.name == "chacha20" and Streams("r").name == "philox"


def test_chacha20_is_the_standards_own():
    """The key stream of an all-zero key and nonce, as RFC 8439's first block test has it (A.1, vector 1)."""
    assert _chacha20(bytes(32), 8).hex() == "76b8e0ada0f13d90"


def test_without_the_package_secure_noise_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(Refusal, match="cryptography package"):
        Streams("r", secure=True)


def thrown() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.random())


def test_dice_are_the_secrets_whatever_seed_the_user_set_and_leave_no_trace():
    def seeded() -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)

    seeded()
    plain = [thrown() for _ in range(2)]
    found = set()
    for streams in (Streams("r"), Streams("r")):
        for place in ((0, 0), (0, 1), (1, 0)):
            seeded()
            with streams.dice(CPU, "dice", *place):
                found |= set(thrown())
            assert [thrown() for _ in range(2)] == plain, "the user's generators are as they were"
    assert len(found) == 18, "each run, phase and step throws its own"


def test_dice_are_put_back_after_an_error_and_repeat_for_a_seed():
    streams = [Streams("r", seed=5), Streams("r", seed=5)]
    before = torch.get_rng_state()
    rolls = []
    for one in streams:
        with pytest.raises(ZeroDivisionError), one.dice(CPU, "dice", 3):
            rolls.append(thrown())
            1 / 0  # noqa: B018
    assert rolls[0] == rolls[1] and torch.equal(torch.get_rng_state(), before)
