"""Linear layers whose weight is packed once for oneDNN.

`F.linear` in bf16 re-orders the weight into oneDNN's blocked layout at every call. Here each
layer keeps the re-ordered copy and calls oneDNN's linear on it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

_PACKED = "_dlite_packed_weight"


def _pack(layer: torch.nn.Module) -> None:
    """Keep a re-ordered copy of `layer.weight` [out, in] beside it."""
    setattr(layer, _PACKED, torch.ops.mkldnn._reorder_linear_weight(layer.weight.data))


def _linear(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] -> [..., out] on the packed weight, or on the plain one where there is none."""
    packed = getattr(layer, _PACKED, None)
    if packed is None or x.shape[:-1].numel() == 0:
        return F.linear(x, layer.weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PackedLinearMethod(UnquantizedLinearMethod):
    """Upstream's unquantized method with `apply` on the packed weight.

    bf16 only; another dtype takes `F.linear`, which is what packing gains nothing over. The class
    name must differ from upstream's: `logits_processor` skips lm_head methods by class name.
    """

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., in] -> [..., out], in the weight's dtype."""
        return _linear(layer, x, bias)


class PackedEmbeddingMethod(PackedLinearMethod):
    """The same for an lm_head, tied or not: `embedding` reads the plain weight."""

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """ids [...] -> [..., h]."""
        return F.embedding(input_, layer.weight)


def pack_linear_weights(model: torch.nn.Module) -> int:
    """Give every unquantized linear layer and the lm_head of `model` a packed weight.

    Called after loading, and again after a weight update: the packed copies do not follow their
    weights by themselves. Returns the number of layers packed (0 where the weights are not bf16).
    Layers with another quant method (quantized weights) are left alone.
    """
    count = 0
    lm_head: Any = getattr(model, "lm_head", None)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, LinearBase) and type(method) is UnquantizedLinearMethod:
            module.quant_method = PackedLinearMethod()
        elif (
            module is lm_head
            and isinstance(module, VocabParallelEmbedding)
            and type(method) is UnquantizedEmbeddingMethod
        ):
            module.quant_method = PackedEmbeddingMethod()
        elif not isinstance(method, PackedLinearMethod):
            continue
        if module.weight.dtype == torch.bfloat16:
            _pack(module)
            count += 1
    return count


def pack_drafter(drafter: torch.nn.Module) -> None:
    """The same for the `nn.Linear` layers of a drafter whose weights are bf16 and frozen."""
    for module in drafter.modules():
        if isinstance(module, torch.nn.Linear) and module.weight.dtype == torch.bfloat16:
            _pack(module)
            module.forward = partial(_drafter_linear, module)


def _drafter_linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return _linear(layer, x, layer.bias)
