from __future__ import annotations

import json

import pytest

from tptopk.experiments import bench
from tptopk.models import networks
from tptopk.privacy.refusal import Refusal


def test_every_way_is_measured_beside_ordinary_training():
    rows = bench.measure("mlp", "cpu", rounds=1, peers=False)
    assert [row.way for row in rows] == ["ordinary", "ours, dense", "ours, ρ = 0.4", "ours, ρ = 0.1", "ours, ρ = 0.01"]
    assert rows[0].ratio == 1.0 and all(row.milliseconds > 0 and row.peak_bytes is None for row in rows)
    json.dumps(bench.as_rows(rows))


@pytest.mark.parametrize(("model", "ways"), [
    ("mlp", {"closed form", "written out"}), ("vit", {"ghost", "written out", "closed form", "touched rows"}),
    ("text", {"touched rows", "closed form", "written out"}), ("wrn", {"ghost", "written out", "closed form"}),
])  # fmt: skip
def test_the_engine_explains_its_choices(model, ways):
    rows = bench.explain(model, "cpu")
    assert {row["dense"] for row in rows} <= ways and len({row["parameter"] for row in rows}) == len(rows)
    assert all(row["sparse"] != "ghost" for row in rows), "an elementwise mask breaks the ghost identity"


@pytest.mark.parametrize(("build", "size"), [
    (networks.mlp, 1_707_274), (networks.cnn, 550_570), (networks.wrn_16_4, 2_748_890), (networks.vit, None), (networks.text, 3_204_810),
])  # fmt: skip
def test_the_networks_have_the_sizes_they_are_known_by(build, size):
    found = sum(p.numel() for p in build().parameters())
    assert found == size if size else 14_000_000 < found < 14_500_000


def test_bad_requests_are_refused():
    with pytest.raises(Refusal, match="did you mean 'wrn'"):
        bench.measure("wrm", "cpu", 1, False)
    if not bench.torch.cuda.is_available():
        with pytest.raises(Refusal, match="no CUDA device"):
            bench.measure("mlp", "cuda", 1, False)
