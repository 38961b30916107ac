"""An engine in the shape of Opacus's: a training script written for it runs here by changing its imports.

    from tptopk.integrations.opacus import PrivacyEngine   # was: from opacus import PrivacyEngine

    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_epsilon=3.0, target_delta=1e-5, epochs=20,
        max_grad_norm=1.0, method="tp-topk", active_ratio=0.4)

The loop stays as it is: forward, backward, step. The module comes back as it went in, neither wrapped nor renamed; the
warm-up ends and the support is chosen inside `optimizer.step()`. `steps` and `recording` say what becomes of loops that do
otherwise. Where this engine is stricter than Opacus it refuses before anything is charged.

What cannot be seen from a backward pass is the loss: it must be the mean (or, with `loss_reduction="sum"`, the sum) over
the batch of a loss that each example has by itself. Class weights under a mean, a mean over the tokens of all examples,
contrastive losses and penalties on the weights are not; `weight_decay` of the optimizer takes the place of the last.
Losses and accuracies that the loop prints of its own batches are of private records, and outside the guarantee.
"""

from tptopk.integrations.opacus.engine import PrivacyEngine
from tptopk.integrations.opacus.loader import PoissonLoader
from tptopk.integrations.opacus.validators import ModuleValidator
from tptopk.integrations.opacus.virtual_batches import BatchMemoryManager
from tptopk.integrations.optimizer import PrivateOptimizer

__all__ = ["BatchMemoryManager", "ModuleValidator", "PoissonLoader", "PrivacyEngine", "PrivateOptimizer"]
