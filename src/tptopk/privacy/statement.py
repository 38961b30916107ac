"""What may be claimed for a run, and what may not, in words that a person can sign."""

from __future__ import annotations

from dataclasses import dataclass

from tptopk.privacy import accounting
from tptopk.privacy.accounting import round_up
from tptopk.privacy.plan import Plan


@dataclass(frozen=True)
class Facts:
    """What a statement needs beside the plan."""

    epsilon: float | None  # spent, by the plan's accountant; None where nothing was private
    charged_steps: list[int]  # for each phase
    seeded: bool  # noise and samples can be recomputed from a seed
    test_metrics: bool
    averaged: bool
    status: str = "finished"


def statement(plan: Plan, facts: Facts) -> str:
    if not plan.spec.private:
        return (
            "# Privacy statement\n\n**This model is NOT private.** It was trained without clipping and without noise, for comparison. "
            "It may reveal its training records; do not release it.\n"
        )
    return "\n".join([*_claim(plan, facts), "", *_mechanism(plan, facts), "", *_limits(plan, facts)]) + "\n"


def _claim(plan: Plan, facts: Facts) -> list[str]:
    assert facts.epsilon is not None
    charged = [p.segment._replace(steps=n) for p, n in zip(plan.phases, facts.charged_steps, strict=True)]
    segments = [*(q.segment for q in plan.queries), *charged]
    rdp = accounting.epsilon(segments, plan.delta, "rdp")
    paper = accounting.epsilon(segments, plan.delta, "rdp-paper")
    lines = ["# Privacy statement", ""]
    if facts.seeded:
        lines += [
            "**Not for release.** This run was an experiment with a fixed seed: whoever knows the seed can subtract the noise. "
            "The figures below describe the mechanism, not this model.",
            "",
        ]
    if facts.status != "finished":
        lines += [
            f"This run is **{facts.status}**: it ended after {sum(facts.charged_steps)} of {plan.steps} steps, and the figures count the "
            "steps that were charged. That it ended, and how, may depend on the data and is not covered.",
            "",
        ]
    if plan.delta * plan.dataset_size >= 1:
        lines += [
            f"**δ = {plan.delta:g} is too large**: at or above 1/N it allows publishing a random record outright.",
            "",
        ]
    return [
        *lines,
        f"Training satisfies **(ε, δ) = ({round_up(facts.epsilon)}, {plan.delta:g})** differential privacy (accountant: {plan.accountant}).",
        "",
        f"- Other accountants, same run: ε = {round_up(rdp)} by RDP, {round_up(paper)} by RDP with the classic conversion. All are upper bounds.",
        "- Unit of privacy: one record of the training set. A person with several records is not covered as one person.",
        f"- Neighbouring datasets: the number of records, {plan.dataset_size:,}, was declared public; one record may be replaced by one "
        "that contributes nothing (zero-out adjacency), accounted as adding or removing a record.",
        "- What is covered: every private gradient of the run and all that was computed from them: the final model, all "
        "intermediate models, the scores and the chosen supports.",
    ]


def _mechanism(plan: Plan, facts: Facts) -> list[str]:
    lines = [
        "## What was done",
        "",
        f"Method {plan.method}: {plan.spec.summary}. Each step drew a Poisson sample, set inactive coordinates of each record's gradient "
        "to zero, clipped it to norm C, added Gaussian noise of standard deviation σC on the active coordinates, and divided by the "
        "public expected batch size.",
        "",
        "| phase | steps charged | of planned | sample rate | σ | C | divisor |",
        "|---|---|---|---|---|---|---|",
    ]
    for phase, charged in zip(plan.phases, facts.charged_steps, strict=True):
        lines.append(
            f"| {phase.name or 'training'} | {charged} | {phase.steps} | {phase.sample_rate:.6g} | {phase.noise_multiplier:.6g} | "
            f"{phase.clip_norm:g} | {plan.expected_batch_size(phase):.6g} |"
        )
    for query in plan.queries:
        lines.append(
            f"| query: {query.name} | {query.steps} | {query.steps} | {query.sample_rate:.6g} | {query.noise_multiplier:.6g} | "
            f"{query.clip_norm:g} | – |"
        )
    lines += [
        "",
        "A record whose gradient is not finite contributes zero; no file, message or figure of the run depends on "
        "whether there was one.",
    ]
    if facts.averaged:
        lines += ["The released weights are a moving average of the trained ones, which costs nothing."]
    return lines


def _limits(plan: Plan, facts: Facts) -> list[str]:
    return [
        "## What is not covered",
        "",
        "- Choosing hyper-parameters, or the best of several runs, on the private data: every run on it counts, and this statement "
        "counts one.",
        "- Initial weights, features or settings that were made from the private data before this run.",
        "- A loader or collate function that mixes records: each record must be read on its own.",
        "- Statistics of the data used in preprocessing, unless they are listed above as a query.",
        "- Training loss or accuracy measured on the private records. This library computes none.",
        *(
            ["- The metrics on the test set: they describe the test records, which have no guarantee."]
            if facts.test_metrics
            else []
        ),
        "- Errors raised by the data itself (a record that cannot be read), and how long a step took.",
        "- Floating-point effects: noise is drawn in float32 from "
        + (
            "a generator seeded for the experiment"
            if facts.seeded
            else "Philox streams keyed from 256 bits of operating-system entropy "
            "(128-bit keys on a CPU, 64-bit on CUDA), which are not cryptographic generators"
        )
        + "; attacks on the low bits of floating-point noise are outside the model.",
        "- What the record cannot prove: that the data was the data described, and that the software was run unmodified.",
    ]
