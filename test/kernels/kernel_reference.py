"""What the kernel tests compare with, in fp32 on plain torch, and how close is close enough."""

from __future__ import annotations

import torch

# One rounding to bf16: half a unit in the last of its 8 bits.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


def assert_rounded_once(
    actual: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor | None = None
) -> None:
    """`actual` is `exact` (fp32) up to one rounding to its dtype, or 1e-5 relative in fp32.

    `scale` is the size of what was summed, where terms may cancel: the error of fp32 sums is
    relative to that (1e-6 of it is granted).
    """
    assert actual.shape == exact.shape
    if actual.numel() == 0:
        return
    scale = exact.abs() if scale is None else scale
    allowed = ROUNDING[actual.dtype] * exact.abs() + 1e-6 * scale + 1e-30
    error = (actual.float() - exact).abs()
    worst = (error / allowed).max().item()
    assert worst <= 1, f"{worst:.2f} times the allowed error"


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last q of k positions; also sum |weight * value| as a scale.

    query [q, Hq, d], keys [k, Hkv, d], values [k, Hkv, dv] -> two of [q, Hq, dv], fp32.
    """
    num_queries, num_keys = query.shape[0], keys.shape[0]
    share = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(share, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    q = torch.arange(num_keys - num_queries, num_keys)[:, None]
    k = torch.arange(num_keys)[None]
    hidden = (k > q) | ((k < q - window) if window >= 0 else torch.zeros_like(k > q))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, values)
    return out.float(), torch.einsum("hqk,khd->qhd", weights, values.abs()).float()
