"""Breast cancer (Wisconsin, diagnostic; embedded in scikit-learn) at ε = 3, δ = 1e-5, through `TPTopKClassifier` as it comes.

    python benchmarks/breast_cancer.py            # a minute and a half on one core; --widen 2 doubles every range

Prints mean ± standard deviation of the test accuracy over ten splits of 455 training and 114 test records. No test record took
part in choosing the defaults: the test records of all splits come from one half of the table, and `tune_table.py` saw the other.

The bounds are public constants, written down from how the measurements are defined and not from the records. (The table's
description in scikit-learn lists the smallest and largest values found in it. They are statistics of the records and are not used.)
Radii, contours and gray values are those of cell nuclei outlined in images of 640 × 400 pixels with 256 gray levels [Street,
Wolberg, Mangasarian 1993]; all other measurements are shape ratios.
"""

import argparse
import warnings
from math import pi
from statistics import mean, stdev

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

from tptopk import PrivacyWarning
from tptopk.integrations.sklearn import TPTopKClassifier

NUCLEUS = {
    "radius": (
        5,
        30,
    ),  # pixels: forty circles of radius 30, side by side, fill nearly half of an image; below 5 none can be outlined
    "texture": (0, 37),  # standard deviation of gray values: 37 if they are spread evenly over half of the 256 levels
    "perimeter": (2 * pi * 5, 2 * pi * 30),
    "area": (pi * 5**2, pi * 30**2),
    "smoothness": (0, 0.2),  # local variation of the radius: up to a fifth
    "compactness": (
        0,
        0.5,
    ),  # perimeter² / (4π area) − 1: 0 for a circle, 0.5 for an ellipse three times as long as wide
    "concavity": (0, 0.5),  # depth of dents: up to half a radius
    "concave points": (0, 0.25),  # share of the outline that is dented: up to a quarter
    "symmetry": (0, 0.5),  # difference of the two sides: up to half
    "fractal dimension": (0, 0.25),  # less 1: 0 for a smooth curve, 0.25 for the west coast of Britain
}


def bounds(widen: float = 1.0) -> list[tuple[float, float]]:
    """Of the 30 columns: the mean over the image's nuclei, its standard error, and the mean of the three largest.

    If nuclei vary by a standard deviation of a quarter of the range, the mean of ten has a standard error of about a tenth of
    the range (rounded up), and the largest few lie two standard deviations, half the range, higher.
    """
    ranges = list(NUCLEUS.values())
    means = [(low, high) for low, high in ranges]
    errors = [(0, (high - low) / 10) for low, high in ranges]
    worst = [(low, high + (high - low) / 2) for low, high in ranges]
    return [
        ((low + high) / 2 - widen * (high - low) / 2, (low + high) / 2 + widen * (high - low) / 2)
        for low, high in means + errors + worst
    ]


def halves() -> tuple[np.ndarray, np.ndarray]:
    """The records that settings are chosen on, and those that tests are drawn from; by number."""
    labels = load_breast_cancer().target
    return train_test_split(np.arange(len(labels)), test_size=0.5, stratify=labels, random_state=0)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--widen", type=float, default=1.0)
    arguments.add_argument("--splits", type=int, default=10)
    arguments.add_argument("--active-ratio", type=float, default=0.4)
    arguments.add_argument("--methods", default="tp-topk,dp-sgd,non-private")
    given = arguments.parse_args()
    table, labels = load_breast_cancer(return_X_y=True)
    _, for_tests = halves()
    warnings.filterwarnings("ignore", "method 'non-private'", PrivacyWarning)
    for method in given.methods.split(","):
        accuracy = []
        for split in range(given.splits):
            _, test = train_test_split(for_tests, test_size=114, stratify=labels[for_tests], random_state=split)
            train = np.setdiff1d(np.arange(len(labels)), test)
            classifier = TPTopKClassifier(
                method=method,
                epsilon=3.0,
                delta=1e-5,
                active_ratio=given.active_ratio,
                bounds=bounds(given.widen),
                classes=[0, 1],
                dataset_size=455,
                random_state=split,
            )
            classifier.fit(table[train], labels[train])
            accuracy.append(100 * classifier.score(table[test], labels[test]))
        print(f"{method:12} {mean(accuracy):6.2f} ± {stdev(accuracy):.2f}   ε = {classifier.epsilon_:.4f}", flush=True)


if __name__ == "__main__":
    main()
