from __future__ import annotations

import cmath
import math

import pytest
import torch

from tptopk.models.scattering import Scattering, folded, folded_product, gabor


def wave_at(y, x, rows, columns, width, angle, frequency, slant):
    """The Gabor function at one point of the torus, written out."""
    total = 0j
    for down in range(-2, 3):
        for right in range(-2, 3):
            u, v = y + down * rows, x + right * columns
            a, b = u * math.cos(angle) + v * math.sin(angle), v * math.cos(angle) - u * math.sin(angle)
            total += cmath.exp(-(a * a + slant**2 * b * b) / (2 * width**2) + 1j * frequency * a)
    return total * slant / (2 * math.pi * width**2)


def filter_at(rows, columns, width, angle, frequency, slant, grain):
    """[rows/grain, columns/grain] values of a filter on every grain-th point, times grain²."""
    grid = [(y, x) for y in range(rows) for x in range(columns)]
    wave = {p: wave_at(*p, rows, columns, width, angle, frequency, slant) for p in grid}
    if frequency:
        flat = {p: wave_at(*p, rows, columns, width, angle, 0.0, slant) for p in grid}
        share = sum(wave.values()) / sum(flat.values())
        wave = {p: wave[p] - share * flat[p] for p in grid}
    return torch.tensor(
        [[wave[y, x] * grain**2 for x in range(0, columns, grain)] for y in range(0, rows, grain)],
        dtype=torch.complex128,
    )


def convolved(image, kernel):
    """Circular convolution by its definition."""
    total = torch.zeros_like(kernel)
    for y in range(kernel.shape[0]):
        for x in range(kernel.shape[1]):
            total += kernel[y, x] * torch.roll(image, (y, x), (0, 1))
    return total


@pytest.mark.slow
def test_the_transform_is_what_its_definition_gives_by_direct_convolution():
    torch.manual_seed(0)
    images, rows, angles = torch.rand(1, 2, 8, 8), 16, 4
    transform = Scattering(8, 8, angles=angles)
    found = transform(images).double()
    assert found.shape == (1, 2 * transform.channels, 2, 2) and transform.channels == 1 + 8 + 16
    padded = torch.nn.functional.pad(images, [4] * 4, mode="reflect")[0].to(torch.complex128)

    def psi(j, n, grain):
        return filter_at(rows, rows, 0.8 * 2**j, (1 - n) * math.pi / angles, 0.75 * math.pi / 2**j, 4 / angles, grain)

    phi = {grain: filter_at(rows, rows, 1.6, 0.0, 0.0, 1.0, grain) for grain in (1, 2)}
    for channel in range(2):
        x = padded[channel]
        smoothed = [convolved(x, phi[1])[::4, ::4]]
        second = []
        for j in range(2):
            for n in range(angles):
                first = convolved(x, psi(j, n, 1)).abs()[:: 2**j, :: 2**j].to(torch.complex128)
                smoothed.append(convolved(first, phi[2**j])[:: 4 // 2**j, :: 4 // 2**j])
                if j == 0:
                    for m in range(angles):
                        u = convolved(first, psi(1, m, 1)).abs()[::2, ::2].to(torch.complex128)
                        second.append(convolved(u, phi[2])[::2, ::2])
        expected = torch.stack([*smoothed, *second]).real[:, 1:-1, 1:-1]
        mine = found[0, channel * transform.channels : (channel + 1) * transform.channels]
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_folding_a_transform_samples_the_signal():
    signal = torch.randn(3, 8, 12)
    coarse = torch.fft.ifft2(folded(torch.fft.fft2(signal), 2)).real / 4
    torch.testing.assert_close(coarse, signal[:, ::2, ::2], rtol=1e-4, atol=1e-5)


def test_products_are_folded_as_they_are_made():
    x, waves = torch.randn(2, 3, 8, 12, dtype=torch.complex64), torch.randn(5, 8, 12)
    for grain in (1, 2, 4):
        expected = folded(x[..., None, :, :] * waves, grain)
        torch.testing.assert_close(folded_product(x, waves, grain), expected, rtol=1e-4, atol=1e-5)


def test_shapes_and_what_the_transform_cannot_see():
    transform = Scattering(32, 32)
    assert transform(torch.rand(2, 3, 32, 32)).shape == (2, 243, 8, 8)
    assert Scattering(28, 28)(torch.rand(1, 1, 28, 28)).shape == (1, 81, 7, 7)
    for transform in (Scattering(32, 32), Scattering(24, 40)):
        rows, columns = transform.size
        flat = transform(torch.full((1, 1, rows, columns), 0.7))[0]
        assert torch.allclose(flat[0], torch.full((rows // 4, columns // 4), 0.7), atol=1e-4), "the mean is kept"
        assert flat[1:].abs().max() < 1e-4, "wavelets have mean zero"
    assert torch.allclose(
        gabor(40, 40, 1.6, 0.3, 0.0, 0.5).real.sum(), torch.tensor(1.0, dtype=torch.float64), atol=1e-6
    )
    assert not list(transform.parameters()) and not transform.state_dict()
    with pytest.raises(ValueError, match="squares of 4"):
        Scattering(30, 32)
    with pytest.raises(ValueError, match="made for"):
        transform(torch.rand(1, 1, 28, 28))
