"""A small table and a classifier that declares all of it."""

from __future__ import annotations

import numpy as np

from tptopk.integrations.sklearn import TPTopKClassifier

FAST = {"accountant": "rdp", "epochs": 8, "batch_size": 0.5, "learning_rate": 0.5, "clip_norm": 1.0}
SECRET = "Mme-Dupont"


def made(records: int = 60, seed: int = 0):
    generator = np.random.default_rng(seed)
    table = generator.uniform(-1, 1, (records, 3))
    return table, np.where(table[:, 0] > 0, "yes", "no")


def declared(**changes):
    return TPTopKClassifier(
        **{**FAST, "classes": ["no", "yes"], "dataset_size": 60, "bounds": (-1, 1), "random_state": 0, **changes}
    )
