"""Ollama's streaming endpoints: the last chunk's text is sent, too."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

from sglang_dlite.speculative import serves_dlite


class _TextBeforeTheEnd:
    """A tokenizer manager whose streams bring the last text once more, in a chunk that goes on."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    async def generate_request(self, *args: Any) -> AsyncIterator[dict[str, Any]]:
        async for chunk in self._manager.generate_request(*args):
            if chunk["meta_info"].get("finish_reason") is not None:
                yield {**chunk, "meta_info": {**chunk["meta_info"], "finish_reason": None}}
            yield chunk


async def send_the_last_text(
    original: Callable[..., Any], serving: Any, gen_request: Any, raw_request: Any, model_name: str
) -> Any:
    """AROUND `OllamaServing._stream_chat_response` and `_stream_generate_response`.

    Upstream's final line has no text: without speculation the final chunk mostly is the
    end-of-text token alone. Here it is a block.
    """
    if serves_dlite():
        serving = copy.copy(serving)
        serving.tokenizer_manager = _TextBeforeTheEnd(serving.tokenizer_manager)
    return await original(serving, gen_request, raw_request, model_name)
