from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tptopk.experiments import bench, growth
from tptopk.models import networks
from tptopk.privacy.refusal import Refusal
from tptopk.report.plots import bench_figure, growth_figure


def test_every_way_is_measured_beside_ordinary_training(monkeypatch):
    monkeypatch.setitem(bench.SUBJECTS, "mlp", replace(bench.SUBJECTS["mlp"], batch={"cpu": 8}))
    rows = bench.measure("mlp", "cpu", rounds=1, peers=True)
    assert [row.way for row in rows] == [
        "ordinary", "ours, dense", "ours, dense, in two halves", "ours, ρ = 0.4", "ours, ρ = 0.1", "ours, ρ = 0.01",
        "ours, ρ = 0.1, rows × columns", "vmap", "Opacus hooks", "Opacus ghost",
    ]  # fmt: skip
    assert rows[0].ratio == rows[0].peak_ratio == 1.0 and all(
        row.milliseconds > 0 and row.peak_bytes > 0 for row in rows
    )
    json.dumps(bench.as_rows(rows))


@pytest.mark.slow
def test_growth_is_measured_over_two_decades_with_its_exponents(monkeypatch, tmp_path):
    few = [(size, held, dict(list(values.items())[:3])) for size, held, values in growth._subjects(False)]
    assert all(max(values) >= 100 * min(values) for _, _, values in growth._subjects(False))
    assert all(max(values) >= 100 * min(values) for _, _, values in growth._subjects(True))
    monkeypatch.setattr(growth, "_subjects", lambda large: few)
    curves = growth.curves("cpu", rounds=1)
    assert [c.size for c in curves] == ["batch size B", "coordinates d", "active coordinates k", "positions T"]
    assert curves[0].memory_exponents[0] > 0.3
    rows = growth.as_rows(curves)
    growth_figure(rows, tmp_path / "growth.png", "growth")
    bench_figure(bench.as_rows(bench.measure("mlp", "cpu", rounds=1, peers=False)), tmp_path / "bench.png", "bench")
    assert (tmp_path / "growth.png").stat().st_size > 10_000 and (tmp_path / "bench.png").stat().st_size > 10_000


def test_an_exponent_is_the_slope_of_the_logarithms():
    values = dict.fromkeys((1, 10, 100, 1000))
    assert growth._exponents(values, [3.0 * v**1.5 for v in values]) == (1.5, 1.5)


@pytest.mark.parametrize(("model", "ways"), [
    ("mlp", {"closed form", "written out"}), ("vit", {"ghost", "written out", "closed form", "touched rows"}),
    ("text", {"touched rows", "closed form", "written out"}), ("wrn", {"ghost", "written out", "closed form"}),
])  # fmt: skip
def test_the_engine_explains_its_choices(model, ways):
    rows = bench.explain(model, "cpu")
    assert {row["dense"] for row in rows} <= ways and len({row["parameter"] for row in rows}) == len(rows)
    assert all(row["sparse"] != "ghost" for row in rows), "an elementwise mask breaks the ghost identity"


@pytest.mark.parametrize(("build", "size"), [
    (networks.mlp, 1_707_274), (networks.cnn, 550_570), (networks.wrn_16_4, 2_748_890), (networks.vit, None), (networks.text, 3_204_810), (networks.scatter_cnn, 187_210),
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
