"""Which tokens were drafted: only told where the stream and the server's counts agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_dlite.bench.records import Reply, RoundResult
from sglang_dlite.bench.report.token_view import passes_of, split_text, token_runs, tokens_of

MakeReply = Callable[..., Reply]


def letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def test_kinds_of_tokens(make_reply: MakeReply) -> None:
    tokens = tokens_of(make_reply(), letters)
    assert tokens is not None
    assert "".join(token.text for token in tokens) == "abcdefg"
    kinds = [token.kind for token in tokens]
    assert kinds == ["prefill", "draft", "draft", "target", "target", "draft", "target"]
    assert tokens[2].hint == "pass 1: draft 2, accepted"


def test_a_reply_that_ends_inside_a_pass(make_reply: MakeReply) -> None:
    # The last pass accepted 4 drafts, of which the length limit let 2 through.
    reply = make_reply(histogram=[1, 0, 1, 0, 1], correct_drafts=6)
    tokens = tokens_of(reply, letters)
    assert tokens is not None
    assert [token.kind for token in tokens[-2:]] == ["draft", "draft"]


def test_what_disagrees_is_not_shown(make_reply: MakeReply) -> None:
    assert passes_of(make_reply()) == [3, 1, 2]
    merged = [(0.1, 1), (0.2, 4), (0.4, 2)]  # two passes in one chunk
    assert passes_of(make_reply(chunks=merged)) is None
    assert passes_of(make_reply(histogram=[2, 1])) is None
    assert passes_of(make_reply(chunks=[(0.1, 4), (0.3, 1), (0.4, 2)])) is None
    assert passes_of(make_reply(output_tokens=8)) is None
    assert tokens_of(make_reply(output_ids=[1]), letters) is None


def test_characters_of_several_tokens() -> None:
    data = "é!".encode()

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    assert split_text(list(data), decode) == ["", "é", "!"]


def test_one_session_is_shown(make_result: Callable[..., RoundResult]) -> None:
    prompts = {("s", 1): "p" * 1000}
    runs, note = token_runs([make_result()], "DLITE", letters, prompts)
    assert len(runs) == 2 and "2 of 2 replies" in note
    assert runs[0].heading.startswith("turn 1: 600 prompt tokens, 7 output tokens in 3 verify")
    assert runs[0].prompt.startswith("…") and len(runs[0].prompt) < 400
    assert token_runs([make_result()], "other", letters, prompts)[0] == []
