from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tptopk.privacy.refusal import Refusal
from tptopk.supports.support import Support


def support(seed: int = 0) -> Support:
    generator = torch.Generator().manual_seed(seed)
    return Support(
        {
            name: torch.rand(shape, generator=generator) < 0.3
            for name, shape in {"w": (5, 7), "b": (5,), "s": ()}.items()
        }
    )


def test_frozen_parameters_are_outside_d():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    full = Support.full(model)
    assert full.total == full.size == 6 and full.ratio == 1.0 and full.is_full
    assert list(full.masks) == ["1.weight", "1.bias"]


def test_a_tied_parameter_counts_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert Support.full(model).total == 16


def test_save_and_load_are_bit_exact(tmp_path):
    one = support()
    one.save(tmp_path / "s.safetensors")
    assert Support.load(tmp_path / "s.safetensors") == one
    assert (tmp_path / "s.safetensors").stat().st_size < 600  # bits, not bytes


def test_equality_is_of_every_bit():
    one, other = support(), support()
    assert one == other and one != support(1)
    other.masks["w"][0, 0] ^= True
    assert one != Support(other.masks)
    assert one != "a support"


def test_union_holds_what_either_holds():
    a, b = support(0), support(1)
    assert torch.equal(a.union(b)["w"], a["w"] | b["w"])
    with pytest.raises(Refusal, match="different models"):
        a.union(Support({"w": torch.ones(2, dtype=torch.bool)}))


def test_keep_selects_instead_of_multiplying():
    s = Support({"w": torch.tensor([True, False])})
    kept = s.keep("w", torch.tensor([[1.0, float("nan")], [2.0, float("inf")]]))
    assert kept.tolist() == [[1.0, 0.0], [2.0, 0.0]]


def test_masks_are_booleans():
    with pytest.raises(TypeError, match="booleans"):
        Support({"w": torch.ones(3)})


@pytest.mark.parametrize("content", [b"", b"not a support", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_what_is_not_a_support_is_refused(tmp_path, content):
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(Refusal, match="not a saved support"):
        Support.load(tmp_path / "s")


def test_a_support_with_too_few_bits_is_refused(tmp_path):
    save_file({"w": torch.zeros(1, dtype=torch.uint8)}, tmp_path / "s", metadata={"tptopk.support": '[["w", [100]]]'})
    with pytest.raises(Refusal, match="not a saved support"):
        Support.load(tmp_path / "s")
