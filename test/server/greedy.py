"""Greedy decoding by transformers alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def greedy_with_transformers(target: Path, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens after the prompt, in fp32; the end-of-text token does not end it."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
