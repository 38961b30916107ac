"""Configuration files: read rightly, or refused with a clear word."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tptopk.privacy.refusal import Refusal
from tptopk.settings import Settings, build, read_config

GOOD = 'method = "tp-topk"\nepsilon = 3.0\nactive-ratio = 0.2\nsteps = 40\nema = 0.9\nsecure-noise = false\nmodel = "m:build"\n'


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_spoilt_configuration_file_is_refused_or_read_as_it_stands(tmp_path, data):
    content = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 12))] = data.draw(
            st.one_of(
                st.binary(max_size=6),
                st.sampled_from([b"[x]\n", b'"', b"= ", b"nan", b"1e999", b"true", b"\n\n", b"inf"]),
            )
        )
    path = tmp_path / "run.toml"
    path.write_bytes(bytes(content))
    try:
        found = Settings(**read_config(str(path)))
    except Refusal as refusal:
        assert str(path) in str(refusal)
        return
    assert isinstance(found.epsilon, float) and isinstance(found.method, str) and found.steps in (None, found.steps)


def test_a_good_one_is_read(tmp_path):
    (tmp_path / "run.toml").write_text(GOOD)
    found = Settings(**read_config(str(tmp_path / "run.toml")))
    assert (found.method, found.epsilon, found.active_ratio, found.steps, found.secure_noise) == (
        "tp-topk",
        3.0,
        0.2,
        40,
        False,
    )


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("tptopk.models.networks.py:mlp", "write it without .py: tptopk.models.networks:mlp"),
        ("nets/mine.py:build", "write it without .py: nets.mine:build"),
        ("tptopk.models.networks:table_lienar(5, 2)", "has no function 'table_lienar'; did you mean 'table_linear'"),
        ("tptopk.models.networks:table_linear", "needs no arguments"),
        ("tptopk.models.networks:table_linear(5)", "takes 5 as its arguments"),
        ("tptopk.models.networks:table_linear(x)", "package.module:factory"),
        ("tptopk.models.networks:", "package.module:factory"),
    ],
)
def test_a_network_that_cannot_be_named_so_says_how(reference, message):
    with pytest.raises(Refusal, match=re.escape(message)):
        build(reference)


def test_every_kind_of_data_has_its_network_or_asks_for_one(tmp_path):
    (tmp_path / "t.toml").write_text('target = "ill"\nclasses = ["a", "b", "c"]\n[numeric]\nage = [0, 120]\n')
    assert Settings().network() == "tptopk.models.digits:digits_cnn"
    table = Settings(data=str(tmp_path / "t.csv"))
    assert table.network() == "tptopk.models.networks:table_linear(2, 3)"
    assert table.build_model()(torch.ones(4, 2)).shape == (4, 3)
    assert Settings(data="t.csv", model="m:build").network() == "m:build"
    for data in ("mnist", "mine.npz", "pets"):
        with pytest.raises(Refusal, match=f"give --model FILE:FUNCTION for {data}"):
            Settings(data=data).network()
