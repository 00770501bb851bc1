"""Conversations with the target, many at once, every reply kept as soon as it is there."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from sglang_dlite.training.dataset import ReplyRecord, tokens_hash
from sglang_dlite.training.prompts import Message, Prompt, conversation_hash

_QUESTION_TOKENS = 80
_QUESTION_TRIES = 20
_QUESTION_MIN_CHARACTERS = 15


class AnsweringError(RuntimeError):
    """The engine refused a prompt."""


class Answer(NamedTuple):
    """A reply: token ids, the end-of-text token included, and why it ended."""

    ids: list[int]
    finish: str  # stop or length
    meta: dict[str, Any]  # the engine's meta_info
    seconds: float


# (prompt ids, sampling parameters) -> the reply
Ask = Callable[[list[int], dict[str, Any]], Awaitable[Answer]]


def engine_ask(engine: Any) -> Ask:
    """Ask a running sglang.Engine."""

    async def ask(prompt_ids: list[int], params: dict[str, Any]) -> Answer:
        began = time.perf_counter()
        try:
            result = await engine.async_generate(input_ids=prompt_ids, sampling_params=params)
        except ValueError as error:  # a prompt that is too long, a parameter out of range
            raise AnsweringError(f"the engine refused a prompt: {error}") from error
        ids, reason = list(result["output_ids"]), result["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            raise AnsweringError(f"the engine gave up on a prompt: {reason.get('message')}")
        matched = reason.get("matched")
        if isinstance(matched, int) and ids[-1:] != [matched]:
            ids.append(matched)
        return Answer(ids, reason["type"], result["meta_info"], time.perf_counter() - began)

    return ask


class Keeper(Protocol):
    """Where replies go; `ReplyWriter` is one."""

    done: dict[str, dict[str, Any]]  # by id: what the target asked itself
    made: dict[str, dict[str, Any]]  # by prompt, its `conversation_hash` or `tokens_hash`

    def append(self, record: ReplyRecord) -> None: ...


@dataclass
class Answering:
    """How to answer; `run` does it."""

    ask: Ask
    tokenizer: Any
    writer: Keeper
    params: dict[str, Any]  # of the replies
    max_prompt_tokens: int
    on_reply: Callable[[ReplyRecord, Answer], object]
    on_skip: Callable[[int], object]  # so many replies will not be made, or are there already
    template: dict[str, Any] = field(default_factory=dict)  # further arguments of the chat template
    # Whether a question that the target asks itself must not be used.
    unwanted: Callable[[str], bool] = lambda _: False
    skipped: Counter[str] = field(default_factory=Counter)  # replies not made, by the reason

    def __post_init__(self) -> None:
        self._questions = {record["question"] for record in self.writer.done.values()}

    async def run(self, prompts: Iterable[Prompt], concurrency: int) -> None:
        """Answer every turn of every prompt that the writer does not hold, `concurrency` at once.

        The turns of a conversation follow each other, so that the engine's prefix cache serves
        what a turn shares with the one before.
        """
        waiting = iter(prompts)

        async def worker() -> None:
            for prompt in waiting:
                await self._converse(prompt)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(worker())
        except BaseExceptionGroup as errors:  # one is enough to know, the others were cancelled
            raise errors.exceptions[0] from errors

    async def _converse(self, prompt: Prompt) -> None:
        messages: list[Message] = []
        for number, turn in enumerate(prompt.turns):
            reply_id = f"{prompt.id}#{number}"
            record, question = None, ""
            if prompt.asks_itself:
                record = self.writer.done.get(reply_id)
                question = record["question"] if record else await self._question(messages)
                if not question:
                    self._skip(prompt, number, "the target asked nothing usable")
                    return
                messages.append({"role": "user", "content": question})
            messages += turn.messages
            key = conversation_hash(messages)
            record = record or self.writer.made.get(key)
            ids = [] if record else self.encode(messages)
            record = record or self.writer.made.get(tokens_hash(ids))
            if record is not None:
                self.on_skip(1)
            elif len(ids) > self.max_prompt_tokens:  # later turns are longer still
                self._skip(prompt, number, "the prompt is too long")
                return
            else:
                answer = await self.ask(ids, self.params)
                made = ReplyRecord(
                    id=reply_id,
                    source=prompt.source,
                    turn=number,
                    category=prompt.category,
                    prompt_ids=ids,
                    reply_ids=answer.ids,
                    text=self.tokenizer.decode(answer.ids, skip_special_tokens=True),
                    finish=answer.finish,
                    question=question,
                    prompt_hash=key,
                )
                self.writer.append(made)
                self.on_reply(made, answer)
                record = vars(made)
            said = record["text"] if turn.recorded is None else turn.recorded
            messages.append({"role": "assistant", "content": said})

    def _skip(self, prompt: Prompt, number: int, reason: str) -> None:
        """Give up on a conversation from turn `number` on."""
        count = len(prompt.turns) - number
        self.skipped[reason] += count
        self.on_skip(count)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the target's reply begins."""
        chat = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **self.template
        )
        return list(self.tokenizer.encode(chat, add_special_tokens=False))

    async def _question(self, history: Sequence[Message]) -> str:
        """What the target says in the user's place: the prompt ends in the template's user header.

        history: the conversation so far, empty for a first question. "" where `_QUESTION_TRIES`
        brought nothing that is whole, new and wanted: a repeated or cut question is no new data.
        """
        mark = "\u241f"
        chat = self.tokenizer.apply_chat_template(
            [*history, {"role": "user", "content": mark}], tokenize=False, **self.template
        )
        header = list(self.tokenizer.encode(chat.rpartition(mark)[0], add_special_tokens=False))
        if len(header) > self.max_prompt_tokens:
            return ""
        params = {"temperature": 1.0, "max_new_tokens": _QUESTION_TOKENS}
        for _ in range(_QUESTION_TRIES):
            answer = await self.ask(header, params)
            text = self.tokenizer.decode(answer.ids, skip_special_tokens=True).strip()
            whole = answer.finish == "stop" and len(text) >= _QUESTION_MIN_CHARACTERS
            if whole and text not in self._questions and not self.unwanted(text):
                self._questions.add(text)
                return text
        return ""
