"""Ollama's streams through upstream's own endpoint: every text arrives, whatever the last chunk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.ollama.serving import OllamaServing
from sglang_dlite.speculative.ollama_streams import send_the_last_text


class Manager:
    """A tokenizer manager that streams these texts, each the whole reply so far."""

    served_model_name = "m"

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    async def generate_request(self, *_: Any) -> AsyncIterator[dict[str, Any]]:
        for place, text in enumerate(self.texts):
            last = place + 1 == len(self.texts)
            yield {"text": text, "meta_info": {"finish_reason": {"type": "stop"} if last else None}}


def lines_of(name: str, algorithm: str | None, monkeypatch: Any, *texts: str) -> list[dict]:
    spec = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: spec)
    serving = OllamaServing(Manager(*texts))

    async def collect() -> list[dict]:
        original = getattr(OllamaServing, name)
        original = getattr(original, "__wrapped__", original)  # hooks may be in place
        response = await send_the_last_text(original, serving, None, None, "m")
        return [json.loads(line) async for line in response.body_iterator]

    lines = asyncio.run(collect())
    assert isinstance(serving.tokenizer_manager, Manager)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    return lines


@pytest.mark.parametrize("name", ["_stream_chat_response", "_stream_generate_response"])
@pytest.mark.parametrize("texts", [("The", "The answer is 42."), ("All at once",), ("a", "a")])
def test_the_last_block_arrives(name: str, texts: tuple[str, ...], monkeypatch: Any) -> None:
    lines = lines_of(name, "DLITE", monkeypatch, *texts)
    said = [line["message"]["content"] if "message" in line else line["response"] for line in lines]
    assert "".join(said) == texts[-1]


def test_other_algorithms_are_left_alone(monkeypatch: Any) -> None:
    lines = lines_of("_stream_generate_response", None, monkeypatch, "The", "The end.")
    assert [line["response"] for line in lines] == ["The", ""]
