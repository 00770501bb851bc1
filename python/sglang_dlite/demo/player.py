"""Plays the session against servers: the same turns, with the same history, on every arm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx

from sglang_dlite.chat_api import (
    Message,
    RequestError,
    chat_request,
    read_acceptance,
    read_usage,
)
from sglang_dlite.demo.session import SYSTEM_PROMPT, Turn

# A small model on a CPU: minutes for one turn are possible, for ever is not.
REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Reply:
    """One answer of a server, and what it cost."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    correct_drafts: int = 0
    verify_passes: int = 0  # 0 without speculation

    @property
    def tok_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify pass, the one that the target itself adds included."""
        if self.verify_passes == 0:
            return None
        return 1 + self.correct_drafts / self.verify_passes


@dataclass(frozen=True)
class Played:
    """A reply with its place in the measurement."""

    arm: str
    repeat: int
    turn: int  # from 1
    reply: Reply


class ChatClient:
    """The part of SGLang's HTTP interface that the demo uses."""

    def __init__(self, base_url: str, transport: httpx.BaseTransport | None = None) -> None:
        # trust_env: a proxy of the environment has no business between us and our own server.
        self._http = httpx.Client(
            base_url=base_url, timeout=REQUEST_TIMEOUT_S, trust_env=False, transport=transport
        )

    def close(self) -> None:
        self._http.close()

    def flush_cache(self) -> None:
        """Empty the prefix cache, so that every repeat begins alike."""
        # The server refuses while a request is in flight, its own health check included.
        self._post("/flush_cache?timeout=30", None)

    def chat(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        """One greedy completion; the whole reply is timed, prefill included."""
        request = chat_request(messages, max_tokens, temperature=0)
        started = time.perf_counter()
        body = self._post("/v1/chat/completions", request).json()
        seconds = time.perf_counter() - started
        usage, acceptance = read_usage(body["usage"]), read_acceptance(body)
        return Reply(
            text=body["choices"][0]["message"]["content"] or "",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            seconds=seconds,
            correct_drafts=acceptance.correct_drafts,
            verify_passes=acceptance.verify_passes,
        )

    def _post(self, path: str, json: object) -> httpx.Response:
        try:
            response = self._http.post(path, json=json)
        except httpx.HTTPError as error:
            raise RequestError(
                f"POST {path} on {self._http.base_url} failed: {type(error).__name__}: {error}"
            ) from error
        if response.is_error:
            raise RequestError(
                f"POST {path} on {self._http.base_url} answered {response.status_code}: "
                f"{response.text.strip()[:500]}"
            )
        return response


def history(turns: Sequence[Turn], replies: Sequence[str]) -> list[Message]:
    """The messages up to the turn that is to be answered next: all of the session so far."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM_PROMPT}]
    for turn, reply in zip(turns, replies, strict=False):
        messages.append({"role": "user", "content": turn.message()})
        messages.append({"role": "assistant", "content": reply})
    messages.append({"role": "user", "content": turns[len(replies)].message()})
    return messages


def play(
    arms: dict[str, ChatClient],
    turns: Sequence[Turn],
    *,
    repeats: int,
    max_tokens: int,
    on_turn: Callable[[int, int, str], None] | None = None,
) -> Iterator[Played]:
    """Yield every reply as it comes.

    The first arm's replies of the first repeat become the session's history, for all arms and
    repeats: the text is then the same everywhere, and only the speed differs. The arms take
    turns, in an order that alternates between repeats, so that a change of the machine's speed
    meets all of them.
    """
    recorded: list[str] = []
    for repeat in range(repeats):
        for client in arms.values():
            client.flush_cache()
            # The first request after a start or a flush pays for what it is not measured for.
            client.chat([{"role": "user", "content": "Say hello."}], max_tokens=8)
            client.flush_cache()
        order = list(arms) if repeat % 2 == 0 else list(arms)[::-1]
        for index in range(len(turns)):
            messages = history(turns, recorded[:index])
            for arm in order:
                if on_turn is not None:
                    on_turn(repeat, index + 1, arm)
                reply = arms[arm].chat(messages, max_tokens)
                if len(recorded) == index:
                    recorded.append(reply.text)
                yield Played(arm, repeat, index + 1, reply)
