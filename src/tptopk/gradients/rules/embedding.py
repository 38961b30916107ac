"""A table of rows looked up by id: an example's gradient is zero but for the rows it names."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from tptopk.gradients.contributions import Contribution, Rows
from tptopk.gradients.rules import Call, rule_for


def _objection(module: nn.Module) -> str | None:
    layer = cast(nn.Embedding, module)
    if layer.max_norm is not None:
        return "max_norm rewrites the table during the forward pass"
    if layer.scale_grad_by_freq:
        return "scale_grad_by_freq makes one example's gradient depend on the others"
    return None


@rule_for(nn.Embedding, objection=_objection)
def embedding(call: Call) -> dict[str, Contribution]:
    gradient = call.output_gradient
    if gradient is None:
        return {}
    layer = cast(nn.Embedding, call.module)
    ids = call.input.reshape(call.batch, -1)  # [B, T]
    example = torch.arange(call.batch, device=ids.device)[:, None].expand_as(ids)
    values = gradient.reshape(-1, gradient.shape[-1])  # [B·T, D]
    example, row = example.reshape(-1), ids.reshape(-1).long()
    if layer.padding_idx is not None:  # torch gives the padding row no gradient
        values = values.masked_fill((row == layer.padding_idx)[:, None], 0.0)
    return {"weight": Rows(example, row, values, call.batch, layer.num_embeddings)}
