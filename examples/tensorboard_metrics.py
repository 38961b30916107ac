"""What a private run may show, in TensorBoard: python examples/tensorboard_metrics.py, then tensorboard --logdir runs/tensorboard"""

import sys

import torch
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

import tptopk
from tptopk.data.digits import digits
from tptopk.models.digits import digits_cnn
from tptopk.training.metrics import StepRecord


class TensorBoard:
    """Two methods are all that `fit` asks of metrics."""

    def __init__(self, folder: str) -> None:
        self.writer = SummaryWriter(folder)

    def step(self, record: StepRecord) -> None:
        self.writer.add_scalar("norm of the private gradient", record.gradient_norm, record.step)
        self.writer.add_scalar("active coordinates", record.support_size, record.step)
        self.writer.add_scalar("learning rate", record.learning_rate, record.step)

    def end(self, run: tptopk.Run) -> None:
        self.writer.add_text("statement", run.statement())
        for name, value in run.test.items():  # of the test set, which is not private here
            self.writer.add_scalar(f"test {name}", value, len(run.history))
        self.writer.close()


folder = sys.argv[1] if len(sys.argv) > 1 else "runs/tensorboard"
train_set, test_set = digits()
model = digits_cnn()
plan = tptopk.Plan.calibrate("tp-topk", epsilon=3.0, delta=1e-5, batch_size=256, dataset_size=1437, epochs=10)
run = tptopk.fit(model, train_set, plan, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
                 loss=F.cross_entropy, test_set=test_set, on_step=TensorBoard(folder))  # fmt: skip
print(f"test accuracy {run.test['accuracy']:.3f} at ε = {run.epsilon:.3f}; tensorboard --logdir {folder}")
