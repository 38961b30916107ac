"""The paper's numbers, and the best published ones that its last table needs, as data. Accuracy in percent, δ = 1e-5."""

from __future__ import annotations

from typing import NamedTuple

from tptopk.experiments.recipes import METHODS


class Value(NamedTuple):
    mean: float
    std: float | None = None  # over three seeds; None where the paper gives none


SEEDS = 3  # of each value with a deviation
Cell = tuple[str, float, str]  # dataset, ε, method

_MAIN = """
mnist 1    96.44 0.02  97.64 0.04  97.79 0.06  97.72 0.09  97.76 0.10
mnist 3    97.99 0.06  98.13 0.04  98.33 0.05  98.23 0.07  98.25 0.08
mnist 8    98.60 0.05  98.91 0.03  98.93 0.04  98.98 0.03  98.80 0.06
fmnist 1   84.06 0.58  85.01 0.19  85.28 0.32  85.03 0.22  84.87 0.47
fmnist 3   88.51 0.16  88.80 0.12  88.88 0.13  88.76 0.10  88.80 0.09
fmnist 8   89.77 0.06  89.80 0.16  89.88 0.07  89.86 0.15  89.84 0.13
cifar10 1  55.20 0.45  63.18 0.52  64.41 0.48  62.87 0.55  63.54 0.51
cifar10 3  60.80 0.38  69.67 0.41  71.05 0.37  68.54 0.44  69.31 0.40
cifar10 8  68.45 0.31  72.33 0.35  72.82 0.34  71.89 0.38  72.67 0.34
"""


def _main() -> dict[Cell, Value]:
    found = {}
    for line in _MAIN.split("\n")[1:-1]:
        dataset, epsilon, *numbers = line.split()
        for place, method in enumerate(METHODS):
            mean, std = numbers[2 * place : 2 * place + 2]
            found[dataset, float(epsilon), method] = Value(float(mean), float(std))
    return found


MAIN = _main()  # test accuracy, mean ± std over three seeds

# (dataset, ρ) → TP-Rand, TP-TopK at ε = 8; one seed
RATIO: dict[tuple[str, float], tuple[float, float]] = {
    ("cifar10", 0.2): (71.87, 72.72),
    ("cifar10", 0.4): (72.31, 72.86),
    ("cifar10", 0.6): (72.43, 72.73),
    ("cifar10", 0.8): (72.44, 72.56),
    ("fmnist", 0.2): (89.73, 90.08),
    ("fmnist", 0.4): (89.79, 90.04),
    ("fmnist", 0.6): (89.86, 89.98),
    ("fmnist", 0.8): (89.86, 89.91),
}

# (E₁/E, ε₁/ε) → TP-TopK on CIFAR-10 at ε = 3, ρ = .40
SPLIT: dict[tuple[float, float], Value] = {
    (0.2, 0.2): Value(69.12, 0.43),
    (0.2, 0.3): Value(69.88, 0.40),
    (0.2, 0.4): Value(69.54, 0.42),
    (0.3, 0.2): Value(70.23, 0.39),
    (0.3, 0.3): Value(71.05, 0.37),
    (0.3, 0.4): Value(70.67, 0.38),
    (0.4, 0.2): Value(70.41, 0.40),
    (0.4, 0.3): Value(70.58, 0.39),
    (0.4, 0.4): Value(69.93, 0.41),
}


class Medical(NamedTuple):
    auc: float  # × 100
    balanced_accuracy: float
    sensitivity: float
    specificity: float


# EyePACS, any retinopathy against none, ε = 8. The positive class is the rarer one.
EYEPACS: dict[str, Medical] = {
    "non-private": Medical(71.3, 0.634, 0.61, 0.658),
    "dp-sgd": Medical(61.4, 0.513, 0.04, 0.986),
    "tp-rand": Medical(66.8, 0.608, 0.46, 0.756),
    "tp-topk": Medical(68.2, 0.631, 0.52, 0.742),
}

TOP_TENTH = 0.864  # share of the gradient's energy in the largest tenth of the coordinates: the paper's first figure


class Row(NamedTuple):
    """One line of the contextual table."""

    dataset: str
    method: str
    accuracy: dict[float, float]  # ε → percent
    source: str


def _paper(dataset: str, method: str, one: float, three: float, eight: float) -> Row:
    return Row(dataset, method, {1.0: one, 3.0: three, 8.0: eight}, "the paper's contextual table")


CONTEXT = [
    _paper("mnist", "DP-SGD (Abadi et al.)", 96.44, 97.99, 98.60),
    _paper("mnist", "AUTO-S (Bu et al.)", 96.38, 98.15, 98.56),
    _paper("mnist", "SA-DP-SGD (Fu et al.)", 93.01, 96.78, 98.89),
    _paper("mnist", "H-CNN + RS (Zhu & Blaschko)", 97.64, 98.13, 98.91),
    _paper("mnist", "TP-TopK", 97.79, 98.33, 98.93),
    _paper("fmnist", "DP-SGD (Abadi et al.)", 84.06, 88.51, 89.77),
    _paper("fmnist", "AUTO-S (Bu et al.)", 83.35, 86.36, 88.68),
    _paper("fmnist", "SA-DP-SGD (Fu et al.)", 82.08, 84.89, 88.67),
    _paper("fmnist", "H-CNN + RS (Zhu & Blaschko)", 85.01, 88.80, 89.80),
    _paper("fmnist", "TP-TopK", 85.28, 88.88, 89.88),
    _paper("cifar10", "DP-SGD (Abadi et al.)", 55.20, 60.80, 68.45),
    _paper("cifar10", "SA-DP-SGD (Fu et al.)", 50.53, 56.89, 60.97),
    _paper("cifar10", "H-CNN + RS (Zhu & Blaschko)", 63.18, 69.67, 72.33),
    _paper("cifar10", "TP-TopK", 64.41, 71.05, 72.82),
]

TRAMER = "Tramèr & Boneh 2021, Differentially Private Learning Needs Better Features"
ZHU = "Zhu & Blaschko 2023, Improving Differentially Private SGD via Randomly Sparsified Gradients"
DE = "De et al. 2022, Unlocking High-Accuracy Differentially Private Image Classification through Scale"
KLAUSE = "Klause et al. 2022, Differentially Private Training of Residual Networks with Scale Normalisation"

# From scratch, without public data, as their authors published them.
BEST = [
    Row("mnist", "ScatterNet + linear", {1.2: 98.1, 3.0: 98.7}, TRAMER),
    Row("fmnist", "ScatterNet + linear", {3.0: 89.7}, TRAMER),
    Row("fmnist", "H-CNN, dense", {1.0: 85.8, 3.0: 88.9}, ZHU),
    Row("fmnist", "H-CNN + RS", {1.0: 87.0, 3.0: 89.2}, ZHU),
    Row("cifar10", "ScatterNet + CNN", {1.0: 60.9, 2.0: 67.0, 3.0: 69.3, 4.0: 69.7, 8.0: 72.4}, TRAMER),
    Row("cifar10", "H-CNN, dense", {1.0: 62.4, 3.0: 69.7}, ZHU),
    Row("cifar10", "H-CNN + RS", {1.0: 63.2, 3.0: 70.0}, ZHU),
    Row("cifar10", "end-to-end CNN, dense", {1.0: 52.5, 3.0: 62.8}, ZHU),
    Row("cifar10", "end-to-end CNN + RS", {1.0: 55.1, 3.0: 64.3}, ZHU),
    Row("cifar10", "WRN-16-4 / WRN-40-4", {1.0: 56.8, 2.0: 65.9, 4.0: 73.5, 8.0: 81.4}, DE),
    Row("cifar10", "ScaleNorm ResNet", {8.0: 82.5}, KLAUSE),
]


def gap(dataset: str, epsilon: float, method: str, other: str) -> float:
    """How far one method's mean lies above another's in the paper's main table."""
    return round(MAIN[dataset, epsilon, method].mean - MAIN[dataset, epsilon, other].mean, 2)


def _gaps(dataset: str, method: str, other: str) -> str:
    return " / ".join(f"{gap(dataset, epsilon, method, other):+.2f}" for epsilon in (1.0, 3.0, 8.0))


def _same_in_context(method: str, name: str) -> str:
    rows = [row for row in CONTEXT if row.method == name]
    cells = [(row.accuracy[e], MAIN[row.dataset, e, method].mean) for row in rows for e in row.accuracy]
    return f"{sum(a == b for a, b in cells)} of {len(cells)}"


DISAGREEMENTS = [
    "Fashion-MNIST, TP-TopK over DP-SGD: the text says +0.53 / +0.83 at ε = 1 / 3; the main table gives "
    f"{gap('fmnist', 1.0, 'tp-topk', 'dp-sgd'):+.2f} / {gap('fmnist', 3.0, 'tp-topk', 'dp-sgd'):+.2f}.",
    "Fashion-MNIST, ON-TopK over ON-Rand: the text says +0.03 / +0.13 / +0.05 at ε = 1 / 3 / 8; the main table gives "
    f"{_gaps('fmnist', 'on-topk', 'on-rand')}.",
    "CIFAR-10, TP-TopK over TP-Rand: the conclusion says that the gap narrows at ε = 1; the main table gives "
    f"{_gaps('cifar10', 'tp-topk', 'tp-rand')} at ε = 1 / 3 / 8. The discussion of that table says that gains are largest at small ε, the ablation on ρ "
    "that the signal is strongest at ε = 8.",
    f"EyePACS, recall of the minority under DP-SGD: 0.05 in the caption, {EYEPACS['dp-sgd'].sensitivity:.2f} in the table and the text. The caption "
    "announces mean ± standard deviation; the table has no deviations.",
    "Accounting: RDP in the set-up and the privacy theorem, PRV in a remark of the appendix.",
    "Fashion-MNIST, ε = 8, ρ = .40, TP-TopK: "
    f"{RATIO['fmnist', 0.4][1]:.2f} in the ablation (one seed), {MAIN['fmnist', 8.0, 'tp-topk'].mean:.2f} ± "
    f"{MAIN['fmnist', 8.0, 'tp-topk'].std:.2f} in the main table.",
    "The contextual table says that its entries are from the corresponding papers. Its row “H-CNN + RS” equals the main table's TP-Rand column in "
    f"{_same_in_context('tp-rand', 'H-CNN + RS (Zhu & Blaschko)')} entries, and its row “DP-SGD” the DP-SGD column in "
    f"{_same_in_context('dp-sgd', 'DP-SGD (Abadi et al.)')}; Zhu & Blaschko themselves have 63.2 / 70.0 on CIFAR-10 at ε = 1 / 3.",
    "SA-DP-SGD is listed as adaptive clipping. It is simulated annealing: a candidate update is accepted or rejected by a loss, and on private "
    "data that is a further query, which has to be charged.",
    "All five methods are said to share a network, which is not named. Published dense DP-SGD on H-CNN has 62.4 / 69.7 on CIFAR-10 at ε = 1 / 3; the paper's dense "
    f"column has {MAIN['cifar10', 1.0, 'dp-sgd'].mean:.2f} / {MAIN['cifar10', 3.0, 'dp-sgd'].mean:.2f}, and end-to-end CNNs have 52.5 / 62.8.",
]
