"""The scattering transform: fixed wavelet features that need no training and so cost no privacy.

S₀ = x ∗ φ, S₁ = |x ∗ ψ₁| ∗ φ, S₂ = ||x ∗ ψ₁| ∗ ψ₂| ∗ φ with Morlet wavelets ψ of `angles` directions at the scales 1, 2, …,
2^(J−1) and a Gaussian φ of scale 2^(J−1), all of width 0.8 times their scale. ψ₂ is coarser than ψ₁. Each convolution is
a product of Fourier transforms, and its result is sampled as coarsely as its filter allows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Scattering(nn.Module):
    """[B, C, H, W] → [B, C · (1 + JL + L² J(J−1)/2), H/2^J, W/2^J]: with two scales and eight angles, 81 channels for one."""

    _low: Tensor

    def __init__(self, height: int, width: int, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        grain = 2**scales
        if height % grain or width % grain or min(height, width) < 2 * grain:
            raise ValueError(f"images of {height} × {width} do not divide into squares of {grain} pixels, two at least")
        self.size, self.scales, self.angles = (height, width), scales, angles
        rows, columns = height + 2 * grain, width + 2 * grain  # a border of one coarse pixel on each side
        low = gabor(rows, columns, 0.8 * 2 ** (scales - 1), 0.0, 0.0, 1.0)
        self.register_buffer("_low", torch.fft.fft2(low).real.float(), persistent=False)
        for j in range(scales):
            # directions −3π/8 … 4π/8 for eight angles
            bank = [
                morlet(rows, columns, 0.8 * 2**j, (angles // 2 - 1 - n) * math.pi / angles, 0.75 * math.pi / 2**j, 4 / angles)
                for n in range(angles)
            ]  # fmt: skip
            waves = torch.fft.fft2(torch.stack(bank)).real.float()  # [L, rows, columns]
            self.register_buffer(f"_waves{j}", waves, persistent=False)

    @property
    def channels(self) -> int:
        """Features for each channel of the image."""
        return 1 + self.scales * self.angles + self.angles**2 * self.scales * (self.scales - 1) // 2

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2:] != self.size:
            raise ValueError(f"images of {tuple(images.shape[2:])}; the transform was made for {self.size}")
        border = 2**self.scales
        x = torch.fft.fft2(F.pad(images, [border] * 4, mode="reflect"))  # [B, C, rows, columns]
        found = [self._smoothed(x, 0)[:, :, None]]
        second = []
        for j in range(self.scales):
            first = self._modulus(x, 0, j)  # [B, C, L, rows/2^j, columns/2^j]
            found.append(self._smoothed(first, j))
            for coarser in range(j + 1, self.scales):
                second.append(self._smoothed(self._modulus(first, j, coarser), coarser).flatten(2, 3))
        features = torch.cat([*found, *second], dim=2)  # [B, C, 81, h, w]
        return features.flatten(1, 2)

    def _modulus(self, x: Tensor, at: int, scale: int) -> Tensor:
        """The transform of |x ∗ ψ| for all angles of a scale, sampled at that scale."""
        waves = folded(getattr(self, f"_waves{scale}"), 2**at)
        filtered = folded(x[..., None, :, :] * waves, 2 ** (scale - at)) / 4 ** (scale - at)
        result: Tensor = torch.fft.fft2(torch.fft.ifft2(filtered).abs())
        return result

    def _smoothed(self, x: Tensor, at: int) -> Tensor:
        """x ∗ φ, sampled at the coarsest scale, without the border."""
        coarser = self.scales - at
        filtered = folded(x * folded(self._low, 2**at), 2**coarser) / 4**coarser
        result: Tensor = torch.fft.ifft2(filtered).real[..., 1:-1, 1:-1]
        return result


def folded(transform: Tensor, grain: int) -> Tensor:
    """The transform of every `grain`-th sample in both directions, times grain²: frequencies that become one are added up."""
    rows, columns = transform.shape[-2] // grain, transform.shape[-1] // grain
    return transform.reshape(*transform.shape[:-2], grain, rows, grain, columns).sum((-4, -2))


def gabor(rows: int, columns: int, width: float, angle: float, frequency: float, slant: float) -> Tensor:
    """A Gaussian times a plane wave on a torus, [rows, columns] complex; of total 1 without the wave."""
    total = torch.zeros(rows, columns, dtype=torch.complex128)
    cos, sin = math.cos(angle), math.sin(angle)
    for shift_down in range(-2, 3):
        for shift_right in range(-2, 3):
            y = torch.arange(rows, dtype=torch.float64)[:, None] + shift_down * rows
            x = torch.arange(columns, dtype=torch.float64)[None, :] + shift_right * columns
            along, across = y * cos + x * sin, -y * sin + x * cos
            envelope = torch.exp(-(along**2 + slant**2 * across**2) / (2 * width**2))
            total += envelope * torch.exp(1j * frequency * along)
    return total * slant / (2 * math.pi * width**2)


def morlet(rows: int, columns: int, width: float, angle: float, frequency: float, slant: float) -> Tensor:
    """A Gabor function less as much of its envelope as makes its mean zero."""
    wave, envelope = (gabor(rows, columns, width, angle, f, slant) for f in (frequency, 0.0))
    return wave - wave.sum() / envelope.sum() * envelope
