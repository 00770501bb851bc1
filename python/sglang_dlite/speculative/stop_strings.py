"""Stop strings in a step that outputs several tokens: whichever comes first ends the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dlite.speculative import serves_dlite


def check_token_by_token(
    original: Callable[..., None], req: Any, new_accepted_len: int = 1
) -> None:
    """AROUND `Req.update_finish_state`: with stop strings, as after each token of plain decoding.

    Upstream looks at all tokens of a step at once, for the strings in the order of the request, and
    for stop tokens only if there is no string: of two strings in a block the later one may win, and
    so may a string behind the end-of-text token. Tokens behind the end are no reasoning tokens.
    """
    params = req.sampling_params
    if (
        new_accepted_len <= 1
        or not (params.stop_strs or params.stop_regex_strs)
        or req.finished()
        or req.to_finish
        or not serves_dlite()
    ):
        original(req, new_accepted_len)
    else:
        _check_each(original, req, new_accepted_len)
    if req.finished_len is not None and serves_dlite():
        # Upstream has counted the whole step's tokens as reasoning, which begins with the output.
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)


def _check_each(original: Callable[..., None], req: Any, new_accepted_len: int) -> None:
    """`update_finish_state` after each of the newest tokens."""
    tokens = req.output_ids[-new_accepted_len:]
    del req.output_ids[-new_accepted_len:]
    # A grammar has read the whole step by now: its end is the step's last token.
    grammar, req.grammar = req.grammar, None
    for place, token in enumerate(tokens, start=1):
        req.output_ids.append(token)
        if place == len(tokens):
            req.grammar = grammar
        original(req, 1)
        if req.finished():
            if req.finished_len is None:
                req.finished_len = len(req.output_ids)
            req.output_ids.extend(tokens[place:])  # whose K/V is in the cache as well
            break
    req.grammar = grammar
