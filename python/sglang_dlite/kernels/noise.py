"""Counter-based noise for sampled drafts: the same bits in the kernel and in torch.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed by the
draw's seed, counted by the token id. A draw therefore does not depend on the batch, on block sizes
or on what was drawn before.

Gumbel-max: argmax(logit / T - log E) with E ~ Exp(1) is a draw from softmax(logits / T).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_SERIES_BELOW = 0.015625


@triton.jit
def exponential_noise(seed, token):
    """E ~ Exp(1), fp32, of seed int64 and token int32, which broadcast."""
    zero = token * 0
    bits, _, _, _ = tl.philox(seed, token, zero, zero, zero)
    # Small E decide the argmax: where u is small, -log(1 - u) by its series keeps u's precision.
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = u * (1 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    return tl.where(u < 0.015625, series, -tl.log(1 - u))


def exponential_noise_reference(seed: Tensor, token: Tensor) -> Tensor:
    """The same in torch: int64 tensors that broadcast -> fp32."""
    zero = torch.zeros_like(token)
    words = [token, zero, zero, zero]
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(_ROUNDS):
        low0, high0 = _wide_product(_MULTIPLIERS[0], words[0])
        low1, high1 = _wide_product(_MULTIPLIERS[1], words[2])
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [(key + step) & _WORD for key, step in zip(keys, _KEY_STEPS, strict=True)]
    u = ((words[0].to(torch.float32) + 0.5) * 2.0**-32).clamp(max=0.99999994)
    series = u * (1 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    return torch.where(u < _SERIES_BELOW, series, -torch.log(1 - u))


def _wide_product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of a product of 32-bit words, within int64."""
    low, high = (multiplier & 0xFFFF) * word, (multiplier >> 16) * word
    return (low + ((high & 0xFFFF) << 16)) & _WORD, (high + (low >> 16)) >> 16
