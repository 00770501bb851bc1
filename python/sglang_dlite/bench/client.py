"""A streaming chat client: when how many tokens came, and what the server says of them."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx

from sglang_dlite.bench.records import Reply
from sglang_dlite.chat_api import (
    Message,
    RequestError,
    chat_request,
    read_acceptance,
    read_usage,
)

CONNECT_TIMEOUT_S = 30.0
# Between two chunks: a long prompt on a CPU takes minutes to its first token.
SILENCE_TIMEOUT_S = 900.0


class StreamingClient:
    """Asks one server; use one per server, for any number of requests at once."""

    def __init__(self, base_url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        # trust_env: a proxy of the environment has no business between us and our own server.
        self._http = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            transport=transport,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def flush_cache(self) -> None:
        """Empty the prefix cache; the server waits for requests in flight."""
        await self._checked(self._http.build_request("POST", "/flush_cache?timeout=30"))

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float,
        fields: Mapping[str, Any] | None = None,
        session: str = "",
        turn: int = 1,
    ) -> Reply:
        """One completion; `fields` are added to the request.

        Raises:
            RequestError: the server refused, broke off, or sent no token.
        """
        body = chat_request(messages, max_tokens, temperature) | {
            "stream": True,
            # Token counts with every chunk: how many tokens came in it.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_output_ids_in_sglext": True,
            **(fields or {}),
        }
        request = self._http.build_request("POST", "/v1/chat/completions", json=body)
        started, wall = time.perf_counter(), time.time()
        text: list[str] = []
        chunks: list[tuple[float, int]] = []
        counted = 0
        last: dict[str, Any] = {}
        finish_reason = None
        async for event in self._events(request):
            now = time.perf_counter() - started
            if "error" in event:
                raise RequestError(f"the stream broke off: {str(event['error'])[:300]}")
            for choice in event.get("choices") or ():
                text.append(choice["delta"].get("content") or "")
                finish_reason = choice.get("finish_reason") or finish_reason
            last |= {key: event[key] for key in ("usage", "sglext") if event.get(key)}
            tokens = (event.get("usage") or {}).get("completion_tokens", counted)
            if tokens > counted:
                chunks.append((now, tokens - counted))
                counted = tokens
        latency = time.perf_counter() - started
        if not counted:
            raise RequestError(f"the reply holds no token (finish reason {finish_reason})")
        usage, acceptance = read_usage(last["usage"]), read_acceptance(last)
        ids = (last.get("sglext") or {}).get("output_ids") or [[]]
        return Reply(
            session=session,
            turn=turn,
            started=wall,
            latency_s=latency,
            text="".join(text),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            finish_reason=finish_reason,
            chunks=chunks,
            correct_drafts=acceptance.correct_drafts,
            verify_passes=acceptance.verify_passes,
            histogram=list(acceptance.histogram),
            output_ids=list(ids[0]),
        )

    async def _events(self, request: httpx.Request) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of a server-sent event stream, up to [DONE]."""
        response = await self._checked(request, stream=True)
        try:
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    yield json.loads(data)
        except (httpx.HTTPError, ValueError) as error:
            raise RequestError(f"the stream broke off: {type(error).__name__}: {error}") from error
        finally:
            await response.aclose()

    async def _checked(self, request: httpx.Request, stream: bool = False) -> httpx.Response:
        where = f"{request.method} {request.url.path}"
        try:
            response = await self._http.send(request, stream=stream)
            if response.is_error:
                await response.aread()
        except httpx.HTTPError as error:
            raise RequestError(f"{where} failed: {type(error).__name__}: {error}") from error
        if response.is_error:
            text = response.text.strip()[:300]
            raise RequestError(f"{where} answered {response.status_code}: {text}")
        return response
