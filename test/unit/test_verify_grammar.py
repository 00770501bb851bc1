"""Grammars on verify rows: each row's mask is that of a matcher which has read just its prefix."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang_dlite.speculative.verify_logits import VerifyLogits

VOCAB, EOS = tiny_models.VOCAB_SIZE, tiny_models.EOS_ID
THINK_END = "/#"
SCHEMA = json.dumps(
    {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_models.byte_tokenizer()


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    if request.param == "xgrammar":
        return XGrammarGrammarBackend(tokenizer, VOCAB, model_eos_token_ids=[EOS])
    return GuidanceBackend(tokenizer, n_vocab=VOCAB, eos_token_ids=[EOS])


@pytest.fixture(scope="module")
def ids_of(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text to ids; '$' stands for end-of-text."""

    def call(text: str) -> list[int]:
        return [EOS if c == "$" else tokenizer.encode(c)[0] for c in text]

    return call


def masks(make: Callable[[], Any], output: list[int], chain: list[int]) -> torch.Tensor:
    """What is allowed at each row [1 + m, V] bool, with a matcher of its own for every row.

    Nothing is asked of rows behind a draft that the grammar forbids, or behind its end.
    """
    allowed = []
    for j in range(len(chain) + 1):
        grammar, legal = make(), True
        for place, token in enumerate([*output, *chain[:j]]):
            legal = legal and not grammar.is_terminated()
            if legal and place >= len(output):
                legal = bool(row_mask(grammar)[token])
            if legal:
                grammar.accept_token(token)
        open_row = not legal or grammar.is_terminated()
        allowed.append(torch.ones(VOCAB, dtype=torch.bool) if open_row else row_mask(grammar))
    return torch.stack(allowed)


def row_mask(grammar: Any) -> torch.Tensor:
    packed = grammar.allocate_vocab_mask(vocab_size=VOCAB, batch_size=1, device="cpu")
    grammar.fill_vocab_mask(packed, 0)
    logits = torch.zeros(1, VOCAB)
    grammar.apply_vocab_mask(logits=logits, vocab_mask=packed)
    return logits[0] == 0


def batch_of(grammars: list[Any]) -> Any:
    info = SimpleNamespace(
        acc_additive_penalties=None,
        has_custom_logit_processor=False,
        logit_bias=None,
        vocab_size=VOCAB,
        grammar_mask=None,
    )
    reqs = [SimpleNamespace(grammar=grammar) for grammar in grammars]
    return SimpleNamespace(reqs=reqs, sampling_info=info, has_grammar=True)


def allowed_by_apply(
    batch: Any, candidates: list[list[int]], barrier: Callable[[], None] | None = None
) -> torch.Tensor:
    """[n, D, V] bool"""
    table = torch.tensor(candidates)
    options = VerifyLogits(table.shape[1], lambda: pytest.fail("no history is needed"))
    logits = torch.zeros(table.numel(), VOCAB)
    options.apply(batch, table, logits, options.before_verify(batch, table), barrier)
    return (logits == 0).view(*table.shape, VOCAB)


CASES = [
    # pattern, output so far (it ends in the anchor), drafts
    ("regex", "[ab]+c", "a", "abab"),
    ("regex", "[ab]+c", "a", "abc$"),  # the grammar's end inside the block
    ("regex", "[ab]+c", "a", "c$ab"),  # and drafts behind its end-of-text
    ("regex", "[ab]+c", "a", "bxab"),  # a draft that it forbids
    ("regex", "[ab]+c", "ab", "xxxx"),
    ("regex", "[ab]+c", "abc", "$abc"),
    ("regex", "[ab]+c", "abc$", "abab"),  # terminated: a step of overshoot
    ("json", SCHEMA, "{", '"a":'),
    ("json", SCHEMA, '{"a":"', 'yy"}'),
    ("json", SCHEMA, '{"a":"', 'x"}$'),
    ("ebnf", 'root ::= "a" ("b" | "cd")', "a", "cd$a"),
]


def compiled(backend: Any, kind: str, pattern: str) -> Any:
    return getattr(backend, f"dispatch_{kind}")(pattern)


@pytest.mark.parametrize("kind,pattern,output,drafts", CASES)
def test_every_row_of_a_chain(
    backend: Any, ids_of: Any, kind: str, pattern: str, output: str, drafts: str
) -> None:
    if kind == "ebnf" and isinstance(backend, GuidanceBackend):
        pytest.skip("llguidance reads lark, not this notation")
    template = compiled(backend, kind, pattern)
    grammar = template.copy()
    for token in ids_of(output):
        grammar.accept_token(token)
    before = None if grammar.is_terminated() else row_mask(grammar)
    # A request without a grammar comes first: rows of the mask are rows of the logits.
    chain = [ids_of(output)[-1], *ids_of(drafts)]
    got = allowed_by_apply(batch_of([None, grammar]), [[1] * len(chain), chain])
    assert got[0].all()
    expected = masks(template.copy, ids_of(output), ids_of(drafts))
    assert torch.equal(got[1], expected)
    if before is not None:  # the drafts were taken back, although none may be accepted
        assert torch.equal(row_mask(grammar), before)


@pytest.mark.parametrize(
    "output,drafts",
    [
        ("x", "y/#a"),  # the boundary inside the block
        ("x/", "#abc"),  # begun before it
        ("x", "//#c"),
        ("x", "y/ab"),  # not a boundary
        ("x/#", "abc$"),  # behind it
        ("x", "/#xa"),  # and a draft behind the boundary that the grammar forbids
    ],
)
def test_reasoning_that_ends_inside_a_block(
    backend: Any, ids_of: Any, output: str, drafts: str
) -> None:
    """Thinking is free, the answer is not; the boundary is two tokens long."""
    template = compiled(backend, "regex", "[ab]+c")

    def make() -> Any:
        grammar = ReasonerGrammarObject(template.copy(), ids_of(THINK_END))
        grammar.maybe_init_reasoning(True)
        return grammar

    grammar = make()
    for token in ids_of(output):
        grammar.accept_token(token)
    chain = [ids_of(output)[-1], *ids_of(drafts)]
    for _ in range(2):  # the second time shows that nothing was left behind
        got = allowed_by_apply(batch_of([grammar]), [chain])
        assert torch.equal(got[0], masks(make, ids_of(output), ids_of(drafts)))


def test_the_pending_step_is_read_before_the_grammar(backend: Any, ids_of: Any) -> None:
    """Under overlap the scheduler's barrier feeds the newest output to the matcher."""
    template = compiled(backend, "regex", "[ab]+c")
    grammar = template.copy()
    grammar.accept_token(ids_of("a")[0])

    def barrier() -> None:
        for token in ids_of("bc"):
            grammar.accept_token(token)

    got = allowed_by_apply(batch_of([grammar]), [ids_of("c$ab")], barrier)
    assert got[0, 0].nonzero().flatten().tolist() == [EOS]


def test_a_row_that_allows_nothing_takes_token_0(backend: Any, ids_of: Any) -> None:
    """Behind a draft that ends the grammar early, end-of-text is all there is, and held back."""
    grammar = compiled(backend, "regex", "x(a|b{9})")
    (start,) = ids_of("x")
    grammar.accept_token(start)
    batch = batch_of([grammar])
    batch.sampling_info.logit_bias = torch.zeros(1, VOCAB)
    batch.sampling_info.logit_bias[0, EOS] = float("-inf")  # as min_new_tokens does
    table = torch.tensor([[start, *ids_of("abb")]])
    options = VerifyLogits(table.shape[1], lambda: pytest.fail("no history is needed"))
    logits = torch.zeros(table.numel(), VOCAB)
    options.apply(batch, table, logits, options.before_verify(batch, table), None)
    assert set((logits[0] == 0).nonzero().flatten().tolist()) == set(ids_of("ab"))
    assert (logits[1] == 0).nonzero().flatten().tolist() == [0]
    drawn = logits.softmax(-1).multinomial(1)  # an empty row would end the scheduler
    assert int(drawn[1]) == 0
