"""Prompts that ask for opaque identifiers, and what must come back.

What users of other drafters report: `nova-x7` becomes `nova-7` now and then, at some widths, only
when requests of different lengths share the batch, and nothing says so.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import engine
from oracle_engine import output_ids

CONCURRENCY = 12
NUM_PROMPTS = 24  # two for each place in the batch: requests come and go at all times
NEW_TOKENS = 40
WIDTHS = tuple(range(2, 9))  # every D of a drafter of block_size 8
SYLLABLES = ("nova", "kimi", "orca", "zeph", "quill", "brix", "tarn", "velo")


def identifier(rng: random.Random) -> str:
    """What agents copy: model names, hashes, ticket numbers, UUIDs, mangled symbols."""
    kind = rng.randrange(5)
    if kind == 0:
        return f"{rng.choice(SYLLABLES)}-{rng.choice('kxvr')}{rng.randrange(1, 100)}"
    if kind == 1:
        return f"{rng.getrandbits(48):012x}"
    if kind == 2:
        return f"REQ-{rng.randrange(10**6):06d}"
    if kind == 3:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"_Z{rng.randrange(3, 20)}{rng.choice(SYLLABLES)}{rng.randrange(100)}Ev"


def words(text: str) -> set[str]:
    """The words that may be identifiers: those with a digit."""
    return {word for word in re.findall(r"[\w-]+", text) if re.search(r"\d", word)}


def encode_chat(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """Each text as a chat's user message, up to where the reply begins."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )["input_ids"]
        for text in texts
    ]


@dataclass(frozen=True)
class Echo:
    """The requests, and what the target alone replies (empty until it has)."""

    texts: list[str]
    prompts: list[list[int]]
    plain: list[dict[str, Any]]

    def play(self, running: Any) -> list[dict[str, Any]]:
        """All requests at once; the engine runs twelve of them together."""
        params = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
        return running.generate(input_ids=self.prompts, sampling_params=params)

    def copied(self) -> list[set[str]]:
        """The identifiers of each prompt that the target alone repeats."""
        pairs = zip(self.texts, self.plain, strict=True)
        return [words(answer["text"]) & words(text) for text, answer in pairs]

    def check(self, answers: Sequence[dict[str, Any]]) -> None:
        """Token ids are the target's own; what an identifier became is said first."""
        for text, plain, answer in zip(self.texts, self.plain, answers, strict=True):
            invented = words(answer["text"]) - words(text) - words(plain["text"])
            assert not invented, f"{invented} in {answer['text']!r}, asked {text!r}"
        assert output_ids(answers) == output_ids(self.plain)


def prompt_texts() -> list[str]:
    """Lists of one to five identifiers, behind notes of mixed length."""
    rng = random.Random(5)
    texts = []
    for index in range(NUM_PROMPTS):
        names = [identifier(rng) for _ in range(1 + index % 5)]
        notes = "".join(
            f"Job {identifier(rng)} was handed to {identifier(rng)}.\n"
            for _ in range(rng.randrange(6))
        )
        listed = "\n".join(names)
        texts.append(f"{notes}Repeat these identifiers verbatim, one per line:\n{listed}")
    return texts


def record_echo(model: Path, dtype: str) -> Echo:
    """The target alone, asked all of it (one engine start)."""
    texts = prompt_texts()
    asked = Echo(texts, encode_chat(model, texts), [])
    with engine(model, dtype=dtype, max_running_requests=CONCURRENCY) as running:
        return Echo(asked.texts, asked.prompts, asked.play(running))
