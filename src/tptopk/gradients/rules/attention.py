"""Multi-head attention, as one layer: its output projection is used without a call of its own."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from tptopk.gradients.contributions import Contribution
from tptopk.gradients.rules import Call, rule_for
from tptopk.gradients.rules.alone import gradients_alone

ARGUMENTS = (
    "query",
    "key",
    "value",
    "key_padding_mask",
    "need_weights",
    "attn_mask",
    "average_attn_weights",
    "is_causal",
)


def _objection(module: nn.Module) -> str | None:
    if cast(nn.MultiheadAttention, module).dropout > 0 and module.training:
        return "its dropout would be drawn a second time"
    return None


def _batch_axis(module: nn.Module, output: int) -> int:
    return 0 if output == 1 or cast(nn.MultiheadAttention, module).batch_first else 1


@rule_for(nn.MultiheadAttention, whole=True, objection=_objection, batch_axis=_batch_axis)
def attention(call: Call) -> dict[str, Contribution]:
    given: dict[str, Any] = {**dict(zip(ARGUMENTS, call.args, strict=False)), **call.kwargs}
    if any(given[name].dim() != 3 for name in ("query", "key", "value")):
        raise NotImplementedError("attention on an unbatched sequence")
    if given.get("attn_mask") is not None and given["attn_mask"].dim() == 3:
        raise NotImplementedError("an attention mask of its own for each example")
    axis = _batch_axis(call.module, 0)
    shared = {name: value for name, value in given.items() if name not in ARGUMENTS[:4]}
    inputs = (given["query"], given["key"], given["value"], given.get("key_padding_mask"))
    axes = (axis, axis, axis, None if inputs[3] is None else 0)
    return gradients_alone(call, inputs, axes, shared, [axis, 0][: len(call.gradients)])
