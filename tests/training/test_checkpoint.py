"""Checkpoints: whole or refused, and the one before is kept."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tptopk.privacy.refusal import Refusal
from tptopk.training.checkpoint import load_checkpoint, save_checkpoint


def test_an_older_checkpoint_serves_when_the_newest_is_spoilt(tmp_path):
    for number in (1, 2, 3):
        save_checkpoint(tmp_path, {"model": {"w": torch.full((2,), float(number))}}, {"number": number})
    assert {p.name for p in tmp_path.iterdir()} == {
        "checkpoint.json",
        "checkpoint-2.safetensors",
        "checkpoint-3.safetensors",
    }
    assert load_checkpoint(tmp_path).values["number"] == 3
    (tmp_path / "checkpoint-3.safetensors").write_bytes(b"\x80\x04\x95pickle me")
    assert load_checkpoint(tmp_path).part("model")["w"].tolist() == [2.0, 2.0]
    (tmp_path / "checkpoint-2.safetensors").unlink()
    with pytest.raises(Refusal, match="no checkpoint"):
        load_checkpoint(tmp_path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_spoilt_checkpoint_is_refused_or_whole(tmp_path, data):
    save_checkpoint(tmp_path, {"model": {"w": torch.ones(3)}}, {"number": 1})
    name = data.draw(st.sampled_from(["checkpoint.json", load_name(tmp_path)]))
    content = bytearray((tmp_path / name).read_bytes())
    start = data.draw(st.integers(0, len(content)))
    content[start : start + data.draw(st.integers(0, 50))] = data.draw(st.binary(max_size=20))
    (tmp_path / name).write_bytes(bytes(content))
    try:
        found = load_checkpoint(tmp_path)
        assert found is None or found.part("model")["w"].tolist() == [1.0, 1.0, 1.0]
    except Refusal:
        return
    finally:
        for path in tmp_path.iterdir():
            path.unlink()


def load_name(folder):
    return json.loads((folder / "checkpoint.json").read_text())["current"]["file"]
