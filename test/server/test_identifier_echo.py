"""Opaque identifiers come out as they went in, at every verify width, twelve requests at a time.

What users of other drafters report: `nova-x7` becomes `nova-7` now and then, at some widths, only
when requests of different lengths share the batch, and nothing says so. Here a verify pass rounds
as a single-token step does (see `exact_dtype`), so that token ids are compared with those of the
target alone; what an identifier became is said first, since it is what one wants to know.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import engine
from oracle_engine import output_ids
from recorded_drafts import RecordedEngine
from sglang_dlite.assets import shipped_drafter_dir

pytestmark = pytest.mark.server

NEW_TOKENS = 40
NUM_PROMPTS = 24  # two for each place in the batch: requests come and go at all times
WIDTHS = tuple(range(2, 9))
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


@dataclass(frozen=True)
class Echo:
    """The requests, and what the target alone replies."""

    texts: list[str]
    prompts: list[list[int]]
    plain: list[dict[str, Any]]

    def play(self, running: Any) -> list[dict[str, Any]]:
        """All requests at once; the engine runs twelve of them together."""
        params = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
        return running.generate(input_ids=self.prompts, sampling_params=params)

    def check(self, answers: Sequence[dict[str, Any]]) -> None:
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
            for _ in range(rng.randrange(9))
        )
        listed = "\n".join(names)
        texts.append(f"{notes}Repeat these identifiers verbatim, one per line:\n{listed}")
    return texts


@pytest.fixture(scope="module")
def echo(embedded_model: Path, exact_dtype: str) -> Echo:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_model)
    texts = prompt_texts()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )["input_ids"]
        for text in texts
    ]
    with engine(embedded_model, dtype=exact_dtype, max_running_requests=12) as running:
        return Echo(texts, prompts, Echo(texts, prompts, []).play(running))


def test_the_target_echoes(echo: Echo) -> None:
    """Else the other tests hold nothing: most replies have identifiers of their prompt."""
    copied = [words(a["text"]) & words(t) for t, a in zip(echo.texts, echo.plain, strict=True)]
    assert sum(map(bool, copied)) > NUM_PROMPTS / 2
    assert max(map(len, echo.prompts)) > 3 * min(map(len, echo.prompts))


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width(recorded_engine: RecordedEngine, echo: Echo, width: int) -> None:
    """One engine for all of them: adaptive width, told what to take."""
    recorded_engine.set_width(width)
    answers = echo.play(recorded_engine.engine)
    echo.check(answers)
    kept = [len(a["meta_info"]["spec_correct_drafts_histogram"]) - 1 for a in answers]
    assert max(kept) == width - 1  # drafts were kept at all places of a block, and no pass is wider


@pytest.fixture(scope="module", params=[(o, w) for o in "01" for w in WIDTHS], ids=str)
def fixed_width(
    request: pytest.FixtureRequest, embedded_model: Path, exact_dtype: str
) -> Iterator[Any]:
    """An engine as users start it, for one width, without or with the overlap scheduler."""
    overlap, width = request.param
    with engine(
        embedded_model,
        shipped_drafter_dir(),
        env={"DLITE_CPU_OVERLAP": overlap},
        dtype=exact_dtype,
        max_running_requests=12,
        speculative_num_draft_tokens=width,
    ) as running:
        assert running.get_server_info()["speculative_num_draft_tokens"] == width
        yield running


@pytest.mark.slow
def test_fixed_widths_and_both_schedulers(fixed_width: Any, echo: Echo) -> None:
    """Cold, then with all prompts in the prefix cache."""
    echo.check(echo.play(fixed_width))
    echo.check(echo.play(fixed_width))
