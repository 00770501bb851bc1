"""A tiny data set, written through the real writer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang_dlite.training.replies import ReplyWriter, StoreFormat

VOCAB, HIDDEN, LAYERS, TOP = 61, 16, (0, 2, 3), 5


def tiny_format(**changes) -> StoreFormat:
    values = {
        "target": "tiny",
        "target_layer_ids": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "top_count": TOP,
        "max_new_tokens": 20,
    }
    return StoreFormat(**(values | changes))


def write_replies(folder: Path, part: str, lengths: list[int], seed: int = 0) -> list[dict]:
    """Random replies of these lengths; returns the records."""
    torch.manual_seed(seed)
    writer = ReplyWriter(folder, part, tiny_format())
    for index, length in enumerate(lengths):
        reply = torch.randint(0, VOCAB, (length,)).tolist()
        top = torch.randn(length, VOCAB).log_softmax(-1).topk(TOP)
        writer.append(
            {
                "id": f"{part}/{index}#0",
                "source": f"source-{index % 2}",
                "prompt_tail": torch.randint(0, VOCAB, (4,)).tolist(),
                "reply_ids": reply,
            },
            torch.randn(length, len(LAYERS), HIDDEN).bfloat16(),
            top.indices.to(torch.int32),
            top.values.to(torch.float16),
        )
    writer.close()
    return list(writer.done.values())


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_replies(folder, "part-0", [9, 1, 12, 5], seed=0)
    write_replies(folder, "part-1", [7, 20, 2], seed=1)
    return folder
