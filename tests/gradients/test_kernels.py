"""The Triton kernels against PyTorch, in Triton's interpreter: no GPU is needed, but Triton is (it comes with CUDA builds of torch)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from tptopk.gradients import kernels
from tptopk.gradients.products import _offsets, ghost

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _too_old():
    if importlib.util.find_spec("triton") is None:
        return False
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return triton < (3, 7) and numpy >= (2, 4)


needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(_too_old(), reason="the interpreter of Triton before 3.7 does not run beside NumPy 2.4 and later")
def test_in_the_interpreter():
    """Triton reads its environment once: the tests below run in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


@needs_interpreter
@pytest.mark.parametrize("told", ["not at all", "by mask"])
def test_products_are_written_where_they_are_active(told):
    for height, channels, size, batch in ((5, 3, 4, 2), (5, 3, 8, 2), (40, 15, 3, 3), (70, 30, 2, 2)):
        for density in (0.03, 0.5, 1.0):
            for keep in (True, False):
                check_products(told, height, channels, size, batch, density, keep)


def check_products(told, height, channels, size, batch, density, keep):
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(batch, channels, size + 2, size + 2, generator=generator)
    g = torch.randn(batch, height, size * size, generator=generator).transpose(1, 2)
    mask = torch.rand(height, 9 * channels, generator=generator) < density
    across, down = (size + 2) ** 2, size + 2
    positions = _offsets(((size, size), (down, 1)), base.device)
    columns = _offsets(((channels, 3, 3), (across, down, 1)), base.device)
    whole = torch.einsum("btp,bdt->bpd", g, torch.nn.functional.unfold(base, 3)).flatten(1)
    active, expected = {
        "not at all": (None, whole),
        "by mask": (mask.view(-1), whole * mask.view(-1)),
    }[told]
    squares, values = kernels.write_products(g, base, positions, columns, active, keep, list(base.stride()))
    torch.testing.assert_close(squares.sum(1), expected.square().sum(1), rtol=1e-4, atol=1e-6)
    assert values.shape == (batch, expected.shape[1] if keep else 0)
    if keep:
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)


@needs_interpreter
def test_what_is_not_finite_does_not_matter_where_it_is_not_active():
    base, g = torch.ones(1, 1, 3, 3), torch.tensor([[[1.0, float("nan")]]])
    positions = _offsets(((1, 1), (3, 1)), base.device)
    columns = _offsets(((1, 3, 3), (9, 3, 1)), base.device)
    mask = torch.tensor([True] * 9 + [False] * 9)
    squares, values = kernels.write_products(g, base, positions, columns, mask, True, list(base.stride()))
    assert squares.sum() == 9 and values.sum() == 9


@needs_interpreter
def test_the_other_kernels_are_their_references():
    values = torch.randn(3, 2000, generator=torch.Generator().manual_seed(1))
    indices = torch.arange(0, 2000, 3)
    picked, squares = torch.empty(3, len(indices)), torch.empty(3, kernels.pick_tiles(len(indices)))
    kernels.pick(values, indices, picked, squares)
    assert torch.equal(picked, values[:, indices])
    torch.testing.assert_close(squares.sum(1), picked.square().sum(1))

    weights = torch.tensor([0.5, 3.0, 0.0])
    scaled = values * weights[:, None]
    rounded = kernels.round_to_tf32(values, weights)
    assert not (rounded.view(torch.int32) & 0x1FFF).any() and ((rounded - scaled).abs() <= 2**-11 * scaled.abs()).all()

    gg, xx = (f @ f.transpose(1, 2) for f in (values.view(3, 20, 100), values.flip(1).view(3, 20, 100)))
    for ours, theirs in zip(kernels.ghost(gg, xx), ghost(gg, xx), strict=True):
        torch.testing.assert_close(ours, theirs)
