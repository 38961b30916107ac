"""Examples of several rows: views of one image, or all records of one patient, averaged before they are clipped as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from tptopk.gradients.examples import Batch
from tptopk.gradients.made_up import made_up
from tptopk.privacy.refusal import Refusal, check_count
from tptopk.training.sampling import Collate, Records, same_dice

Views = Callable[[Tensor], Tensor]  # inputs [B, …] → [B, V, …]


def mirrored(images: Tensor) -> Tensor:
    """Views: the image and its mirror."""
    return torch.stack([images, images.flip(-1)], 1)


def shifted(views: int, pixels: int = 4) -> Views:
    """Views: that many versions of an image, each moved at random by up to `pixels` and mirrored or not."""
    check_count("views", views)
    check_count("pixels", pixels)

    def move(images: Tensor) -> Tensor:  # [B, C, H, W]
        batch, _, height, width = images.shape
        padded = F.pad(images, [pixels] * 4, mode="reflect")
        device, example = images.device, torch.arange(batch, device=images.device)[:, None, None]
        found = []
        for _ in range(views):
            down, right = torch.randint(0, 2 * pixels + 1, (2, batch, 1), device=device)
            rows = down + torch.arange(height, device=device)  # [B, H]
            columns = right + torch.arange(width, device=device)
            columns = torch.where(torch.rand(batch, 1, device=device) < 0.5, columns, columns.flip(1))
            found.append(padded[example, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2))
        return torch.stack(found, 1)

    return move


class RowRecords(Records):
    """A dataset whose examples are units of several records, or records seen in several views, or both.

    A batch is (rows [B, R, …], weights [B, R]), as `MeanOverRows` takes it. R is `most_rows`, a public number, times the views:
    were it the longest unit's, that unit would shape how everybody's gradients are computed. A unit of fewer records is
    filled up with rows of weight zero; of one with more, the first `most_rows` take part.
    """

    def __init__(
        self, dataset: Any, collate: Collate | None, views: Views | None, unit: Any, most_rows: int | None
    ) -> None:
        super().__init__(dataset, collate)
        self._views = views
        self._members: Tensor | None = None
        if (unit is None) != (most_rows is None):
            raise Refusal(
                "unit and most_rows go together: most_rows is a public number, the most records of one unit that take part in a step"
            )
        if unit is not None and most_rows is not None:
            self._members, self._counts = _members(unit, super().__len__(), most_rows)

    def __len__(self) -> int:
        return super().__len__() if self._members is None else len(self._members)

    def batch(self, indices: Tensor, device: torch.device) -> Batch:
        members, counts = indices[:, None], torch.ones(len(indices))
        if self._members is not None:
            members, counts = self._members[indices], self._counts[indices]
        rows = super().batch(members.flatten(), device)
        taking_part = torch.arange(members.shape[1]) < counts[:, None]
        weights = (taking_part / counts[:, None]).to(device)  # [B, R]
        if self._views is not None:
            inputs, targets = _pair(rows)
            seen = _checked(self._views(inputs), inputs)
            views = seen.shape[1]
            rows = seen.flatten(0, 1), targets.repeat_interleave(views, 0)
            weights = weights.repeat_interleave(views, 1) / views
        return tree_map(lambda leaf: leaf.view(len(indices), -1, *leaf.shape[1:]), rows), weights

    def refuse_mixing_views(self) -> None:
        """Refuse views of one record that depend on the records beside it."""
        if self._views is None:
            return
        like, _ = _pair(self.fetch(torch.zeros(1, dtype=torch.long)))
        one, *others = (made_up(like, np.random.default_rng(n)) for n in range(20))
        with same_dice() as again:

            def seen(place: int, beside: list[Tensor]) -> Tensor:
                again()
                batch = torch.cat([*beside[:place], one, *beside[place:]])
                assert self._views is not None
                return _checked(self._views(batch), batch)[place]

            for place, count in ((0, 1), (0, 8), (4, 8), (8, 8)):
                first, other = seen(place, others[:count]), seen(place, others[-count:])
                if not torch.equal(first, seen(place, others[:count])):
                    raise Refusal(
                        "the views of a record are not the same twice under one seed: they keep state, or draw from a generator of their own "
                        "(use torch.rand, numpy.random or random), so that it cannot be tried out whether they mix records"
                    )
                if not torch.equal(first, other):
                    raise Refusal("the views mix records: those of one record change with the records beside it")


def _members(unit: Any, records: int, most_rows: int) -> tuple[Tensor, Tensor]:
    """[U, R] the records of each unit, the first repeated where there are fewer; and [U] how many there are."""
    ids = [one.item() if isinstance(one, (Tensor, np.generic)) and np.ndim(one) == 0 else one for one in unit]
    if len(ids) != records:
        raise Refusal(f"unit holds {len(ids)} ids for {records} records; it needs one for each")
    if not (all(isinstance(one, int) for one in ids) or all(isinstance(one, str) for one in ids)):
        raise Refusal(
            "unit must hold a whole number for each record, or a text for each: values of other or of mixed types may compare unequal "
            "although they name the same unit"
        )
    check_count("most_rows", most_rows)
    groups: dict[Any, list[int]] = {}
    for index, one in enumerate(ids):
        groups.setdefault(one, []).append(index)
    chosen = [group[:most_rows] for group in groups.values()]
    filled = torch.tensor([group + group[:1] * (most_rows - len(group)) for group in chosen])
    return filled, torch.tensor([float(len(group)) for group in chosen])


def _pair(batch: Batch) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise Refusal("views need records of (inputs, targets)")
    return batch[0], batch[1]


def _checked(seen: Tensor, inputs: Tensor) -> Tensor:
    if not isinstance(seen, Tensor) or seen.dim() < 2 or len(seen) != len(inputs) or seen.shape[1] == 0:
        raise Refusal(
            f"views must turn inputs {tuple(inputs.shape)} into [{len(inputs)}, number of views, …]; they gave "
            f"{tuple(seen.shape) if isinstance(seen, Tensor) else type(seen).__name__}"
        )
    return seen
