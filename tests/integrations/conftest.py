"""Fixtures of the integrations' tests."""

from __future__ import annotations

import pytest
import torch

from tptopk.privacy.randomness import Streams


@pytest.fixture
def no_noise(monkeypatch):
    monkeypatch.setattr(Streams, "normal", lambda self, shape, device, *place: torch.zeros(shape, device=device))
