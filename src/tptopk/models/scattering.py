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

    def __init__(self, height: int, width: int, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        grain = 2**scales
        if height % grain or width % grain or min(height, width) < 2 * grain:
            raise ValueError(f"images of {height} × {width} do not divide into squares of {grain} pixels, two at least")
        self.size, self.scales, self.angles = (height, width), scales, angles
        rows, columns = height + 2 * grain, width + 2 * grain  # a border of one coarse pixel on each side
        for j in range(scales):
            # directions −3π/8 … 4π/8 for eight angles
            bank = [
                morlet(rows, columns, 0.8 * 2**j, (angles // 2 - 1 - n) * math.pi / angles, 0.75 * math.pi / 2**j, 4 / angles)
                for n in range(angles)
            ]  # fmt: skip
            waves = torch.fft.fft2(torch.stack(bank)).real.float()  # [L, rows, columns]
            self.register_buffer(f"_waves{j}", waves, persistent=False)
        for j in range(scales):  # φ is a product of one Gaussian down and one across
            self.register_buffer(f"_down{j}", smoothing(rows, grain, 2**j), persistent=False)
            self.register_buffer(f"_across{j}", smoothing(columns, grain, 2**j), persistent=False)

    @property
    def channels(self) -> int:
        """Features for each channel of the image."""
        return 1 + self.scales * self.angles + self.angles**2 * self.scales * (self.scales - 1) // 2

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2:] != self.size:
            raise ValueError(f"images of {tuple(images.shape[2:])}; the transform was made for {self.size}")
        padded = F.pad(images, [2**self.scales] * 4, mode="reflect")
        x = torch.fft.fft2(padded)  # [B, C, rows, columns]
        found, second = [self._smoothed(padded, 0)[:, :, None]], []
        for j in range(self.scales):
            first = self._modulus(x, 0, j)  # [B, C, L, rows/2^j, columns/2^j]
            found.append(self._smoothed(first, j))
            if j + 1 < self.scales:
                again = torch.fft.fft2(first)
                for coarser in range(j + 1, self.scales):
                    second.append(self._smoothed(self._modulus(again, j, coarser), coarser).flatten(2, 3))
        features = torch.cat([*found, *second], dim=2)  # [B, C, 81, h, w]
        return features.flatten(1, 2)

    def _modulus(self, x: Tensor, at: int, scale: int) -> Tensor:
        """|x ∗ ψ| for all angles of a scale, sampled at that scale, of the transform x at the scale `at`."""
        grain = 2 ** (scale - at)
        waves = folded(getattr(self, f"_waves{scale}"), 2**at)
        result: Tensor = torch.fft.ifft2(folded_product(x, waves, grain) / grain**2).abs()
        return result

    def _smoothed(self, x: Tensor, at: int) -> Tensor:
        """x ∗ φ, sampled at the coarsest scale, without the border."""
        across = x @ getattr(self, f"_across{at}").T  # [..., rows, w]
        result: Tensor = (across.mT @ getattr(self, f"_down{at}").T).mT
        return result


def folded(transform: Tensor, grain: int) -> Tensor:
    """The transform of every `grain`-th sample in both directions, times grain²: frequencies that become one are added up."""
    rows, columns = transform.shape[-2] // grain, transform.shape[-1] // grain
    return transform.reshape(*transform.shape[:-2], grain, rows, grain, columns).sum((-4, -2))


def folded_product(x: Tensor, waves: Tensor, grain: int) -> Tensor:
    """folded(x · waves) for x [..., rows, columns] and each of waves [L, rows, columns], which are real: [..., L, r, c].

    The products that become one are added up as they are made, so that all of them never stand in memory.
    """
    rows, columns = x.shape[-2] // grain, x.shape[-1] // grain
    parts = torch.view_as_real(x[..., None, :, :])  # a complex number times a real one is two products
    twice = waves[..., None].expand(*waves.shape, 2).contiguous()
    total = parts.new_zeros(*x.shape[:-2], len(waves), rows, columns, 2)
    for top in range(0, x.shape[-2], rows):
        for left in range(0, x.shape[-1], columns):
            block = (..., slice(top, top + rows), slice(left, left + columns), slice(None))
            total.addcmul_(parts[block], twice[block])
    return torch.view_as_complex(total)


def smoothing(points: int, grain: int, step: int) -> Tensor:
    """[points/grain − 2, points/step] Gaussian weights on a circle: every `grain`-th point but the first and last, from every `step`-th."""
    width = 0.8 * grain / 2
    away = (torch.arange(grain, points - grain, grain)[:, None] - torch.arange(0, points, step)).double()
    turns = torch.arange(-2, 3)[:, None, None] * points
    weights = torch.exp(-((away + turns) ** 2) / (2 * width**2)).sum(0) * step / (math.sqrt(2 * math.pi) * width)
    return weights.float()


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
