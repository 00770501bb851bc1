"""Cutting sessions to a context length, so that no turn is sent that the servers would refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_dlite.bench.config import WorkloadSpec
from sglang_dlite.bench.workloads.sessions import Session

CountTokens = Callable[[str], int]

# Role markers and line ends of a chat template, per message; the widest templates stay below.
_PER_MESSAGE = 12


# No tokenizer makes fewer tokens of text: what has more characters need not be counted.
_CHARS_PER_TOKEN = 16


def fit(
    sessions: Sequence[Session], spec: WorkloadSpec, count: CountTokens
) -> tuple[list[Session], list[str]]:
    """The first sessions whose turns surely fit, and what was cut on the way, by name.

    A reply is reckoned with its longest length, or with the recorded one where that is fed back.
    """
    kept: list[Session] = []
    cut: list[str] = []
    for session in sessions:
        if len(kept) == spec.sessions:
            break
        if sum(len(turn.text) for turn in session.turns) < spec.min_chars:
            cut.append(f"{session.id}: shorter than min_chars {spec.min_chars}")
            continue
        used, turns = 0, 0
        for turn in session.turns:
            too_long = len(turn.text) > _CHARS_PER_TOKEN * spec.max_context
            used += spec.max_context if too_long else count(turn.text)
            used += _PER_MESSAGE * (len(turn.messages) + 1)
            if used + spec.max_tokens > spec.max_context:
                break
            turns += 1
            recorded = turn.recorded if spec.history == "recorded" else None
            used += spec.max_tokens if recorded is None else count(recorded)
        if turns < len(session.turns):
            cut.append(
                f"{session.id}: {turns} of {len(session.turns)} turns fit into max_context "
                f"{spec.max_context}"
            )
        if turns:
            kept.append(session.first(turns))
    return kept, cut


def tokenizer_count(target: str) -> CountTokens:
    """Counts tokens with the target's own tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False, verbose=False))
