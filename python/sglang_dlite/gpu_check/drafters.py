"""Random drafters of the official sizes, and the bytes that a draft step must read of them."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dlite.drafter import DLiteConfig, DLiteDrafter

_LAYER_IDS = (0, 1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35)


def official_config(hidden_size: int, intermediate_size: int) -> DLiteConfig:
    """A DLite drafter of a Qwen3 with 36 layers: D = 5, S = 14, K = 7, R = 256."""
    return DLiteConfig(
        hidden_size=hidden_size,
        num_hidden_layers=5,
        num_target_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=intermediate_size,
        vocab_size=151936,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        block_size=8,
        architecture_version="dlite_v1",
        model_role="pivot_q_student",
        anchor_group_size=1,
        target_layer_ids=_LAYER_IDS,
        sequential_head="rnn",
        sequential_rank=256,
        mask_token_id=151669,
    )


OFFICIAL = {"Qwen3-4B": official_config(2560, 9728), "Qwen3-8B": official_config(4096, 12288)}


def random_drafter(config: DLiteConfig, device: str, dtype: torch.dtype) -> DLiteDrafter:
    """Weights large enough that every part of the step matters; the same ones at every call."""
    torch.manual_seed(3)
    with torch.device(device):
        drafter = DLiteDrafter(config)
    for name, parameter in drafter.named_parameters():
        if "prev_token_embedding" in name:  # each token leads to others
            torch.nn.init.normal_(parameter, std=2)
        elif "state_hidden_mlp.weight" in name:
            rank = config.sequential_rank
            torch.nn.init.normal_(parameter[:, :rank], std=2 / rank**0.5)
            torch.nn.init.normal_(parameter[:, rank:], std=1 / config.hidden_size**0.5)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5 / parameter.shape[-1] ** 0.5)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    # The device again: constants are made on the CPU wherever the weights are.
    return drafter.to(device, dtype).requires_grad_(False)


def random_inputs(
    config: DLiteConfig, n: int, device: str, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Pivot states [n, S, h] and token group [n, G]."""
    generator = torch.Generator(device).manual_seed(1000 * seed + n)
    states = torch.randn(
        n, config.num_pivot_states, config.hidden_size, generator=generator, device=device
    )
    shape = (n, config.anchor_group_size)
    group = torch.randint(config.vocab_size, shape, generator=generator, device=device)
    return states.to(dtype), group


def random_table(config: DLiteConfig, device: str, dtype: torch.dtype) -> Tensor:
    """A target's embedding table [V, h]."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (config.vocab_size, config.hidden_size)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def step_bytes(config: DLiteConfig, dtype: torch.dtype) -> int:
    """Bytes of weights that one draft step must read, whatever n is.

    Every matrix of the layers and W_h once, the head's output_proj K times. Left out: embedding
    rows, norms, and the head's 5 R^2 recurrent weights, which stay in the L2 cache.
    """
    h, d = config.hidden_size, config.head_dim
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer = h * heads * d + 3 * h * config.intermediate_size
    output = config.vocab_size * config.sequential_rank
    elements = (
        config.num_hidden_layers * layer + h * config.sequential_rank + config.num_drafts * output
    )
    return elements * dtype.itemsize
