"""How the defaults for the embedded digits were chosen: on a fifth of the training data, the test set untouched.

    python benchmarks/tune_digits.py

Trains every private method at ε = 3 on the first 1,150 training digits with each setting and two seeds, and prints
its mean accuracy on the other 287. The setting whose worst method is best became the default.
"""

from itertools import product
from statistics import mean

import torch
from torch.nn import functional as F

from tptopk import METHODS, Plan, fit
from tptopk.data.digits import digits
from tptopk.models.digits import digits_cnn

HELD_OUT = 1150

(images, labels), _ = digits()
training, held_out = (images[:HELD_OUT], labels[:HELD_OUT]), (images[HELD_OUT:], labels[HELD_OUT:])
private = [name for name, method in METHODS.items() if method.private]
print("epochs  rate  worst  " + "  ".join(private))
for epochs, rate in product((30, 40, 50), (0.15, 0.2, 0.3)):
    accuracy = {}
    for method in private:
        plan = Plan.calibrate(
            method, epsilon=3.0, delta=1e-5, batch_size=256, dataset_size=HELD_OUT, epochs=epochs, clip_norm=1.0
        )
        runs = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = digits_cnn()
            optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
            run = fit(model, training, plan, optimizer, loss=F.cross_entropy, test_set=held_out, seed=seed)
            runs.append(100 * run.test["accuracy"])
        accuracy[method] = mean(runs)
    print(
        f"{epochs:6} {rate:5} {min(accuracy.values()):6.1f}  "
        + "  ".join(f"{accuracy[m]:{len(m)}.1f}" for m in private),
        flush=True,
    )
