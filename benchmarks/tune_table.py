"""How the defaults of `TPTopKClassifier` were chosen: on half of the breast-cancer table, which no test record is drawn from.

    python benchmarks/tune_table.py               # about a quarter of an hour on one core

Trains `tp-topk` and `dp-sgd` with each setting on ten splits of that half (227 records to train, 57 to validate), and prints the mean
accuracy. ε is 6 here: half the records at twice the ε meet about the noise that all of them meet at ε = 3. The setting
whose worse method is best became the default.
"""

from itertools import product
from statistics import mean

from breast_cancer import bounds, halves
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

from tptopk.integrations.sklearn import TPTopKClassifier

METHODS = ("tp-topk", "dp-sgd")
SPLITS = 10

table, labels = load_breast_cancer(return_X_y=True)
seen, _ = halves()
splits = [train_test_split(seen, test_size=57, stratify=labels[seen], random_state=100 + n) for n in range(SPLITS)]
print("hidden  batch  epochs  clip  rate  worse  " + "  ".join(METHODS))
found = []
for hidden, batch, epochs, clip, rate in product([(), (16,)], [0.5, 1.0], [20, 40, 80], [0.5, 1.0], [0.3, 1.0, 3.0]):
    accuracy = {}
    for method in METHODS:
        classifier = TPTopKClassifier(
            method=method,
            epsilon=6.0,
            bounds=bounds(),
            classes=[0, 1],
            dataset_size=227,
            hidden=hidden,
            batch_size=batch,
            epochs=epochs,
            clip_norm=clip,
            learning_rate=rate,
            optimizer="sgd",
        )
        scores = [
            classifier.set_params(random_state=n).fit(table[train], labels[train]).score(table[held], labels[held])
            for n, (train, held) in enumerate(splits)
        ]
        accuracy[method] = 100 * mean(scores)
    found.append((min(accuracy.values()), hidden, batch, epochs, clip, rate))
    print(
        f"{hidden!s:6} {batch:6} {epochs:7} {clip:5} {rate:5} {min(accuracy.values()):6.1f}  "
        + "  ".join(f"{accuracy[method]:{len(method)}.1f}" for method in METHODS),
        flush=True,
    )
print("best:", *sorted(found, reverse=True)[:5], sep="\n")
