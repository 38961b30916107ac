from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tptopk.experiments.bench import random_support
from tptopk.gradients.clipping import clipped_sum
from tptopk.gradients.memory import MemoryBound, memory_bound, parse_bytes, peak_bytes
from tptopk.models import networks
from tptopk.privacy.refusal import Refusal
from tptopk.supports.support import Support

CPU = torch.device("cpu")


def step_of(model, density):
    support = Support.full(model) if density == 1.0 else random_support(model, density)

    def step(n):
        x = torch.rand(n, 3, 32, 32)
        return clipped_sum(model, F.cross_entropy, (x, torch.zeros(n, dtype=torch.long)), support, 1.0)

    return step


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_the_stated_bound_holds_and_is_not_idle(density):
    step = step_of(networks.cnn(), density)
    bound = memory_bound(step, CPU)
    for n in (2, 16, 32):
        assert 0.5 * bound.of(n) <= peak_bytes(lambda n=n: step(n), CPU) <= bound.of(n)


def test_peak_bytes_counts_what_is_alive_at_once():
    def step():
        kept = torch.zeros(1000)  # 4000 bytes, alive throughout
        for _ in range(3):
            torch.ones(500) + 1.0  # 2000 and 2000, gone before the next
        return kept

    assert peak_bytes(step, CPU) == 8000


def test_an_embeddings_memory_does_not_grow_with_batch_times_vocabulary():
    model = networks.text()

    def step(n):
        ids = torch.randint(0, 50_000, (n, 16))
        return clipped_sum(model, F.cross_entropy, (ids, torch.zeros(n, dtype=torch.long)), Support.full(model), 1.0)

    step(4)
    small, large = (peak_bytes(lambda n=n: step(n), CPU) for n in (8, 64))
    assert (large - small) / 56 < 16 * 64 * 4 * 12  # a few copies of the rows that an example touches, of 12.8 MB


def test_the_largest_batch_fits_and_one_more_does_not():
    bound = MemoryBound(fixed=1000, each=300)
    assert bound.largest_batch(1900) == 3 and bound.of(3) <= 1900 < bound.of(4)
    with pytest.raises(Refusal, match=r"one example of this model takes 1.27 KiB"):
        bound.largest_batch(1200)


def test_limits_are_read_in_words():
    assert [parse_bytes(v) for v in (5, "5", "2KiB", "1.5 MiB", "4GB")] == [5, 5, 2048, 1572864, 4 * 10**9]
    for bad in (0, -3, "4 gigs", "GiB", "", True, "0GiB"):
        with pytest.raises(Refusal, match="number of bytes"):
            parse_bytes(bad)
