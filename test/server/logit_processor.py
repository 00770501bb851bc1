"""A custom logit processor that depends on every token before it, and on how many there are."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class PrefixHash(CustomLogitProcessor):
    """Favours one printable token, chosen by a hash of prompt and output, by `strength`."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        assert custom_param_list is not None and len(custom_param_list) == logits.shape[0]
        for row, params in zip(logits, custom_param_list, strict=True):
            req = params["__req__"]
            value = 0
            for token in [*req.origin_input_ids, *req.output_ids]:
                value = (value * 31 + token + 1) % 1_000_003
            row[value % 94] += params["strength"]
        return logits
