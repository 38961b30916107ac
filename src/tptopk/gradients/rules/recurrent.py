"""Recurrent layers, run again on each example alone with an explicit initial state."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tptopk.gradients.contributions import Contribution
from tptopk.gradients.rules import Call, rule_for
from tptopk.gradients.rules.alone import gradients_alone


def _objection(module: nn.Module) -> str | None:
    layer = cast(nn.RNNBase, module)
    return "its dropout would be drawn a second time" if layer.dropout > 0 and layer.training else None


def _batch_axis(module: nn.Module, output: int) -> int:
    return 0 if output == 0 and cast(nn.RNNBase, module).batch_first else 1


@rule_for(nn.RNN, nn.GRU, nn.LSTM, whole=True, objection=_objection, batch_axis=_batch_axis)
def recurrent(call: Call) -> dict[str, Contribution]:
    layer = cast(nn.RNNBase, call.module)
    given: dict[str, Any] = {**dict(zip(("input", "hx"), call.args, strict=False)), **call.kwargs}
    x, state = given["input"], given.get("hx")
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise NotImplementedError("a packed or unbatched sequence")
    if state is None:
        layers = layer.num_layers * (2 if layer.bidirectional else 1)
        state = x.new_zeros(layers, call.batch, layer.proj_size or layer.hidden_size)
        if isinstance(layer, nn.LSTM):
            state = (state, x.new_zeros(layers, call.batch, layer.hidden_size))
    axes = (_batch_axis(layer, 0), 1)
    output_axes = [_batch_axis(layer, n) for n in range(len(call.gradients))]
    inputs = tree_map(lambda leaf: leaf.detach(), (x, state))
    return gradients_alone(call, inputs, axes, {}, output_axes)
