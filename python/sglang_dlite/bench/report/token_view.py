"""One session, token by token: which were drafted and accepted, and which the target made itself.

A speculating server streams one chunk per verify pass (its --stream-interval is 1): the accepted
drafts of the pass, then the target's own token. The client counts the tokens of every chunk. That
a chunk is a pass is checked against the server's own histogram of accepted drafts; a reply that
does not agree is not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_dlite.bench.records import Reply, RoundResult
from sglang_dlite.bench.report.content import Token, TokenRun

Decode = Callable[[Sequence[int]], str]

_MAX_TURNS = 4
_PROMPT_CHARS = 300


def passes_of(reply: Reply) -> list[int] | None:
    """Tokens of each verify pass, from the stream; None where they contradict the server's counts.

    The first chunk is the prefill's token. The last pass may be cut by the end of the reply, so it
    may have accepted more than came.
    """
    if not reply.chunks or reply.chunks[0][1] != 1:
        return None
    sizes = [tokens for _, tokens in reply.chunks[1:]]
    if len(sizes) != reply.verify_passes or 1 + sum(sizes) != reply.output_tokens:
        return None
    left = list(reply.histogram)
    for size in sizes[:-1]:
        if size > len(left) or left[size - 1] == 0:
            return None
        left[size - 1] -= 1
    fits = not sizes or any(
        count and accepted + 1 >= sizes[-1] for accepted, count in enumerate(left)
    )
    return sizes if fits else None


def tokens_of(reply: Reply, decode: Decode) -> list[Token] | None:
    """The reply's tokens with their origin; None where the passes are not certain."""
    sizes = passes_of(reply)
    if sizes is None or len(reply.output_ids) != reply.output_tokens:
        return None
    kinds = [("prefill", "first token, from the prompt's own pass")]
    for number, size in enumerate(sizes, 1):
        # A pass ends with the target's own token, unless the reply ended before it.
        cut = number == len(sizes) and _ends_in_draft(reply, sizes)
        for place in range(size):
            own = place == size - 1 and not cut
            what = "the target's own token" if own else f"draft {place + 1}, accepted"
            kinds.append(("target" if own else "draft", f"pass {number}: {what}"))
    pieces = split_text(reply.output_ids, decode)
    return [Token(text, *kind) for text, kind in zip(pieces, kinds, strict=True)]


def _ends_in_draft(reply: Reply, sizes: Sequence[int]) -> bool:
    """Whether the last pass accepted more drafts than came: then its last token is a draft."""
    accepted = reply.correct_drafts - sum(size - 1 for size in sizes[:-1])
    return accepted >= sizes[-1]


def split_text(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each id adds; a character of several tokens appears with its last one."""
    pieces, shown = [], ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        shown = text
    return pieces


def token_runs(
    results: Sequence[RoundResult], arm: str, decode: Decode, prompts: dict[tuple[str, int], str]
) -> tuple[list[TokenRun], str]:
    """One session of an arm, and how many of its replies could be told apart by pass."""
    mine = [r for r in results if r.round.arm == arm and r.round.cache == "warm"]
    replies = [reply for result in mine for reply in result.replies if reply.verify_passes]
    certain = sum(passes_of(reply) is not None for reply in replies)
    note = (
        f"In {certain} of {len(replies)} replies the streamed chunks agree with the server's own "
        "count of accepted drafts per pass; only such replies are shown."
    )
    for result in mine:
        by_session: dict[str, list[TokenRun]] = {}
        for reply in result.replies:
            tokens = tokens_of(reply, decode)
            if tokens is None:
                continue
            prompt = prompts.get((reply.session, reply.turn), "")
            short = prompt if len(prompt) <= _PROMPT_CHARS else f"… {prompt[-_PROMPT_CHARS:]}"
            heading = (
                f"turn {reply.turn}: {reply.prompt_tokens} prompt tokens, {reply.output_tokens} "
                f"output tokens in {reply.verify_passes} verify passes, τ = {reply.tau:.2f}"
            )
            by_session.setdefault(reply.session, []).append(TokenRun(heading, short, tokens))
        if by_session:
            best = max(by_session.values(), key=len)
            return best[:_MAX_TURNS], note
    return [], note
