"""Samples that are too large for the memory, in parts."""

from __future__ import annotations

from tptopk.integrations.opacus.loader import PoissonLoader
from tptopk.integrations.optimizer import PrivateOptimizer
from tptopk.privacy.refusal import Refusal, refuse_unknown_keywords


class BatchMemoryManager:
    """Samples in physical batches of at most `max_physical_batch_size` records; the optimizer steps after the last part."""

    @refuse_unknown_keywords
    def __init__(
        self, *, data_loader: PoissonLoader, max_physical_batch_size: int, optimizer: PrivateOptimizer
    ) -> None:
        if not isinstance(data_loader, PoissonLoader) or not isinstance(optimizer, PrivateOptimizer):
            raise Refusal("BatchMemoryManager takes the loader and the optimizer that make_private returned")
        steps: object = optimizer._private_steps
        if data_loader.draws is not steps:
            raise Refusal("the loader and the optimizer are of two different trainings")
        self._loader = data_loader.in_parts(max_physical_batch_size)

    def __enter__(self) -> PoissonLoader:
        return self._loader

    def __exit__(self, *error: object) -> None:
        return
