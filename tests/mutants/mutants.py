"""Deliberately broken mechanisms. Each patches the shipped code in place and names the tests that must fail for it.

`python -m pytest -p tests.mutants.plugin --mutant NAME TEST…` runs any tests on a mutant; `python -m tests.mutants` runs
every mutant against its own tests.

The privacy mistakes that real libraries made, and what guards against each here (file stems of `tests/`, then tests):

=============================================  ======================================================================
mistake                                        guard
=============================================  ======================================================================
clip and noise disagree about C                test_mechanism: one_record_moves_the_release…, noise_has_the_plans…
divisor from the private dataset size          test_plan: the_divisor_is_the_public…; test_fit_refusals: bad_input_is_refused…
                                               ("declares a dataset of"), a_dataset_whose_length_changes…
divisor from the realised batch                test_mechanism: the_divisor_does_not_know_the_batch
noise for a sum added to a mean                test_mechanism: noise_has_the_plans…, the_weights_of_a_fitted_model…
shuffling accounted as Poisson                 test_sampling: the_sampler_is_poisson, what_fit_reads_is_poisson
empty batches skipped                          test_mechanism: an_empty_batch…; test_fit: rates_so_small…
duplicate noise seeds                          test_randomness: no_two_places…; test_mechanism: no_two_steps…
√world-size under-noising                      test_distributed: noise_is_drawn_once_and_has_its_variance
leftovers of gradient accumulation             test_updates: leftover_gradients…; test_mechanism: a_step_that_fails_half_way…,
                                               micro_batches_of_any_size…, out_of_memory…
add/remove against replace-one                 test_plan: a_plan_refuses_values_out_of_range ("replace-one");
                                               test_ledger: a_charge_is_on_disk… (adjacency)
one non-finite gradient poisons the sum        test_clipping: a_bad_record_contributes_zero; test_fit: a_bad_record…
half-precision norms underflow                 test_clipping: the_smallest_clip_norm_still_clips…, every_way_to_a_matrix…;
                                               test_probe: what_cannot_be_private… (float32 alone)
float32 loses a record's cancelling terms       test_cancelling
calibration overshoots its target              test_accounting: calibration_never_overspends…
optimistic accountant                          test_accounting: golden_numbers…, a_second_implementation_agrees
reading ε changes it                           test_accounting: …reading_changes_nothing; test_ledger: a_full_ledger…
state lost on resume                           test_ledger: resuming_keeps_what_was_lost…; test_resume
DP silently skipped                            test_mechanism: the_weights_of_a_fitted_model…; test_fit: the_non_private…
tied weights                                   test_rules: capture_equals_the_reference[tied…]; test_support: a_tied_…
a parameter silently dropped                   test_probe: a_parameter_that_the_loss_does_not_use…; test_rules
=============================================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import tptopk.gradients.clipping as clipping
import tptopk.gradients.products as products
import tptopk.gradients.traces as traces
import tptopk.training.mechanism as mechanism
from tptopk.gradients.clipping import Clip, ClippedSum, split
from tptopk.gradients.examples import batch_length
from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.randomness import Streams
from tptopk.supports.scores import CoordinateScores
from tptopk.supports.support import Support
from tptopk.training.mechanism import Mechanism
from tptopk.training.run import RunFolder, save_weights
from tptopk.training.sampling import PoissonSampler
from tptopk.training.updates import Updater

LEDGER = "tests/privacy/test_ledger.py::test_"
POLICIES = "tests/supports/test_policies.py::test_"
MECHANISM = "tests/training/test_mechanism.py::test_"
SAMPLING = "tests/training/test_sampling.py::test_"
UPDATES = "tests/training/test_updates.py::test_"
DISTRIBUTED = "tests/training/test_distributed.py::test_"
CLIPPING = "tests/gradients/test_clipping.py::test_"
RULES = "tests/gradients/test_rules.py::test_"
VARIANCE = f"{MECHANISM}noise_has_the_plans_variance_on_the_support_and_none_elsewhere"
SENSITIVITY = f"{MECHANISM}one_record_moves_the_release_by_at_most_the_clip_norm_over_the_divisor"


@dataclass(frozen=True)
class Mutant:
    apply: Callable[[], None]
    caught_by: tuple[str, ...]  # tests outside this folder, each of which must fail


MUTANTS: dict[str, Mutant] = {}


def mutant(*caught_by: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(apply: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[apply.__name__.replace("_", "-")] = Mutant(apply, caught_by)
        return apply

    return register


# ---- noise


def change_noise(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    drawn = Streams.normal
    Streams.normal = lambda self, *args: change(drawn(self, *args))


@mutant(f"{VARIANCE}[capture-False-0]", f"{MECHANISM}the_weights_of_a_fitted_model_carry_the_plans_noise")
def no_noise() -> None:
    change_noise(torch.zero_)


@mutant(f"{MECHANISM}every_active_coordinate_has_noise_of_its_own[0]")
def noise_missing_on_one_active_coordinate() -> None:
    change_noise(lambda noise: noise.index_fill_(0, torch.tensor([len(noise) // 2]), 0.0))


@mutant(
    f"{VARIANCE}[capture-False-0]",
    f"{VARIANCE}[vmap-True-1]",
    f"{MECHANISM}the_weights_of_a_fitted_model_carry_the_plans_noise",
)
def noise_scaled_by_four_fifths() -> None:
    change_noise(lambda noise: noise.mul_(0.8))


@mutant(f"{DISTRIBUTED}noise_is_drawn_once_and_has_its_variance")
def noise_averaged_over_the_processes() -> None:
    change_noise(lambda noise: noise.div_(dist.get_world_size() ** 0.5 if dist.is_initialized() else 1.0))


@mutant(f"{MECHANISM}every_active_coordinate_has_noise_of_its_own[0]")
def one_noise_number_for_all_coordinates() -> None:
    change_noise(lambda noise: noise[:1].repeat(len(noise)))


@mutant(
    f"{MECHANISM}the_noise_does_not_know_the_data[nothing-False-0]",
    f"{MECHANISM}every_active_coordinate_has_noise_of_its_own[3]",
)
def noise_only_where_the_gradient_is_not_zero() -> None:
    release = Mechanism._release

    def sparing(self, total, *args):
        touched = split(total.flat != 0, total.shapes)
        private = release(self, total, *args)
        return replace(private, values={n: v * touched[n] for n, v in private.values.items()})

    Mechanism._release = sparing


@mutant(f"{MECHANISM}the_noise_does_not_know_the_data[many-True-1]", f"{VARIANCE}[capture-False-0]")
def noise_calibrated_to_the_norm_of_the_sum() -> None:
    ClippedSum.sensitivity = lambda self: float(self.flat.norm())


@mutant(f"{MECHANISM}no_two_steps_phases_or_parameters_share_noise")
def noise_reused_across_steps() -> None:
    drawn = Streams.normal
    Streams.normal = lambda self, shape, device, purpose, phase, step: drawn(self, shape, device, purpose, phase, 0)


@mutant(f"{VARIANCE}[capture-True-1]", f"{MECHANISM}the_weights_of_a_fitted_model_carry_the_plans_noise")
def clip_norm_of_the_other_phase_in_the_noise() -> None:
    release = Mechanism._release

    def confused(self, total, support, phase, step):
        other = self._plan.phases[phase - 1].clip_norm
        return release(self, replace(total, clip_norm=other), support, phase, step)

    Mechanism._release = confused


# ---- clipping


def change_sum(change: Callable[..., ClippedSum]) -> None:
    """`change(clipped_sum, model, loss, batch, support, clip_norm, **options)` in the mechanism alone."""
    honest = mechanism.clipped_sum
    mechanism.clipped_sum = lambda *args, **options: change(honest, *args, **options)


@mutant(f"{SENSITIVITY}[capture-False-0]", f"{SENSITIVITY}[vmap-True-1]")
def contributions_clipped_at_twice_the_norm() -> None:
    def lax(honest, model, loss, batch, support, clip_norm, **options):
        return replace(honest(model, loss, batch, support, 2 * clip_norm, **options), clip_norm=clip_norm)

    change_sum(lax)


@mutant(
    f"{SENSITIVITY}[capture-False-0]",
    f"{RULES}one_example_moves_the_sum_by_at_most_the_clip_norm[1.0-capture-linear]",
)
def no_clip() -> None:
    clipping.clip_factors = lambda norms, roundings, clip_norm, slack: torch.isfinite(norms).to(norms.dtype)


@mutant(
    "tests/gradients/test_cancelling.py::test_rows_of_one_unit_that_cancel_do_not_either[None-1000000000000.0]",
    "tests/gradients/test_cancelling.py::test_positions_that_cancel_move_the_sum_by_no_more_than_the_clip[flat-0-1.0-1000000000000.0-conv2d]",
)
def sums_made_anew_taken_for_exact() -> None:
    products.Products._cancelling = lambda self, squares, most: torch.zeros_like(squares)


@mutant(
    f"{RULES}rows_of_an_example_are_averaged_before_they_are_clipped[0-1.0-conv2d]",
    "tests/gradients/test_cancelling.py::test_records_that_do_not_cancel_are_clipped_as_ever",
)
def ordinary_records_clipped_as_if_they_cancelled() -> None:
    products.Products._cancelling = lambda self, squares, most: torch.full_like(squares, 1e6)


@mutant(f"{SENSITIVITY}[capture-False-0]")
def each_parameter_clipped_on_its_own() -> None:
    def apart(honest, model, loss, batch, support, clip_norm, **options):
        alone = [Support({n: m & (n == name) for n, m in support.masks.items()}) for name in support.masks]
        sums = [honest(model, loss, batch, one, clip_norm, **options) for one in alone]
        return sum(sums[1:], sums[0])

    change_sum(apart)


@mutant(f"{SENSITIVITY}[capture-False-0]", f"{MECHANISM}the_noise_does_not_know_the_data[nothing-False-0]")
def biases_left_out_of_the_norm() -> None:
    clipping.squared_norms_of = lambda values: torch.zeros(len(values), dtype=torch.float64)


@mutant(f"{CLIPPING}a_bad_record_contributes_zero[linear-1.0-nan-capture]")
def a_bad_record_poisons_the_sum() -> None:
    weigh = Clip.weights

    def trusting(self, *args):
        weights, finite = weigh(self, *args)
        return weights, torch.ones_like(finite)

    Clip.weights = trusting


# ---- sampling, divisor and charge


@mutant(f"{SAMPLING}the_sampler_is_poisson", f"{SAMPLING}what_fit_reads_is_poisson")
def shuffled_sampling() -> None:
    def sample(self, phase, step, sample_rate):
        size = round(sample_rate * self._size)
        epoch, place = divmod(step, self._size // size)
        order = self._streams.numpy("sample", phase, epoch).permutation(self._size)
        return torch.from_numpy(np.sort(order[place * size : (place + 1) * size]))

    PoissonSampler.sample = sample


@mutant(f"{MECHANISM}the_divisor_does_not_know_the_batch", f"{SENSITIVITY}[capture-False-0]")
def divisor_from_the_realised_batch() -> None:
    inner = Mechanism.private_gradient

    def private_gradient(self, batches, support, phase, step):
        batches = list(batches)
        drawn = max(1, sum(batch_length(batch) for batch in batches))
        private = inner(self, batches, support, phase, step)
        factor = self._plan.expected_batch_size(self._plan.phases[phase]) / drawn
        return replace(private, values={n: v * factor for n, v in private.values.items()})

    Mechanism.private_gradient = private_gradient


def skip_empty_batches(*, charged: bool) -> None:
    inner = Mechanism.private_gradient

    def private_gradient(self, batches, support, phase, step):
        batches = list(batches)
        if batches:
            return inner(self, batches, support, phase, step)
        if charged:
            self._ledger.charge(phase, step, support.size)
        nothing = {n: torch.zeros(m.shape) for n, m in support.masks.items()}
        return PrivateGradient(nothing, self._plan.noise_std(self._plan.phases[phase]), phase, step)

    Mechanism.private_gradient = private_gradient


@mutant(f"{MECHANISM}an_empty_batch_is_a_full_charged_noisy_step")
def empty_batch_not_charged() -> None:
    skip_empty_batches(charged=False)


@mutant(
    f"{MECHANISM}an_empty_batch_is_a_full_charged_noisy_step",
    f"{MECHANISM}every_active_coordinate_has_noise_of_its_own[0]",
)
def empty_batch_without_noise() -> None:
    skip_empty_batches(charged=True)


@mutant(f"{MECHANISM}the_charge_comes_before_the_noise")
def charge_after_the_noise() -> None:
    inner = Mechanism.private_gradient

    class Later:
        def charge(self, *args):
            self.owed = args

    def private_gradient(self, *args):
        ledger, self._ledger = self._ledger, Later()
        try:
            private = inner(self, *args)
            ledger.charge(*self._ledger.owed)
        finally:
            self._ledger = ledger
        return private

    Mechanism.private_gradient = private_gradient


# ---- supports and updates


@mutant(
    f"{POLICIES}a_support_is_a_function_of_what_was_released[paper]",
    f"{POLICIES}under_noise_that_drowns_the_data_a_support_finds_nothing",
)
def mask_chosen_from_gradients_without_noise() -> None:
    release, add = Mechanism._release, CoordinateScores.add

    def leaking(self, total, *args):
        clean = {n: v.clone() for n, v in total.values.items()}
        private = release(self, total, *args)
        object.__setattr__(private, "clean", clean)
        return private

    def peeking(self, gradient, support):
        clean = getattr(gradient, "clean", None)
        add(self, gradient if clean is None else replace(gradient, values=clean), support)

    Mechanism._release, CoordinateScores.add = leaking, peeking


@mutant(
    *(
        f"{UPDATES}inactive_coordinates_never_move[{name}]"
        for name in ("momentum", "decay", "adam", "adamw", "rmsprop", "adagrad", "muon")
    )
)
def optimizer_state_moves_inactive_coordinates() -> None:
    @torch.no_grad()
    def apply(self, gradient, support):
        for name, p in self._parameters.items():
            p.grad = gradient[name]
        self._optimizer.step()

    Updater.apply = apply


@mutant(
    *(
        f"{UPDATES}optimizer_state_is_projected_when_the_support_changes[{name}]"
        for name in ("momentum", "decay", "adam", "adamw", "muon")
    )
)
def optimizer_state_kept_across_supports() -> None:
    Updater._project_state = lambda self, support: None


# ---- resume


@mutant(f"{LEDGER}resuming_keeps_what_was_lost_and_drops_what_it_makes_unaffordable")
def charge_forgotten_on_resume() -> None:
    resume = Ledger.resume.__func__

    def forgetful(cls, *args, **options):
        ledger = resume(cls, *args, **options)
        ledger.lost.clear()
        return ledger

    Ledger.resume = classmethod(forgetful)


# ---- what a model keeps

FOLDERS = "tests/training/test_run_folders.py::test_a_model_that_was_changed_past_the_mechanism_is_not_saved"


@mutant(f"{FOLDERS}[data]")
def what_tensors_hold_is_not_compared() -> None:
    traces.versions_of = lambda model: [(n, id(t), t._version) for n, t in traces.lasting_tensors(model).items()]


@mutant(f"{FOLDERS}[data]", f"{FOLDERS}[copy_]")
def a_changed_model_is_saved() -> None:
    RunFolder.abandon = lambda self, ledger: save_weights(kept[self], self.path / "model.safetensors", {})
    kept: dict[RunFolder, nn.Module] = {}
    honest = RunFolder.__init__

    def remember(self: RunFolder, path: str, model: nn.Module, *args: object, **options: object) -> None:
        kept[self] = model
        honest(self, path, model, *args, **options)

    RunFolder.__init__ = remember
