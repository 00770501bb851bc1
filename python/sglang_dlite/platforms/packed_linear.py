"""Linear layers whose weight is packed once.

`F.linear` in bf16 re-orders the weight into a blocked layout at every call. Here each layer keeps
a re-ordered copy: for the compiled kernels where they are, for oneDNN elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from sglang_dlite.platforms.kernels import compiled_kernels

_PACKED = "_dlite_packed_linear"
_PACKED_WEIGHT = "_dlite_packed_weight"

# Without a matrix unit our kernel is made for the rows of a decode or verify pass (16 requests of 8
# rows); oneDNN is faster on a prompt, whose rows pay for its re-ordering of the weight.
MAX_ROWS_WITHOUT_MATRIX_UNIT = 128

# x [..., in], bias [out] or None -> [..., out], on the packed copy of one weight.
PackedLinear = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def _pack(layers: Sequence[torch.nn.Module]) -> None:
    """Give each layer the packed form of its `weight` [out, in] bf16."""
    kernels = compiled_kernels()
    weights = [layer.weight.data for layer in layers]
    if kernels is None:
        for layer, weight in zip(layers, weights, strict=True):
            setattr(layer, _PACKED, _onednn_linear(layer, weight))
        return
    old = [packed_weight(layer) for layer in layers]
    if all(packed is not None for packed in old):  # after a weight update: in place
        for weight, packed in zip(weights, old, strict=True):
            kernels.repack_linear_weight(weight, packed)
        return
    for layer, packed in zip(layers, kernels.pack_linear_weights(weights), strict=True):
        setattr(layer, _PACKED_WEIGHT, packed)
        setattr(layer, _PACKED, _kernel_linear(kernels, layer, packed))


def packed_weight(layer: torch.nn.Module) -> torch.Tensor | None:
    """A layer's weight as the compiled kernels read it; None where it has none."""
    return layer.__dict__.get(_PACKED_WEIGHT)


def _onednn_linear(layer: Any, weight: torch.Tensor) -> PackedLinear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def linear(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[:-1].numel() == 0:
            return F.linear(x, layer.weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    return linear


def _kernel_linear(kernels: Any, layer: Any, packed: torch.Tensor) -> PackedLinear:
    run, out_features = kernels.linear, layer.weight.shape[0]
    if kernels.has_matrix_unit():
        return lambda x, bias: run(x, packed, out_features, bias)

    def linear(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[:-1].numel() > MAX_ROWS_WITHOUT_MATRIX_UNIT:
            return F.linear(x, layer.weight, bias)
        return run(x, packed, out_features, bias)

    return linear


class PackedLinearMethod(UnquantizedLinearMethod):
    """Upstream's unquantized method with `apply` on the packed weight.

    bf16 only; another dtype takes `F.linear`, which is what packing gains nothing over. The class
    name must differ from upstream's: `logits_processor` skips lm_head methods by class name.
    """

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., in] -> [..., out], in the weight's dtype."""
        packed = layer.__dict__.get(_PACKED)
        return F.linear(x, layer.weight, bias) if packed is None else packed(x, bias)


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
    layers = []
    lm_head: Any = getattr(model, "lm_head", None)
    if getattr(getattr(model, "logits_processor", None), "use_fp32_lm_head", False):
        lm_head = None  # upstream computes fp32 logits from the plain weight
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
            layers.append(module)
    _pack(layers)
    return len(layers)


def pack_drafter(drafter: torch.nn.Module) -> None:
    """The same for the `nn.Linear` layers of a drafter whose weights are bf16 and frozen."""
    layers = [
        module
        for module in drafter.modules()
        if isinstance(module, torch.nn.Linear) and module.weight.dtype == torch.bfloat16
    ]
    _pack(layers)
    for layer in layers:
        layer.forward = partial(_drafter_linear, layer)


def _drafter_linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return layer.__dict__[_PACKED](x, layer.bias)
