"""What tensors hold is compared: no way of writing to one escapes, whatever its kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tptopk.gradients.traces import ModelChanged, contents_of, unchanged


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.data.add_(1),
        lambda t: setattr(t, "data", t.detach() + 1),
        lambda t: t.detach().numpy().__setitem__(0, 7),
        lambda t: t.add_(1),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]
)
def test_no_way_of_writing_to_a_tensor_escapes(write, dtype):
    model = nn.Linear(6, 3)
    model.register_buffer("seen", torch.ones(4, dtype=dtype))
    if dtype is torch.bfloat16 and write.__code__.co_names[-1:] == ("__setitem__",):
        pytest.skip("NumPy has no bfloat16")
    with pytest.raises(ModelChanged, match="must not be saved"), unchanged(model, "it was looked at"), torch.no_grad():
        write(model.seen)
    with unchanged(model, "it was looked at"):
        model(torch.zeros(1, 6))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of kinds that it will drop
def test_tensors_of_every_kind_can_be_compared():
    odd = {
        "conj": torch.ones(3, dtype=torch.complex64).conj(),
        "negative": torch.ones(3, dtype=torch.complex64).conj().imag,
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "sparse": torch.eye(3).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.ones(3, device="meta"),
        "empty": torch.zeros(0, 4),
        "alone": torch.zeros(()),
        "expanded": torch.zeros(1).expand(5),
        "turned": torch.arange(6.0).view(2, 3).T,
        "half": torch.ones(3, dtype=torch.float16),
        "large": torch.ones(100_001),
    }
    once, again = contents_of(odd.values()), contents_of(odd.values())
    assert once == again and len(once) == len(odd)
    assert contents_of([torch.arange(7.0)]) != contents_of([torch.arange(7.0).flip(0)]), "order counts"
    assert contents_of([torch.ones(100_001)]) != contents_of(
        [torch.ones(100_001).index_fill_(0, torch.tensor([5]), 2.0)]
    )


def test_a_change_is_found_where_something_else_failed_too():
    model = nn.Linear(6, 3)
    with pytest.raises(ModelChanged), unchanged(model, "it was looked at"), torch.no_grad():
        model.weight.data.add_(1)
        raise ValueError("something else")
