"""docs/reproduction.md, written from the results files: every number of ours in it is computed from a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tptopk.experiments import published, recipes
from tptopk.experiments.recipes import PAPER
from tptopk.experiments.results import read_results
from tptopk.gradients.precision import SLACK
from tptopk.privacy.accounting import round_up
from tptopk.privacy.refusal import Refusal
from tptopk.report import paper_ablations as ablations
from tptopk.report import paper_context as others
from tptopk.report import paper_tables as tables
from tptopk.report.figures import energy_figure, pipeline_figure
from tptopk.report.outcomes import Outcomes, read
from tptopk.report.paper_tables import NAMES, NOT_RUN, table
from tptopk.report.paper_tuning import tuned

DRAWN = {"dataset": "cifar10", "method": "tp-topk", "target_epsilon": 3.0, "seed": 0, "variant": PAPER}
TUNING = ("tuning", "tuning_range")
PROCESSES = 2  # at a time on one GPU, for runs that do not say it
FURTHER = (
    "Extra runs, no part of the main table, of the cells in which the paper's TP-TopK is above ours: they were picked by test means, so part of a rise is chance. "
    "TP-TopK and DP-SGD each had five changes tried in turn on held-out training records, each from the best so far (Tuning, below): every view replaced by two, moved one or two pixels along a diagonal, "
    "one each way, so that twice as many are averaged, in training and in testing; half as many epochs again; half and twice the first learning rate. The last two are not the same thing for both: "
    "DP-SGD's one rate had been tuned already, so that some of its trials repeat others, and TP-TopK's first rate, of its warm-up, had not been. TP-Rand has TP-TopK's recipe. "
    "DP-SGD and TP-TopK may differ in all of it, as the rows of recipes say. The choices were made while the trials ran, and committed after the runs on the GPU."
)


def is_drawn(recipe: Mapping[str, Any]) -> bool:
    """Is this the run whose plan the figure of the two phases shows?"""
    return all(recipe.get(key) == value for key, value in DRAWN.items())


def write(folder: Path, path: Path, *, quick: bool = False) -> list[str]:
    """Render the results files of a folder into a document, with its figures beside it; what could not be drawn comes back."""
    found = {name: read(folder, name, quick=quick) for name in recipes.TABLES}
    tuning = {name: read_results(folder / f"{name}.jsonl") for name in TUNING}
    complaints: list[str] = []
    figures: set[str] = set()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, draw in (("energy", _draw_energy), ("pipeline", _draw_pipeline)):
            try:
                if draw(found, path.parent / f"{name}.png"):
                    figures.add(name)
            except Refusal as refusal:
                complaints.append(f"figure-{name} was not drawn: {refusal}")
        path.write_text(document(found, tuning, figures, quick=quick), encoding="utf-8")
    except OSError as error:
        raise Refusal(f"cannot write {path}: {error}") from error
    return complaints


def _draw_energy(found: Mapping[str, Outcomes], path: Path) -> bool:
    if found["diagnostics"].runs:
        energy_figure(found["diagnostics"].runs, path)
    return bool(found["diagnostics"].runs)


def _draw_pipeline(found: Mapping[str, Outcomes], path: Path) -> bool:
    runs = [run for run in found["main"].runs if is_drawn(run["recipe"])]
    if runs:
        pipeline_figure(runs[0], path)
    return bool(runs)


def document(
    found: Mapping[str, Outcomes], tuning: Mapping[str, list[dict[str, Any]]], figures: set[str], *, quick: bool
) -> str:
    def option(outcomes: Outcomes) -> str:
        """As the runs that are there were run."""
        on_cpu = {run.get("device") for run in outcomes.runs} == {"cpu"}
        return " --quick" if quick else "" if on_cpu else " --device cuda"

    def section(title: str, target: str, name: str, *body: str) -> list[str]:
        outcomes = found[name]
        state = f"{outcomes.there} of {outcomes.wanted} runs are there"
        if outcomes.outdated:
            state += f"; {outcomes.outdated} lines of outdated recipes are not shown"
        return [f"## {title}", f"`tptopk reproduce {target}{option(outcomes)}`: {state}.", *body]

    def picture(name: str, words: str) -> str:
        return f"![{words}]({name}.png)" if name in figures else f"{NOT_RUN}."

    main = found["main"]
    parts = [
        "# Reproduction",
        *(["**A quick run: one seed, few records, one linear layer, nothing tuned. Its figures mean nothing.**"] if quick else []),
        "Of *When Do Fewer Coordinates Suffice in DP-SGD?* (Zhang and Xie). This file is written by `tptopk reproduce`; the numbers called ours are computed "
        "from the runs in `results/`, one JSON object a line.",
        "## What reproduced",
        "Averaged over the cells of the main table (dataset × ε), the paper's over the same cells:",
        tables.main_average(main),
        "Cell by cell:",
        tables.main_summary(main),
        others.why(found["diagnostics"]),
        "## How to read it",
        _how(found),
        "## Which runs are there",
        _state(found, tuning),
        *section(
            "Main table", "table-main", "main",
            "Test accuracy of the last model in percent, mean ± sample standard deviation over seeds; δ = 1e-5." + _took(main),
            tables.main_accuracy(main),
            tables.below_the_paper(main),
            tables.main_differences(main),
        ),
        *section(
            "Tuned further", "table-further", "further",
            "Nothing was tuned for a quick run: these are runs of the main table." if quick else FURTHER,
            tables.further_table(found["further"], main),
        ),
        *section(
            "Active ratios", "table-ratio", "ratio",
            "The paper has ε = 8 and ρ from .2 to .8, one seed; the rows at ε = 1, ρ = .05, ρ = .01 and the dense ones are further. "
            "TP-TopK differs from DP-SGD by more than its support: two phases of different noise, a second learning rate, averaged weights, each as tuned. "
            "The control is TP-TopK's own recipe with ρ = 1, no coordinate left out: what tp-topk − control shows is due to the support. "
            "TP-Rand is run with TP-TopK's recipe where its own has other steps, noise or learning rates, so that the two differ in their ranking alone; its own recipe stands beside it there. Elsewhere it "
            "has its own, which differs at most in how weights are averaged.",
            ablations.ratio_table(found["ratio"]),
        ),
        "## Was the advice right?",
        "`tptopk advise` sees the private warm-up of a run and nothing else. What it said at the end of each TP-TopK warm-up of the main table:",
        others.advice_table(main, found["ratio"]),
        *section("Split of steps and budget", "table-split", "split", "TP-TopK on CIFAR-10, ε = 3, ρ = .40.", ablations.split_table(found["split"])),
        *section(
            "Medical images: PneumoniaMNIST as a stand-in for EyePACS", "table-medical", "medical",
            "EyePACS could not be had, so none of the paper's medical numbers is reproduced. PneumoniaMNIST, pneumonia (positive) against normal, "
            "stands in: other images, other classes, other sizes. Its minority is *normal*, so minority recall is specificity there; in EyePACS the "
            "minority is positive, and it is sensitivity. The threshold is one half.",
            others.medical_table(found["medical"]),
        ),
        *section(
            "Context", "table-context", "context",
            "Not a controlled comparison: networks, accountants and batch sizes differ. Ours have one network a dataset.",
            others.context_table(found["context"], main),
        ),
        *section(
            "Quality of supports", "table-diagnostics", "diagnostics",
            "TP-TopK with training records kept out, on which the true gradient is taken at the end of the warm-up: an oracle, outside the guarantee, and not used by training.",
            others.diagnostics_table(found["diagnostics"]),
        ),
        *section("Where gradient energy lies", "figure-energy", "diagnostics", picture("energy", "Energy of the true gradient by coordinates, and what supports hold of it")),
        "## The two phases",
        f"`tptopk reproduce figure-pipeline{option(main)}`, from the numbers of one run in `main.jsonl`.",
        picture("pipeline", "The two phases with the numbers of a run"),
        "## Privacy of these runs",
        "ε is for one record, which is there or contributes nothing (zero-out), at δ = 1e-5. It covers a run with its two queries for channel statistics (and SA-DP-SGD's questions of the loss). It does "
        "not cover the trials of learning rates: these data are public. On private records each trial would cost its own ε.",
        "ε of each cell, the largest over its runs: by privacy loss distributions (dp-accounting), by the project's own accountant, and by RDP, which the paper uses. "
        "Noise is set so that the first meets the target.",
        _accounting(main),
        _accountants(found),
        "## Tuning",
        "Nothing was tuned for a quick run." if quick else tuned(tuning),
        "## Where the paper disagrees with itself",
        "\n".join(f"- {item}" for item in published.DISAGREEMENTS),
        "## Left out, and what differs",
        _left_out(),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def _took(main: Outcomes) -> str:
    own = [run for run in main.select(variant=PAPER) if str(run.get("device", "")).startswith("NVIDIA")]
    if not own:
        return ""
    shared = {run.get("processes", PROCESSES) for run in own}
    at_a_time = " or ".join(str(count) for count in sorted(shared))
    minutes = sum(run["seconds"] / run.get("processes", PROCESSES) for run in own) / 60
    return (
        f" The {len(own)} runs of the five methods' own recipes that were made on a GPU took {sum(run['seconds'] for run in own):,.0f} s, each "
        f"process counting its own: they were made by {at_a_time} processes at a time on one GPU"
        f"{'' if all('processes' in run for run in own) else ' (what does not say how many, by two)'}, and divided by that it is {minutes:.0f} minutes. "
        "Loading, features and the calibration of noise are not in that, and time by the clock was not kept. Most are of older code; a dense step of ScatterNet takes a quarter more time now "
        "(docs/performance.md), and the whole was not timed again."
    )


def _how(found: Mapping[str, Outcomes]) -> str:
    seeds = found["main"].seeds
    freedom = f"with {seeds} seeds, {seeds - 1} degrees of freedom" if seeds > 1 else "which one seed does not give"
    items = [
        "All five methods train one network on a dataset, by the same accountant, batch size and δ; learning rates, epochs and the averaging of weights are each method's own, "
        "as tuned. TP-Rand is there twice, the second time with TP-TopK's recipe, so that the two differ in how they choose coordinates.",
        "On Fashion-MNIST, CIFAR-10 and PneumoniaMNIST (the stand-in) an example is the image and its mirror: their gradients are averaged before clipping, and predictions are averaged over the two.",
        f"A difference is taken seed by seed, and its 95% interval is Student's ({freedom}). “Higher” and “lower” mean that the interval excludes 0; otherwise no difference was seen. "
        "Sparse against dense means tp-topk − dp-sgd and on-topk − dp-sgd, fixed before any run.",
        "“Reproduced” compares with the paper's difference, whose own deviations count where it gives them (Welch): *yes* when ours has its direction, excludes 0 and may be of its "
        "size; *in direction* when its size is ruled out; *undecided* when neither 0 nor the paper's is ruled out; *no* otherwise.",
        "Intervals cover the seeds of initial weights, sampling and noise; they do not cover the choice of learning rates, which was made on one seed.",
        "A run that two tables share was run once: its line in the second file says from which it was `taken_from`.",
        *_on_other_devices(found),
    ]
    return "\n".join(f"- {item}" for item in items)


def _on_other_devices(found: Mapping[str, Outcomes]) -> list[str]:
    """How many runs were made on a CPU, where others that they are compared with were not."""
    runs = [run for name in ("main", "further", "ratio", "context") for run in found[name].runs]
    on_cpu = sum(run.get("device") == "cpu" for run in runs)
    if not 0 < on_cpu < len(runs):
        return []
    return [
        f"{tables.ON_CPU.strip()} marks numbers behind which some runs were made on a CPU, in float32: {on_cpu} of the {len(runs)} runs of these tables of methods, ratios and context. The others "
        f"were made on a GPU, in tf32 and by an older torch, where gradients are clipped to {SLACK['tf32']:.1%} less."
    ]


def _state(found: Mapping[str, Outcomes], tuning: Mapping[str, list[dict[str, Any]]]) -> str:
    rows = [
        [f"`{name}.jsonl`", f"{o.there} of {o.wanted}", f"{o.seconds:,.0f}", _listed(o.runs, "device"), _listed(o.runs, "commit")]
        for name, o in found.items()
    ]  # fmt: skip
    for name, runs in tuning.items():
        rows.append([f"`{name}.jsonl`", str(len(runs)), f"{_seconds(runs):,.0f}", "–", "–"])
    total = sum(o.seconds for o in found.values()) + sum(_seconds(runs) for runs in tuning.values())
    runs = [run for o in found.values() for run in o.runs]
    shared = sum("taken_from" in run for run in runs)
    versions = sorted({f"{name} {version}" for run in runs for name, version in run.get("versions", {}).items()})
    return "\n\n".join(
        [
            table(["file", "runs", "seconds", "device", "commit"], rows),
            f"Runs of the tables: {sum(o.there for o in found.values())} of {sum(o.wanted for o in found.values())}, {shared} of them taken from another line. Seconds of the runs that are shown, each counted once: {total:,.0f}."
            + (f" Software: {', '.join(versions)}." if versions else ""),
        ]
    )


def _listed(runs: list[dict[str, Any]], key: str) -> str:
    return ", ".join(sorted({str(run[key]) for run in runs if run.get(key)})) or "–"


def _seconds(runs: list[dict[str, Any]]) -> float:
    return sum(float(run.get("seconds", 0.0)) for run in runs)


def _accounting(main: Outcomes) -> str:
    rows = []
    for dataset in recipes.DATASETS:
        for epsilon in recipes.EPSILONS:
            for method in recipes.METHODS:
                where: dict[str, Any] = {
                    "dataset": dataset,
                    "target_epsilon": epsilon,
                    "method": method,
                    "variant": PAPER,
                }
                runs = main.select(**where)
                if not runs:
                    continue
                plan = runs[0]["plan"]
                rows.append(
                    [
                        NAMES[dataset], f"{epsilon:g}", method,
                        *(round_up(max(main.values(key, **where).values())) for key in ("epsilon", "epsilon_second_opinion", "epsilon_rdp")),
                        " + ".join(str(phase["steps"]) for phase in plan["phases"]),
                        " / ".join(f"{phase['noise_multiplier']:.3f}" for phase in plan["phases"]),
                        f"{runs[0]['active']:,} of {runs[0]['coordinates']:,}",
                    ]
                )  # fmt: skip
    if not rows:
        return f"{NOT_RUN}."
    head = ["dataset", "target ε", "method", "PLD", "second opinion", "RDP", "steps", "σ", "k of d"]
    return table(head, rows)


def _accountants(found: Mapping[str, Outcomes]) -> str:
    """How far the accountants lie apart, over all private runs of each file."""
    rows = []
    for name, outcomes in found.items():
        runs = [run for run in outcomes.runs if run.get("epsilon") is not None]
        if runs:
            over = max(run["epsilon"] - run["recipe"]["target_epsilon"] for run in runs)
            apart = [
                [run[key] - run["epsilon"] for run in runs if run.get(key) is not None]
                for key in ("epsilon_second_opinion", "epsilon_rdp")
            ]
            between = [f"{min(values):+.4f} to {max(values):+.4f}" if values else "–" for values in apart]
            rows.append([f"`{name}.jsonl`", str(len(runs)), f"{over:+.4f}", *between])
    if not rows:
        return ""
    return table(["file", "private runs", "PLD − target, largest", "second opinion − PLD", "RDP − PLD"], rows)


def _left_out() -> str:
    items = [
        "EyePACS: its images are behind an account with the competition that published them. PneumoniaMNIST stands in and is called so wherever its "
        "figures appear. `tptopk data` reads EyePACS in its official layout for whoever has it.",
        "The paper's network is not known. Ours are a CNN on scattering features (as in H-CNN), whose channels are standardised by two private queries "
        "(σ = 32) that are charged in every plan. Clip norm .1, momentum .9; on Fashion-MNIST, CIFAR-10 and the stand-in for EyePACS the image and its "
        "mirror are one example, in training and in testing (the PneumoniaMNIST stand-in's figures too).",
        "AUTO-S, SA-DP-SGD and random sparsification have the learning rate, epochs and averaging that were tuned for the method they change (DP-SGD, "
        "DP-SGD, ON-Rand), and were not tuned themselves. Wide residual networks are only quoted.",
        "Data: MNIST, Fashion-MNIST, CIFAR-10 and PneumoniaMNIST (the stand-in) came packed anew, not as the files whose checksums are published; sizes, classes, means and "
        "deviations were compared with the published ones. The training images of Fashion-MNIST were in another order than in its files (a fixed "
        "shuffle), so that those held out for tuning are others than its last ones. New runs say the digest of what they read.",
        "The paper accounts by RDP; here noise is set by privacy loss distributions, which is less noise for the same ε. The RDP value of every cell "
        "stands in the table of privacy.",
        "The paper's ablation on ρ at smaller ε is described there without numbers; ours at ε = 1 has none to stand beside.",
        "The paper gives no numbers for ρ̂_sig and α̂_oracle.",
    ]
    return "\n".join(f"- {item}" for item in items)
