"""Drawing tokens from a law over the vocabulary; the uniform numbers are the caller's."""

from __future__ import annotations

import torch
from torch import Tensor


def temperature_law(logits: Tensor, temperatures: Tensor) -> Tensor:
    """softmax(logits / T): [n, ..., V] fp32 from logits [n, ..., V] fp32 and T [n] fp32 > 0."""
    scale = temperatures.view(-1, *[1] * (logits.dim() - 1))
    return torch.softmax(logits / scale, dim=-1)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Ids [n] int64 by inverse CDF: weights [n, V] >= 0, not necessarily of sum 1; u [n] in [0, 1).

    In fp64: a running sum in fp32 would move the law of a large vocabulary by more than the
    rounding of its probabilities. A weight of 0 is never drawn. A row of NaN gives the last id.
    """
    cdf = weights.double().cumsum(dim=-1)  # [n, V]
    target = uniforms.double()[:, None] * cdf[:, -1:]  # [n, 1], below the total
    ids = torch.searchsorted(cdf, target, right=True).squeeze(1)  # [n]
    return ids.clamp(max=weights.shape[-1] - 1)
