"""Are a reply's log-probabilities those of plain decoding?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from workloads import Request

FORBIDDEN = -1e30  # options give a token the least float there is


def check_logprobs(
    request: Request,
    answer: dict[str, Any],
    expected: dict[str, Any],
    kinds: Sequence[str] = ("input", "output"),
) -> None:
    """Of all tokens of these kinds and of the best ones at each place, within 1e-4."""
    ours, theirs = answer["meta_info"], expected["meta_info"]
    ids = {"input": list(request.prompt), "output": expected["output_ids"]}
    for kind in kinds:
        mine, plain = (meta[f"{kind}_token_logprobs"] for meta in (ours, theirs))
        assert [token for _, token, *_ in mine] == [token for _, token, *_ in plain] == ids[kind]
        check_entries(mine, plain)
        best, plain_best = (meta[f"{kind}_top_logprobs"] for meta in (ours, theirs))
        for mine, plain in zip(best, plain_best, strict=True):
            assert (mine is None) == (plain is None)  # nothing comes before the first token
            check_entries(mine or (), plain or ())


def check_entries(mine: Sequence[Any], plain: Sequence[Any]) -> None:
    """Entries are (log-probability or None, token, text)."""
    mine, plain = known(mine), known(plain)
    assert [token for _, token, *_ in mine] == [token for _, token, *_ in plain]
    assert [value for value, *_ in mine] == pytest.approx([value for value, *_ in plain], abs=1e-4)


def known(entries: Sequence[Any]) -> list[Any]:
    """Without the first input token, and without forbidden ones, which have no order."""
    return [entry for entry in entries if entry[0] is not None and entry[0] > FORBIDDEN]
