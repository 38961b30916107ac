"""The same promises on a GPU. Skipped where there is none; CI machines have none."""

from __future__ import annotations

import math
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tptopk
from tests.gradients.cases import CASES, make
from tests.gradients.test_cancelling import SIZES, made, moved
from tests.gradients.test_rules import flat, random_support
from tptopk.data.digits import TRAINING, digits
from tptopk.experiments import bench
from tptopk.gradients import products
from tptopk.gradients.clipping import clipped_sum
from tptopk.gradients.examples import MeanOverRows
from tptopk.gradients.graphs import FixedShapes
from tptopk.gradients.memory import memory_bound, peak_bytes
from tptopk.gradients.precision import slack
from tptopk.models import networks
from tptopk.models.digits import digits_cnn
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.methods import METHODS
from tptopk.privacy.plan import Phase
from tptopk.privacy.randomness import Streams
from tptopk.supports.support import Support
from tptopk.training.distributed import Team
from tptopk.training.mechanism import Mechanism
from tptopk.training.verify import verify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
CUDA = torch.device("cuda")


EXACT = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 2e-2}


@pytest.fixture(autouse=True)
def _known_settings():
    """The reference is computed in full float32, whatever torch's defaults are."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture
def nothing_is_clipped_for_rounding(monkeypatch):
    """Few active coordinates can leave a total far below its terms, and then more is clipped."""
    monkeypatch.setattr(products.Products, "_cancelling", lambda self, squares, most: torch.zeros_like(squares))


@pytest.mark.usefixtures("nothing_is_clipped_for_rounding")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("density", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("limit", [None, 0])
def test_capture_equals_the_reference(name, density, limit):
    model, (x, y) = make(name, 1, 7)
    support = random_support(model, density)
    slow = flat(clipped_sum(model, F.cross_entropy, (x, y), support, 0.1, engine="reference"))
    model, support = model.to(CUDA), support.to(CUDA)
    fast = flat(clipped_sum(model, F.cross_entropy, (x.to(CUDA), y.to(CUDA)), support, 0.1, memory_limit=limit)).cpu()
    assert (fast - slow).norm() <= 1e-5 * slow.norm() + 1e-7


BIG = {
    "cnn": (networks.cnn, (3, 32, 32)),
    "wrn": (networks.wrn_16_4, (3, 32, 32)),
    "vit": (networks.vit, (3, 32, 32)),
    "scatter": (networks.scatter_cnn, (243, 8, 8)),
    "mlp": (networks.mlp, (3, 32, 32)),
}


@pytest.mark.usefixtures("nothing_is_clipped_for_rounding")
@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize("density", [0.1, 1.0])
@pytest.mark.parametrize("precision", EXACT)
@pytest.mark.parametrize("limit", [None, 0])
def test_real_networks_are_exact_to_their_precision(name, density, precision, limit):
    """Against one example at a time in the same precision, or by as much as the precision alone moves that."""
    build, shape = BIG[name]
    torch.manual_seed(0)
    model, x, y = build().to(CUDA), torch.rand(12, *shape, device=CUDA), torch.arange(12, device=CUDA) % 10
    support = Support.full(model) if density == 1.0 else bench.random_support(model, density)
    exact, slow = (
        flat(clipped_sum(model, F.cross_entropy, (x, y), support, 0.1, engine="reference", precision=p))
        for p in ("fp32", precision)
    )
    found = clipped_sum(model, F.cross_entropy, (x, y), support, 0.1, precision=precision, memory_limit=limit)
    gap = (flat(found) * (1 + slack(precision, CUDA)) - slow).norm()
    assert gap <= max(EXACT[precision] * slow.norm(), (slow - exact).norm())


@pytest.mark.parametrize("precision", EXACT)
@pytest.mark.parametrize("density", [0.1, 1.0])
@pytest.mark.parametrize("limit", [None, 0])
def test_one_example_moves_the_sum_by_at_most_the_clip_norm(precision, density, limit):
    """Also one whose positions cancel: rounding after the norm was taken would then be many times the norm."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 256, bias=False).to(CUDA)
    support = Support.full(layer) if density == 1.0 else bench.random_support(layer, density)
    x = torch.randn(1, 32, 64, device=CUDA)
    x = torch.cat([x, -x * (1 + 1e-3)], dim=1)  # [1, 64, 64]: pairs of positions that nearly cancel
    c = torch.randn(1, 32, 256, device=CUDA)
    c = torch.cat([c, c], dim=1)

    def loss(model, batch):
        return 1e3 * (model(batch[0]) * batch[1]).flatten(1).sum(1)

    others = torch.randn(40, 64, 64, device=CUDA), torch.randn(40, 64, 256, device=CUDA)
    sums = [
        flat(clipped_sum(layer, loss, batch, support, 0.1, precision=precision, memory_limit=limit)).double()
        for batch in (others, (torch.cat([others[0], x]), torch.cat([others[1], c])))
    ]
    alone = flat(clipped_sum(layer, loss, (x, c), support, 0.1, precision=precision, memory_limit=limit)).double()
    assert alone.norm() <= 0.1 * (1 + 1e-5)
    assert (sums[1] - sums[0]).norm() <= 0.1 * (1 + 1e-3)  # float32 sums of forty others round too


@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("precision", EXACT)
@pytest.mark.parametrize("density", [0.3, 1.0])
@pytest.mark.parametrize("limit", [None, 0])
def test_positions_that_cancel_move_the_sum_by_no_more_than_the_clip(name, size, precision, density, limit):
    model, (x, y) = made(name, size)
    support = random_support(model, density).to(CUDA)
    gone = moved(
        model.to(CUDA), F.cross_entropy, (x.to(CUDA), y.to(CUDA)), support, precision=precision, memory_limit=limit
    )
    assert gone <= 1 + 1e-3


@pytest.mark.parametrize(("compiled", "precision"), [(False, "fp32"), (True, "fp32"), (False, "bf16"), (True, "bf16")])
@pytest.mark.parametrize("density", [0.1, 1.0])
@pytest.mark.parametrize("name", ["cnn", "text"])
def test_replayed_sums_are_the_ordinary_ones_at_any_batch_size(name, density, compiled, precision):
    torch.manual_seed(0)
    model = (networks.cnn if name == "cnn" else networks.text)().to(CUDA)
    inputs = torch.rand(150, 3, 32, 32) if name == "cnn" else torch.randint(0, 50_000, (150, 16))
    x, y = inputs.to(CUDA), torch.randint(0, 10, (150,), device=CUDA)
    support = Support.full(model) if density == 1.0 else bench.random_support(model, density)
    fixed = FixedShapes(model, F.cross_entropy, compiled=compiled, precision=precision)
    near = (5e-4 if compiled else 1e-4) if precision == "fp32" else 4e-2  # compiled, numbers are rounded elsewhere
    assert fixed.clipped_sum((x[:100], y[:100]), support, 0.1) is None, "the first goes the ordinary way"
    for n in (100, 97) if compiled else (100, 97, 150, 3, 1, 100):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)  # a recording reads the weights as they are now
        found = fixed.clipped_sum((x[-n:], y[-n:]), support, 0.1)
        slow = flat(clipped_sum(model, F.cross_entropy, (x[-n:], y[-n:]), support, 0.1, precision=precision))
        assert found is not None and (flat(found) - slow).norm() <= near * slow.norm()
    bad = x.clone().float() if name == "cnn" else None
    if bad is not None:
        bad[-1] = float("nan")
        assert fixed.clipped_sum((bad[:100], y[:100]), support, 0.1) is not None
        found = fixed.clipped_sum((bad[-100:], y[-100:]), support, 0.1)  # by the recording too, without the bad example
        slow = flat(clipped_sum(model, F.cross_entropy, (bad[-100:], y[-100:]), support, 0.1, precision=precision))
        assert found is not None and (flat(found) - slow).norm() <= near * slow.norm()


@pytest.mark.parametrize("density", [0.1, 1.0])
@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_rows_of_an_example_are_averaged_before_they_are_clipped(density, limit, precision):
    torch.manual_seed(0)
    model = networks.scatter_cnn().to(CUDA)
    support = Support.full(model) if density == 1.0 else bench.random_support(model, density)
    rows = torch.randn(6, 2, 243, 8, 8, device=CUDA), torch.randint(0, 10, (6, 2), device=CUDA)
    batch = rows, torch.rand(6, 2, device=CUDA)
    loss = MeanOverRows(F.cross_entropy)
    slow = flat(clipped_sum(model, loss, batch, support, 0.1, engine="reference", precision=precision))
    fast = flat(clipped_sum(model, loss, batch, support, 0.1, precision=precision, memory_limit=limit))
    near = 1e-5 if precision == "fp32" else 5e-3
    assert (fast - slow).norm() <= near * slow.norm()
    fixed = FixedShapes(model, loss, precision=precision, memory_limit=limit)
    assert fixed.clipped_sum(batch, support, 0.1) is None
    for _ in range(2):
        replayed = fixed.clipped_sum(batch, support, 0.1)
        assert replayed is not None and (flat(replayed) - slow).norm() <= near * slow.norm()


@pytest.mark.usefixtures("nothing_is_clipped_for_rounding")
@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_one_recording_serves_supports_that_keep_changing(limit, precision, compiled):
    torch.manual_seed(0)
    model = networks.scatter_cnn_small().to(CUDA)
    x, y = torch.randn(100, 81, 7, 7, device=CUDA), torch.randint(0, 10, (100,), device=CUDA)
    fixed = FixedShapes(model, F.cross_entropy, precision=precision, memory_limit=limit, compiled=compiled)
    near = {"fp32": 5e-4 if compiled else 1e-4, "tf32": 5e-3, "bf16": 4e-2}[precision]
    for turn in range(6):
        support = bench.random_support(model, (0.4, 0.4, 0.1, 0.4, 0.9, 0.01)[turn])
        found = fixed.clipped_sum((x, y), support, 0.1)
        assert (found is None) == (turn < 2)
        if found is not None:
            slow = flat(clipped_sum(model, F.cross_entropy, (x, y), support, 0.1, precision=precision))
            assert (flat(found) - slow).norm() <= near * slow.norm() and len(fixed._recorded) == 1


def test_no_two_steps_share_noise_with_graphs_on():
    """Records without a gradient: what is released is noise alone, and it is new at every step of a replayed graph."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(CUDA)
    plan = tptopk.Plan(
        phases=(Phase(steps=30, sample_rate=0.5, noise_multiplier=1.0, clip_norm=1.0),), delta=1e-5, dataset_size=64
    )
    mechanism = Mechanism(
        model, lambda m, b: 0.0 * m(b).sum(1), plan, Ledger(plan), Streams("r"), replay=True, patience=1
    )
    support, x = Support.full(model), torch.randn(32, 16, device=CUDA)
    steps = [flat_values(mechanism.private_gradient([x], support, 0, n)) for n in range(30)]
    correlation = torch.corrcoef(torch.stack(steps)).fill_diagonal_(0)
    assert correlation.abs().max() < 6.5 / math.sqrt(support.size)


def flat_values(gradient):
    return torch.cat([v.flatten() for v in gradient.values.values()])


def test_dropout_is_drawn_anew_in_a_replayed_graph_and_dice_on_the_host_are_not_recorded():
    model = nn.Sequential(nn.Linear(16, 512), nn.Dropout(0.5), nn.Linear(512, 4)).to(CUDA)
    x, y, support = (
        torch.randn(32, 16, device=CUDA),
        torch.zeros(32, dtype=torch.long, device=CUDA),
        Support.full(model),
    )
    fixed = FixedShapes(model, F.cross_entropy)
    sums = [fixed.clipped_sum((x, y), support, 0.1) for _ in range(3)]
    assert sums[0] is None and not torch.equal(flat(sums[1]), flat(sums[2]))

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x):
            return self.layer(x) * (1.0 + random.random())

    model = Sometimes().to(CUDA)
    fixed, support = FixedShapes(model, F.cross_entropy), Support.full(model)
    fixed.clipped_sum((x, y), support, 0.1)
    with pytest.warns(UserWarning, match="random numbers on the host"):
        assert fixed.clipped_sum((x, y), support, 0.1) is None


def test_out_of_memory_takes_the_same_records_again_in_halves():
    torch.manual_seed(0)
    model = networks.cnn().to(CUDA)
    x, y = torch.rand(512, 3, 32, 32, device=CUDA), torch.randint(0, 10, (512,), device=CUDA)
    plan = tptopk.Plan(
        phases=(Phase(steps=3, sample_rate=0.5, noise_multiplier=1e-6, clip_norm=1.0),), delta=1e-5, dataset_size=1024
    )
    results = []
    for more in (None, 500 * 2**20):
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        share = 1.0 if more is None else (torch.cuda.memory_reserved() + more) / total
        torch.cuda.set_per_process_memory_fraction(share)
        try:
            ledger = Ledger(plan)
            mechanism = Mechanism(model, F.cross_entropy, plan, ledger, Streams("r", seed=1), replay=True, patience=1)
            full = Support.full(model)
            steps = [flat_values(mechanism.private_gradient([(x, y)], full, 0, n)).cpu() for n in range(3)]
            results.append((steps, mechanism._most_examples, ledger.segments()))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        del mechanism
    (whole, none, charged), (halved, most, charged_too) = results
    assert none is None and most is not None and most < 512 and charged == charged_too
    for a, b in zip(whole, halved, strict=True):
        assert (a - b).norm() <= 1e-3 * a.norm()


def test_the_stated_memory_bound_holds():
    model = networks.wrn_16_4().to(CUDA)

    def step(n):
        x, y = torch.rand(n, 3, 32, 32, device=CUDA), torch.zeros(n, dtype=torch.long, device=CUDA)
        return clipped_sum(model, F.cross_entropy, (x, y), Support.full(model), 1.0, precision="tf32")

    bound = memory_bound(step, CUDA)
    for n in (16, 64, 256):
        assert peak_bytes(lambda n=n: step(n), CUDA) <= 1.1 * bound.of(n)


def test_noise_on_the_device_is_standard_normal_and_never_repeats():
    """A million draws: mean and variance within 4.9 standard errors, once in a million runs each beyond."""
    streams = Streams("r")
    draws = streams.normal(1_000_000, CUDA, "noise", 0, 0, "w").double()
    assert draws.device.type == "cuda"
    assert abs(draws.mean()) < 4.9e-3 and abs(draws.var() - 1) < 4.9 * math.sqrt(2 / 1_000_000)
    places = [streams.normal(1000, CUDA, "noise", p, s, n) for p in range(2) for s in range(20) for n in ("w", "b")]
    correlation = torch.corrcoef(torch.stack(places)).fill_diagonal_(0)
    assert correlation.abs().max() < 6.5 / math.sqrt(1000)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_every_method_learns(method, precision):
    train_set, test_set = digits()
    plan = tptopk.Plan.calibrate(
        method, epsilon=8.0, delta=1e-5, batch_size=256, dataset_size=TRAINING, epochs=30, accountant="rdp"
    )
    model = digits_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    run = tptopk.fit(
        model, train_set, plan, optimizer, loss=F.cross_entropy, test_set=test_set, device="cuda", precision=precision
    )
    assert run.test["accuracy"] > 0.85 and next(model.parameters()).is_cuda
    if METHODS[method].private:
        assert run.engine == "capture" and run.epsilon <= 8.0


@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_a_run_is_resumed_on_another_device(first, second, tmp_path):
    train_set, _ = digits()
    plan = tptopk.Plan.calibrate(
        "tp-topk", epsilon=3.0, delta=1e-5, batch_size=64, dataset_size=TRAINING, steps=20, accountant="rdp"
    )

    def train(device, stop, **options):
        def end(record):
            if record.step == stop:
                raise KeyboardInterrupt

        model = digits_cnn()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return tptopk.fit(
            model, train_set, plan, optimizer, loss=F.cross_entropy, out=tmp_path / "run", device=device, ema=0.9,
            checkpoint_every=4, on_step=end, **options,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        train(first, 14)
    run = train(second, None, resume=True)
    assert next(run.model.parameters()).device.type == second and run.facts.attempts == 2 and run.epsilon <= 3.0
    assert verify(tmp_path / "run").holds


def train_in_a_group(rank, folder, backend, processes, pretended):
    """A short run of a process group; the weights at its end are in RANK.pt. A team may think it is larger than it is."""
    if backend is not None:
        dist.init_process_group(backend, init_method=f"file://{folder}/{backend}", rank=rank, world_size=processes)
    if pretended:
        honest = Team.__init__

        def pretend(team):
            honest(team)
            team.size = pretended

        Team.__init__ = pretend
    torch.manual_seed(rank)  # other initial weights in every process: the first one's count
    train_set, _ = digits()
    plan = tptopk.Plan.calibrate(
        "tp-topk", epsilon=8.0, delta=1e-5, batch_size=64, dataset_size=TRAINING, steps=12, accountant="rdp"
    )
    model = digits_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tptopk.fit(model, train_set, plan, optimizer, loss=F.cross_entropy, device="cuda", precision="fp32", seed=7)
    torch.save(nn.utils.parameters_to_vector(model.parameters()).cpu(), f"{folder}/{rank}.pt")
    if backend is not None:
        dist.destroy_process_group()


def weights_of_a_group(folder, backend=None, processes=1, pretended=None):
    folder.mkdir()
    torch.multiprocessing.spawn(train_in_a_group, (str(folder), backend, processes, pretended), nprocs=processes)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(processes)]


def test_two_processes_on_one_device_are_one_process(tmp_path):
    (alone,) = weights_of_a_group(tmp_path / "alone")
    one, two = weights_of_a_group(tmp_path / "pair", "gloo", 2)
    assert torch.equal(one, two) and (one - alone).norm() <= 1e-4 * alone.norm()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch was built without NCCL")
def test_nccl_carries_what_gloo_carries(tmp_path):
    """NCCL wants a device for each process: on one device, one process that sends to itself as if it were the first of two."""
    (gloo,) = weights_of_a_group(tmp_path / "gloo", "gloo", 1, 2)
    (nccl,) = weights_of_a_group(tmp_path / "nccl", "nccl", 1, 2)
    assert torch.equal(gloo, nccl)
